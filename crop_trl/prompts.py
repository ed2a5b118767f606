"""Kinds of prompt: their names and columns, the prompts of a row, the wrapper round a problem, the rendering.

A plural column holds several prompts of one kind. Unrelated prompts (`negative`) are drawn from the batch itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .files import read_object, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Which dataset column holds each kind of prompt; with an "s" at its end, a list of them.
PROMPT_COLUMNS = {
    "original": "prompt",
    "paraphrase": "paraphrase_prompt",
    "counterfactual": "counterfactual_prompt",
}
NEGATIVE = "negative"

TokenIds = Sequence[int]


def split_signal(need: str) -> tuple[str, str]:
    """Who reads the responses and after which kind of prompt, from a signal's name."""
    scorer, _, kind = need.partition("/")
    if kind not in PROMPT_COLUMNS and kind != NEGATIVE:
        raise ValueError(f"Unknown signal {need!r}: the prompt is one of {', '.join((*PROMPT_COLUMNS, NEGATIVE))}.")
    return scorer, kind


def prompt_kinds(needs: Sequence[str]) -> list[str]:
    """Kinds of prompt that a dataset has to hold for some signals, `"original"` first, each once."""
    kinds = ["original", *(split_signal(need)[1] for need in needs)]
    return [kind for kind in dict.fromkeys(kinds) if kind != NEGATIVE]


def prompt_variants(row: Mapping[str, Any], kind: str) -> list:
    """The prompts of one kind in a dataset row: those of the plural column, else the one of the singular, else none."""
    column = PROMPT_COLUMNS[kind]
    several = row.get(column + "s") if kind != "original" else None
    if several:
        if not isinstance(several, list) or isinstance(several[0], dict):
            raise ValueError(
                f"`{column}s` must hold a list of prompts in each row, got {str(several)[:80]!r}; for a single prompt "
                f"use `{column}`."
            )
        return list(several)
    one = row.get(column)
    return [] if one is None else [one]


def prompt_text(prompt) -> str | None:
    """A prompt for reading: plain text as it is, of messages their contents in lines, `None` for `None`."""
    if prompt is None or isinstance(prompt, str):
        return prompt
    messages = [prompt] if isinstance(prompt, Mapping) else prompt
    return "\n".join(_content_text(message.get("content")) for message in messages)


def _content_text(content) -> str:
    """A message's content as one text; it may be in parts, and a call of a tool has none."""
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else part.get("text", "") for part in content)
    return "" if content is None else str(content)


def normal_prompt(prompt, tokenizer: PreTrainedTokenizerBase):
    """
    A prompt as a tokenizer takes it: the content of a message as one text, plain text without a BOS that would come
    twice.
    """
    if isinstance(prompt, str):
        begin = tokenizer.bos_token
        adds_it = begin and prompt.startswith(begin) and tokenizer(text="")["input_ids"][:1] == [tokenizer.bos_token_id]
        return prompt.removeprefix(begin) if adds_it else prompt
    return [{**m, "content": _content_text(m["content"])} if isinstance(m.get("content"), list) else m for m in prompt]


def prompt_texts(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The first prompt of each kind for reading, row by row; kinds that some row lacks are left out."""
    texts = {}
    for kind in PROMPT_COLUMNS:
        variants = [prompt_variants(row, kind) for row in rows]
        if rows and all(variants):
            texts[kind] = [prompt_text(several[0]) for several in variants]
    return texts


def tokenize_variants(
    rows: Sequence[Mapping[str, Any]], kind: str, tokenize: Callable[[list], list[list[int]]]
) -> list[list[list[int]]]:
    """Token ids of every prompt of one kind, in one call to the tokenizer: for each row, for each of its prompts."""
    variants = [prompt_variants(row, kind) for row in rows]
    ids = iter(tokenize([prompt for row in variants for prompt in row]))
    return [[next(ids) for _ in row] for row in variants]


def draw_negatives(
    batch_prompt_ids: Sequence[TokenIds], rows: Sequence[int], count: int, seed: int, step: int
) -> list[list[TokenIds]]:
    """
    Token ids of `count` unrelated prompts for each of `rows`, drawn from the others of the global batch by seed, step
    and row alone. Raises `ValueError` for too few.
    """
    distinct = list(dict.fromkeys(map(tuple, batch_prompt_ids)))
    if len(distinct) - 1 < count:
        raise ValueError(
            f"`credit_num_negatives` {count} needs as many other prompts in a batch of rollouts, which holds "
            f"{len(distinct)} distinct ones; raise `prompts_per_step` or lower `credit_num_negatives`."
        )
    drawn = []
    for row in rows:
        own = tuple(batch_prompt_ids[row])
        others = [prompt for prompt in distinct if prompt != own]
        picks = np.random.default_rng([seed + step, row]).choice(len(others), size=count, replace=False)
        drawn.append([list(others[i]) for i in picks])
    return drawn


PLACEHOLDER = "{problem}"
# Asks for \boxed{}, since that is where evaluation looks for the answer. Training, triplets and evaluation share it.
DEFAULT_PROMPT_TEMPLATE = PLACEHOLDER + "\n\nWork through the problem and write the final answer inside \\boxed{}."
# Lies beside a model that was trained with a wrapper, and says with which.
TEMPLATE_FILE = "prompt_template.json"

_MARGIN = " \t\n"  # not all of str.strip(): other white space is screened as control characters


def check_template(template: str, setting: str = "prompt_template") -> str:
    """Return `template`, or raise `ValueError`, naming `setting`, when it does not hold `{problem}` exactly once."""
    if template.count(PLACEHOLDER) != 1:
        raise ValueError(
            f"`{setting}` must contain {PLACEHOLDER} exactly once, got {template!r}; for no wrapper, set it to "
            f"'{PLACEHOLDER}'."
        )
    return template


def wrap_problem(problem: str, template: str = DEFAULT_PROMPT_TEMPLATE) -> str:
    """Put the answer-format wrapper around a bare problem. Braces in either text are left as they are."""
    return template.replace(PLACEHOLDER, problem)


def unwrap_problem(text: str, template: str = DEFAULT_PROMPT_TEMPLATE) -> str:
    """Take the wrapper off again, however often it is there; white space round it and its halves does not matter."""
    before, after = (part.strip(_MARGIN) for part in template.split(PLACEHOLDER))
    while before or after:
        bare = text.strip(_MARGIN)
        if len(bare) < len(before) + len(after) or not (bare.startswith(before) and bare.endswith(after)):
            break
        text = bare[len(before) : len(bare) - len(after)].strip(_MARGIN)
    return text


def save_template(folder: str | Path, template: str) -> None:
    """Put the wrapper that a model was trained with beside the model."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_json(Path(folder) / TEMPLATE_FILE, {"prompt_template": check_template(template)})


def saved_template(model: str | Path, hub: bool = True) -> str | None:
    """
    The wrapper that a model (a run, a checkpoint in it, or a name on the hub) was trained with; `None`: not said.
    Raises `ValueError` for a broken file.
    """
    folder = Path(model)
    if folder.is_dir():
        # A checkpoint has what its run has.
        folders = [folder, folder.absolute().parent] if folder.name.startswith("checkpoint-") else [folder]
        file = next((f / TEMPLATE_FILE for f in folders if (f / TEMPLATE_FILE).is_file()), None)
    else:
        file = _from_hub(str(model)) if hub else None
    if file is None:
        return None
    template = read_object(file, "mend it, or delete it to choose a wrapper yourself").get("prompt_template")
    if not isinstance(template, str):
        raise ValueError(f"{str(file)!r} holds no `prompt_template`; mend it, or delete it to choose one yourself.")
    return check_template(template)


def _from_hub(name: str) -> Path | None:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, TEMPLATE_FILE))
    except Exception:  # no such file, no such name, no network: the hub's errors have no common base
        return None


def is_chat(prompt, column: str) -> bool:
    """Whether a prompt is a list of chat messages; plain text is the other thing it may be. Raises `ValueError`."""
    if isinstance(prompt, str):
        return False
    well_formed = isinstance(prompt, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and (m.get("content") or m.get("tool_calls")) is not None
        for m in prompt
    )
    parts = [m["content"] for m in prompt if isinstance(m.get("content"), list)] if well_formed else []
    if any(_not_text(part) for content in parts for part in content):
        raise ValueError(f"`{column}` holds content that is no text, which is not supported; leave such rows out.")
    if not well_formed:
        raise ValueError(
            f"`{column}` must hold text or a list of messages with role and content, got {str(prompt)[:80]!r}."
        )
    return True


def _not_text(part) -> bool:
    return not isinstance(part, str) and part.get("type", "text") != "text"


def render_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence, add_generation_prompt: bool = True, **chat
) -> list[list[int]]:
    """Token ids of prompts as the trainer will sample from them; `chat` goes to the template, `tools` among it."""
    if not prompts:
        return []
    prompts = [normal_prompt(prompt, tokenizer) for prompt in prompts]
    if isinstance(prompts[0], str):
        return tokenizer(text=prompts)["input_ids"]
    opening = {"add_generation_prompt": add_generation_prompt, "tokenize": True, "return_dict": True}
    return tokenizer.apply_chat_template(conversation=prompts, **opening, **chat)["input_ids"]


def generation_suffix(tokenizer: PreTrainedTokenizerBase, prompt, **chat) -> list[int] | None:
    """
    Ids with which the chat template opens the response; `None` for plain text, or where it rewrites what came before.
    """
    if isinstance(prompt, str):
        return None
    (opened,) = render_prompts(tokenizer, [prompt], **chat)
    (closed,) = render_prompts(tokenizer, [prompt], add_generation_prompt=False, **chat)
    return opened[len(closed) :] if opened[: len(closed)] == closed else None


def check_rendering(column: str, ids: Sequence[int], suffix: Sequence[int] | None) -> None:
    """
    Raise `ValueError` unless a prompt opens the response with the same tokens as all others, or scores would differ for
    it.
    """
    if suffix and list(ids[-len(suffix) :]) != list(suffix):
        raise ValueError(
            f"The chat template renders `{column}` so that it does not end in the tokens that open a response "
            f"({list(suffix)}, got {list(ids[-len(suffix) :])}); make its messages end with a user turn."
        )
