"""From a batch of rollouts to the signals that methods ask for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from ..methods.context import Signals, TopKLogprobs
from ..prompts import NEGATIVE, STUDENT, TEACHER, TokenIds, split_signal
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
        shapes = f"token_ids {ids}, logprobs {logprobs} and sampled_logprobs {sampled} for {batch} responses"
        raise ValueError(f"{what} {shapes}; they must be [B, T, K], [B, T, K] and [B, T].")
    if sampled[1] != longest:
        raise ValueError(f"{what} {sampled[1]} positions for up to {longest} tokens; they must be aligned.")
    if scored.logprobs.numel() and scored.logprobs.amax() > _ABOVE_ZERO:
        raise ValueError(f"{what} logprobs of up to {scored.logprobs.amax():.3g}; they must be log-probabilities.")


def place(full: TopKLogprobs | None, part: TopKLogprobs, rows: Sequence[int], batch: int, longest: int):
    """Put the scores of some rows in their places among all `[B, T]`, where rows without any have an invalid mask."""
    if part.sampled_logprobs.shape == (batch, longest):
        return part
    values = {**vars(part), "mask": torch.ones_like(part.sampled_logprobs, dtype=torch.bool)}
    if part.mask is not None:
        values["mask"] = part.mask
    if full is None:
        full = TopKLogprobs(**{name: v.new_zeros((batch, longest, *v.shape[2:])) for name, v in values.items()})
    for name, value in values.items():
        getattr(full, name)[list(rows), : value.size(1)] = value
    return full


def who_reads(
    needs: Sequence[str],
    scorers: Iterable[str],
    prompt_ids: Mapping[str, Sequence[Sequence[TokenIds]]],
    own: Sequence[str],
) -> dict[str, list[tuple[str, int, list[int]]]]:
    """For each scorer that is asked, by name: signals, which prompt of their kind, and the rows that have it."""
    found: dict[str, list[tuple[str, int, list[int]]]] = {}
    for need in dict.fromkeys(needs):
        reader, kind = split_signal(need)
        for name in [name for name in scorers if name != STUDENT] if reader == TEACHER else [reader]:
            read = [row for row in range(len(own)) if reader != TEACHER or own[row] == name]
            for m in range(max((len(prompt_ids[kind][row]) for row in read), default=0)):
                found.setdefault(name, []).append((need, m, [row for row in read if len(prompt_ids[kind][row]) > m]))
            found.setdefault(name, [])
    return found


def collect_signals(
    needs: Sequence[str],
    scorers: Mapping[str, Scorer],
    prompt_ids: Mapping[str, Sequence[Sequence[TokenIds]]],
    completion_ids: Sequence[TokenIds],
    top_k: int | None = None,
    teachers: Sequence[str] | None = None,
) -> Signals:
    """Score the responses after every prompt that is asked for, all of one scorer in a single call. A row with fewer
    prompts of a kind has an invalid mask in the later variants; `negative` is averaged. What a scorer returns beyond
    `top_k` entries is left out. `teachers` has the name of each row's own, where there are several."""
    batch, longest = len(completion_ids), max(map(len, completion_ids), default=0)
    own = [TEACHER] * batch if teachers is None else teachers
    parts: dict[str, dict[int, TopKLogprobs]] = {need: {} for need in needs}
    for name, asked in who_reads(needs, scorers, prompt_ids, own).items():
        # All processes call a model that is spread over them, also those without a row for it.
        if not asked and getattr(scorers[name], "agree", None) is None:
            continue
        responses = [completion_ids[row] for _, _, rows in asked for row in rows]
        prompts = [prompt_ids[split_signal(need)[1]][row][m] for need, m, rows in asked for row in rows]
        scored = scorers[name].score(prompts, responses)
        check_scored(scored, responses, name)
        most_likely = {field: getattr(scored, field)[..., :top_k] for field in ("token_ids", "logprobs")}
        scored = replace(scored, **most_likely)
        start = 0
        for need, m, rows in asked:
            part = scored.rows(slice(start, start + len(rows)))
            parts[need][m] = place(parts[need].get(m), part, rows, batch, longest)
            start += len(rows)
    signals = {need: [several[m] for m in sorted(several)] for need, several in parts.items()}
    for need, several in signals.items():
        if split_signal(need)[1] == NEGATIVE:
            # Of unrelated prompts only the mean log-probability of the response matters.
            mean = torch.stack([part.sampled_logprobs for part in several]).mean(0)
            signals[need] = [replace(several[0], sampled_logprobs=mean)]
    return Signals(signals)
