"""From a batch of rollouts to the signals that methods ask for."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import torch

from ..methods.context import Signals, TopKLogprobs
from ..prompts import NEGATIVE, TokenIds, split_signal
from . import Scorer

_ABOVE_ZERO = 1e-3  # what rounding explains in a log-probability (nats)


def check_scored(scored, completion_ids: Sequence[TokenIds], scorer: str) -> None:
    """Raise `ValueError` unless a scorer returned what [`TopKLogprobs`] promises for some responses."""
    batch, longest = len(completion_ids), max(map(len, completion_ids), default=0)
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
    if sampled[1] != longest:
        raise ValueError(
            f"{what} {sampled[1]} positions for responses of up to {longest} tokens; they must be aligned."
        )
    if scored.logprobs.numel() and scored.logprobs.amax() > _ABOVE_ZERO:
        raise ValueError(f"{what} logprobs of up to {scored.logprobs.amax():.3g}; they must be log-probabilities.")


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
    top_k: int | None = None,
) -> Signals:
    """
    Score the responses after every prompt that is asked for, all of one scorer in a single call. A row with fewer
    prompts of a kind has an invalid mask in the later variants; `negative` is averaged. What a scorer returns beyond
    `top_k` entries is left out.
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
        responses = [completion_ids[row] for _, rows, _ in scorer_jobs for row in rows]
        scored = scorers[scorer].score([ids for _, _, prompts in scorer_jobs for ids in prompts], responses)
        check_scored(scored, responses, scorer)
        most_likely = {name: getattr(scored, name)[..., :top_k] for name in ("token_ids", "logprobs")}
        scored = replace(scored, **most_likely)
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
