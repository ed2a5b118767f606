"""Kinds of prompt: their names and columns, the prompts of a row, and how they are rendered.

A response is read again after several kinds of prompt; its own token ids are the same after all. A dataset may hold
several prompts of one kind, in a column with the plural name. Unrelated prompts (`negative`) have no column: they are
drawn from the batch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

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
    return "\n".join(str(message["content"]) for message in messages)


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
    Unrelated prompts for some responses, from the other prompts of the global rollout batch.

    The draw for a response depends on the seed, the step and its place in the global batch, and so neither on the
    number of processes nor on what was drawn before: a resumed run draws the same.

    Returns:
        For each of `rows`, `count` prompts as token ids, none with the text of the row's own.

    Raises:
        `ValueError`: fewer than `count` other prompts in the batch.
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


def is_chat(prompt, column: str) -> bool:
    """Whether a prompt is a list of chat messages; plain text is the other thing it may be. Raises `ValueError`."""
    if isinstance(prompt, str):
        return False
    well_formed = isinstance(prompt, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and m.get("content") is not None for m in prompt
    )
    if not well_formed:
        raise ValueError(
            f"`{column}` must hold text or a list of messages with role and content, got {str(prompt)[:80]!r}."
        )
    return True


def render_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence,
    chat_template_kwargs: dict | None = None,
    add_generation_prompt: bool = True,
) -> list[list[int]]:
    """Token ids of prompts, chat messages or plain text, as the trainer will sample from them."""
    if not prompts:
        return []
    if isinstance(prompts[0], str):
        return tokenizer(text=list(prompts))["input_ids"]
    return tokenizer.apply_chat_template(
        conversation=list(prompts),
        add_generation_prompt=add_generation_prompt,
        tokenize=True,
        return_dict=True,
        **(chat_template_kwargs or {}),
    )["input_ids"]


def generation_suffix(
    tokenizer: PreTrainedTokenizerBase, prompt, chat_template_kwargs: dict | None = None
) -> list[int] | None:
    """
    Token ids that the chat template puts after the user's turn to open the response, or `None` for plain prompts and
    for templates that rewrite what came before.
    """
    if isinstance(prompt, str):
        return None
    (opened,) = render_prompts(tokenizer, [prompt], chat_template_kwargs)
    (closed,) = render_prompts(tokenizer, [prompt], chat_template_kwargs, add_generation_prompt=False)
    return opened[len(closed) :] if opened[: len(closed)] == closed else None


def check_rendering(column: str, ids: Sequence[int], suffix: Sequence[int] | None) -> None:
    """
    Raise `ValueError` when a prompt's rendering does not open the response with the same tokens as all others: the
    distributions after it would then differ for a reason that has nothing to do with the problem.
    """
    if suffix and list(ids[-len(suffix) :]) != list(suffix):
        raise ValueError(
            f"The chat template renders `{column}` so that it does not end in the tokens that open a response "
            f"({list(suffix)}, got {list(ids[-len(suffix) :])}); make its messages end with a user turn."
        )
