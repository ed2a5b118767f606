"""From a batch of rollouts to the signals that methods ask for.

A signal is named `scorer/prompt`: which model reads the response, and after which prompt. The response's token ids are
the same for all; only the prompt before them changes. A dataset may hold several prompts of one kind, in a column with
the plural name; unrelated prompts (`negative`) are drawn from the batch itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from .scoring import Scorer, TopKLogprobs

# Which dataset column holds each kind of prompt; with an "s" at its end, a list of them.
PROMPT_COLUMNS = {
    "original": "prompt",
    "paraphrase": "paraphrase_prompt",
    "counterfactual": "counterfactual_prompt",
}
NEGATIVE = "negative"

TokenIds = Sequence[int]


def _split(need: str) -> tuple[str, str]:
    scorer, _, kind = need.partition("/")
    if kind not in PROMPT_COLUMNS and kind != NEGATIVE:
        raise ValueError(f"Unknown signal {need!r}: the prompt is one of {', '.join((*PROMPT_COLUMNS, NEGATIVE))}.")
    return scorer, kind


def prompt_kinds(needs: Sequence[str]) -> list[str]:
    """Kinds of prompt that a dataset has to hold for some signals, `"original"` first, each once."""
    kinds = ["original", *(_split(need)[1] for need in needs)]
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
    """
    Token ids of every prompt of one kind, in one call to the tokenizer: for each row, for each of its prompts.

    Args:
        rows (sequence of mappings): Dataset rows.
        kind (`str`): Kind of prompt.
        tokenize (`Callable`): Takes a list of prompts, gives the ids of each.
    """
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

    Args:
        batch_prompt_ids (sequence of token id lists): Prompt of every response in the global batch.
        rows (sequence of `int`): Places in it for which to draw.
        count (`int`): Prompts to draw for each, without repetition.
        seed, step (`int`): Seed of the run, and its global step.

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


def check_scored(scored, batch: int, scorer: str) -> None:
    """
    Raise `ValueError` unless a scorer returned what [`TopKLogprobs`] promises for `batch` responses.

    Args:
        scored: What the scorer returned.
        batch (`int`): Number of responses, B.
        scorer (`str`): `teacher` or `student`, for the message.
    """
    what = f"The {scorer} scorer returned"
    if not isinstance(scored, TopKLogprobs):
        raise ValueError(f"{what} a {type(scored).__name__}; it must return a TopKLogprobs.")
    for name in ("token_ids", "logprobs", "sampled_logprobs"):
        if not isinstance(getattr(scored, name), torch.Tensor):
            raise ValueError(f"{what} {name} as {type(getattr(scored, name)).__name__}; it must be a tensor.")
    ids, logprobs, sampled = (tuple(x.shape) for x in (scored.token_ids, scored.logprobs, scored.sampled_logprobs))
    if len(ids) != 3 or ids != logprobs or sampled != ids[:2] or ids[0] != batch or ids[2] < 1:
        raise ValueError(
            f"{what} token_ids {ids}, logprobs {logprobs} and sampled_logprobs {sampled} for {batch} responses; they "
            "must be [B, T, K], [B, T, K] and [B, T] with K at least 1."
        )


def _spread(part: TopKLogprobs, rows: Sequence[int], batch: int) -> TopKLogprobs:
    """Put the scores of some rows in their places among all; the others carry an invalid mask."""
    if len(rows) == batch:
        return part
    index = torch.tensor(rows, device=part.token_ids.device)
    if part.mask is None:
        part.mask = torch.ones_like(part.sampled_logprobs, dtype=torch.bool)
    full = {}
    for f in fields(part):
        value = getattr(part, f.name)
        full[f.name] = value.new_zeros((batch, *value.shape[1:])).index_copy_(0, index, value)
    return TopKLogprobs(**full)


def _average(parts: Sequence[TopKLogprobs]) -> TopKLogprobs:
    """Of unrelated prompts only the mean log-probability of the response matters."""
    mean = torch.stack([part.sampled_logprobs for part in parts]).mean(0)
    return TopKLogprobs(parts[0].token_ids, parts[0].logprobs, mean, parts[0].mask)


def collect_signals(
    needs: Sequence[str],
    scorers: Mapping[str, Scorer],
    prompt_ids: Mapping[str, Sequence[Sequence[TokenIds]]],
    completion_ids: Sequence[TokenIds],
) -> dict[str, TopKLogprobs | list[TopKLogprobs]]:
    """
    Score the responses after every prompt that is asked for.

    All prompts of one scorer go to it as a single list, so that it can batch them by length together.

    Args:
        needs (sequence of `str`):
            Names of signals.
        scorers (mapping from `str` to [`Scorer`]):
            By the part of a name before the slash.
        prompt_ids (mapping from `str` to B lists of prompts):
            By kind; each row has one prompt or more of a kind, as token ids.
        completion_ids (B lists of token ids):
            The responses.

    Returns:
        `dict[str, TopKLogprobs]`: one entry for each need, `[B, T, K]`, aligned on the response. Where some row has
        several prompts of a kind it is a list of them, and a row with fewer has an invalid mask in the later ones.
        `negative` is averaged over its prompts.
    """
    batch = len(completion_ids)
    jobs: dict[str, list[tuple[str, list[int], list[TokenIds]]]] = {}
    for need in dict.fromkeys(needs):
        scorer, kind = _split(need)
        for m in range(max(map(len, prompt_ids[kind]), default=0)):
            rows = [row for row in range(batch) if len(prompt_ids[kind][row]) > m]
            jobs.setdefault(scorer, []).append((need, rows, [prompt_ids[kind][row][m] for row in rows]))
    parts: dict[str, list[TopKLogprobs]] = {}
    for scorer, scorer_jobs in jobs.items():
        scored = scorers[scorer].score(
            [ids for _, _, prompts in scorer_jobs for ids in prompts],
            [completion_ids[row] for _, rows, _ in scorer_jobs for row in rows],
        )
        check_scored(scored, sum(len(rows) for _, rows, _ in scorer_jobs), scorer)
        start = 0
        for need, rows, _ in scorer_jobs:
            part = scored.rows(slice(start, start + len(rows)))
            parts.setdefault(need, []).append(_spread(part, rows, batch))
            start += len(rows)
    signals: dict[str, TopKLogprobs | list[TopKLogprobs]] = {}
    for need, several in parts.items():
        if _split(need)[1] == NEGATIVE:
            signals[need] = _average(several)
        else:
            signals[need] = several[0] if len(several) == 1 else several
    return signals
