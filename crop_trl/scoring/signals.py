"""From a batch of rollouts to the signals that methods ask for."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import torch

from ..methods.context import Signals, TopKLogprobs
from ..prompts import NEGATIVE, TokenIds, split_signal
from . import Scorer


def check_scored(scored, batch: int, scorer: str) -> None:
    """Raise `ValueError` unless a scorer returned what [`TopKLogprobs`] promises for `batch` responses."""
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


def collect_signals(
    needs: Sequence[str],
    scorers: Mapping[str, Scorer],
    prompt_ids: Mapping[str, Sequence[Sequence[TokenIds]]],
    completion_ids: Sequence[TokenIds],
) -> Signals:
    """
    Score the responses after every prompt that is asked for, all of one scorer in a single call. A row with fewer
    prompts of a kind has an invalid mask in the later variants; `negative` is averaged.
    """
    batch = len(completion_ids)
    jobs: dict[str, list[tuple[str, list[int], list[TokenIds]]]] = {}
    for need in dict.fromkeys(needs):
        scorer, kind = split_signal(need)
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
    for need, several in parts.items():
        if split_signal(need)[1] == NEGATIVE:
            # Of unrelated prompts only the mean log-probability of the response matters.
            mean = torch.stack([part.sampled_logprobs for part in several]).mean(0)
            parts[need] = [replace(several[0], sampled_logprobs=mean)]
    return Signals(parts)
