"""Kinds of prompt: their names and columns, the prompts of a row, the wrapper round a problem, the rendering.

The column `prompt` of a dataset is the original; `NAME_prompt`, or `NAME_prompts` with lists of several, is the kind
`NAME`. Two kinds need no column: `negative` is drawn from the batch, `empty` is a row's prompt without its problem."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .files import read_object, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ORIGINAL, NEGATIVE, EMPTY = "original", "negative", "empty"
# The problem in other words: what is compared with the original may differ from it in nothing else.
REWORDINGS = ("paraphrase", "counterfactual")
# Who reads: the student, the teacher (of several, a row's own), or one of several teachers by its name.
STUDENT, TEACHER = "student", "teacher"

TokenIds = Sequence[int]


def split_signal(need: str) -> tuple[str, str]:
    """Who reads the responses and after which kind of prompt, from a signal's name. Raises `ValueError`."""
    reader, _, kind = need.partition("/")
    if not re.fullmatch(r"\w+/\w+", need):
        raise ValueError(f"Unknown signal {need!r}: it is a reader, a slash and a kind of prompt, as in teacher/hint.")
    return reader, kind


def prompt_kinds(needs: Sequence[str]) -> list[str]:
    """Kinds of prompt that some signals are read after and rows give, `"original"` first, each once."""
    kinds = [ORIGINAL, *(split_signal(need)[1] for need in needs)]
    return [kind for kind in dict.fromkeys(kinds) if kind != NEGATIVE]


def needs_negatives(needs: Sequence[str]) -> bool:
    """Whether some signals are read after unrelated prompts, which only a batch gives."""
    return any(split_signal(need)[1] == NEGATIVE for need in needs)


def prompt_column(kind: str) -> str:
    """The dataset column of a kind of prompt; with an "s" at its end, that of lists of them."""
    return "prompt" if kind == ORIGINAL else f"{kind}_prompt"


def row_kinds(row: Mapping[str, Any]) -> list[str]:
    """Kinds of prompt that a dataset row holds in the form of its original, `"original"` first."""
    original = row.get(prompt_column(ORIGINAL))
    found = {} if original is None else {ORIGINAL: True}
    for name, value in row.items():
        match = re.fullmatch(r"(\w+)_prompt(s?)", name)
        if match and match[1] not in (ORIGINAL, NEGATIVE):
            first = (value[0] if isinstance(value, list) and value else None) if match[2] else value
            if _form(first) is not None and _form(first) == _form(original):
                found[match[1]] = True
    return list(found)


def _form(prompt) -> type | None:
    """Plain text, a list of messages, or neither."""
    if isinstance(prompt, list):
        return list if prompt and isinstance(prompt[0], Mapping) else None
    return str if isinstance(prompt, str) else None


def prompt_variants(row: Mapping[str, Any], kind: str) -> list:
    """The prompts of one kind in a dataset row: those of the plural column, else the one of the singular, else none."""
    column = prompt_column(kind)
    several = row.get(column + "s") if kind != ORIGINAL else None
    if several:
        if not isinstance(several, list) or isinstance(several[0], dict):
            raise ValueError(
                f"`{column}s` must hold a list of prompts in each row, got {str(several)[:80]!r}; for a single prompt "
                f"use `{column}`."
            )
        return list(several)
    one = row.get(column)
    if one is None and kind == EMPTY and row.get("prompt") is not None:
        one = empty_prompt(row["prompt"])
    return [] if one is None else [one]


def empty_prompt(prompt, text: str = ""):
    """A prompt without its problem: its system messages and a user turn with `text`, or `text` alone."""
    if isinstance(prompt, str):
        return text
    return [*(message for message in prompt if message["role"] == "system"), {"role": "user", "content": text}]


# What follows the problem in kinds of prompt that a row need not hold. With `{solution}`: what it has of one.
HINTS = {
    "privileged": "A worked solution:\n{solution}\n\nNow solve it anew, in your own words.",
    "praised": "A checker found the following answer right: its reasoning is excellent.",
    "blamed": "A checker found the following answer wrong: its reasoning is poor.",
}


def hinted_prompt(row: Mapping[str, Any], kind: str):
    """A row's prompt with the text of [`HINTS`] after it; `None` where that needs a solution, and it has no answer."""
    solution = row.get("solution") or row.get("answer")
    if "{solution}" in HINTS[kind] and not solution:
        return None
    prompt, hint = row["prompt"], HINTS[kind].replace("{solution}", str(solution))
    if isinstance(prompt, str):
        return f"{prompt}\n\n{hint}"
    *before, last = prompt
    return [*before, {**last, "content": f"{_content_text(last['content'])}\n\n{hint}"}]


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
    """A prompt as a tokenizer takes it: the content of a message as one text, plain text without a BOS that would come
    twice, and no text as the token that begins one."""
    if isinstance(prompt, str):
        begin = tokenizer.bos_token
        if prompt and not (begin and prompt.startswith(begin)):
            return prompt
        adds_it = begin and tokenizer(text="")["input_ids"][:1] == [tokenizer.bos_token_id]
        return prompt.removeprefix(begin) if adds_it else prompt or begin or tokenizer.eos_token or ""
    return [{**m, "content": _content_text(m["content"])} if isinstance(m.get("content"), list) else m for m in prompt]


def row_for_reading(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a dataset row says as texts: all its prompts by kind, and its `answer` and `solution` if it has them."""
    prompts = {kind: [prompt_text(prompt) for prompt in prompt_variants(row, kind)] for kind in row_kinds(row)}
    said = {name: row[name] for name in ("answer", "solution") if isinstance(row.get(name), str)}
    return {"prompts": {kind: texts for kind, texts in prompts.items() if texts}, **said}


def first_prompts(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Of rows for reading the first prompt of each kind, row by row; kinds that some row lacks are left out."""
    kinds = [kind for kind in rows[0]["prompts"] if all(kind in row["prompts"] for row in rows)] if rows else []
    return {kind: [row["prompts"][kind][0] for row in rows] for kind in kinds}


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
    """Ids of `count` unrelated prompts for each of `rows`, drawn from the batch by seed, step and row alone."""
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
# Lies beside a model that was trained, and says how problems were put to it.
TEMPLATE_FILE = "prompt_template.json"
_HOW_ASKED = {"prompt_template": str, "conversational": bool, "chat_template_kwargs": dict}

_MARGIN = " \t\n"  # not all of str.strip(): other white space is screened as control characters


def check_template(template: str, setting: str = "prompt_template") -> str:
    """Return `template`, or raise `ValueError`, naming `setting`, when it does not hold `{problem}` exactly once."""
    if str(template).count(PLACEHOLDER) != 1:
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


def save_how_asked(
    folder: str | Path, template: str, conversational: bool = True, chat_template_kwargs: dict[str, Any] | None = None
) -> None:
    """Put beside a model how problems are put to it in training."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    values = (check_template(template), conversational, chat_template_kwargs or {})
    write_json(Path(folder) / TEMPLATE_FILE, dict(zip(_HOW_ASKED, values, strict=True)))


def saved_how_asked(model: str | Path, hub: bool = True, revision: str | None = None) -> dict[str, Any]:
    """What [`save_how_asked`] put beside a model, its run, or a name on the hub; empty where nothing is said."""
    folder = Path(model)
    if folder.is_dir():
        # A checkpoint has what its run has.
        folders = [folder, folder.absolute().parent] if folder.name.startswith("checkpoint-") else [folder]
        file = next((f / TEMPLATE_FILE for f in folders if (f / TEMPLATE_FILE).is_file()), None)
    else:
        file = _from_hub(str(model), revision) if hub else None
    if file is None:
        return {}
    remedy = "mend it, or delete it to choose for yourself"
    asked = {"prompt_template": None, **read_object(file, remedy)}  # which may say that alone
    for name, kind in _HOW_ASKED.items():
        if name in asked and not isinstance(asked[name], kind):
            raise ValueError(f"{str(file)!r} holds no `{name}` that could be one; {remedy}.")
    check_template(asked["prompt_template"])
    return {name: asked[name] for name in _HOW_ASKED if name in asked}


def _from_hub(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, TEMPLATE_FILE, revision=revision))
    except Exception:  # no such file, no such name, no network: the hub's errors have no common base
        return None


def is_chat(prompt, column: str) -> bool:
    """Whether a prompt is a list of chat messages; plain text is the other thing it may be. Raises `ValueError`."""
    if isinstance(prompt, str):
        return False
    well_formed = isinstance(prompt, list) and all(
        isinstance(m, dict)
        and isinstance(m.get("role"), str)
        and any(m.get(part) is not None for part in ("content", "tool_calls"))
        for m in prompt
    )
    parts = [m["content"] for m in prompt if isinstance(m.get("content"), list)] if well_formed else []
    if any(_not_text(part) for content in parts for part in content):
        raise ValueError(f"`{column}` holds content that is no text, which is not supported; leave such rows out.")
    if not well_formed:
        raise ValueError(f"`{column}` must hold text or messages with role and content, got {str(prompt)[:80]!r}.")
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
    """Ids with which the chat template opens the response; `None` for plain text, or where it rewrites."""
    if isinstance(prompt, str):
        return None
    (opened,) = render_prompts(tokenizer, [prompt], **chat)
    (closed,) = render_prompts(tokenizer, [prompt], add_generation_prompt=False, **chat)
    return opened[len(closed) :] if opened[: len(closed)] == closed else None


def check_rendering(column: str, ids: Sequence[int], suffix: Sequence[int] | None) -> None:
    """Raise `ValueError` unless a prompt opens the response with the same tokens as all others."""
    if suffix and list(ids[-len(suffix) :]) != list(suffix):
        raise ValueError(
            f"The chat template renders `{column}` so that it does not end in the tokens that open a response "
            f"({list(suffix)}, got {list(ids[-len(suffix) :])}); make its messages end with a user turn."
        )
