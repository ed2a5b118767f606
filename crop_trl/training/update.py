"""From scored rollouts to the micro-batches of optimizer steps. The loss is a mean over the kept tokens of the whole
step on all processes, so it does not matter which micro-batch a response falls into."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..methods import Selection, TopKLogprobs
from ..scoring.layout import PackedBatch, pack, split_balanced


@dataclass
class Rollout:
    """Sampled responses with what is kept of them."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    base_advantages: torch.Tensor  # [B], from the rewards
    selection: Selection  # [B, T]
    old_logprobs: torch.Tensor | None = None  # of the rollout-time student; None: it is the one being trained
    engine_logprobs: torch.Tensor | None = None  # as the sampling engine reported them
    target: TopKLogprobs | None = None  # of the teacher, where the loss reads more than the sampled token

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt and response together."""
        return [len(p) + len(c) for p, c in zip(self.prompt_ids, self.completion_ids, strict=True)]


@dataclass
class MicroBatch:
    """What the loss needs for some responses, flat over their N kept tokens."""

    batch: PackedBatch
    teacher_logprobs: torch.Tensor
    base_advantages: torch.Tensor
    old_logprobs: torch.Tensor | None
    weights: torch.Tensor | None
    teacher_advantages: torch.Tensor | None
    engine_logprobs: torch.Tensor | None
    target: TopKLogprobs | None
    num_items: torch.Tensor | None = None  # kept tokens of the optimizer step on all processes

    @property
    def padding_share(self) -> float:
        """Share of the forward pass that is padding."""
        return 1.0 - self.batch.num_tokens / max(1, self.batch.input_ids.numel())


def make_micro_batch(
    rollout: Rollout,
    rows: Sequence[int],
    device: torch.device,
    layout: Mapping[str, Any],
    keep: torch.Tensor | None = None,
    num_items: torch.Tensor | None = None,
) -> MicroBatch:
    """Lay out some responses of a rollout."""
    keep = rollout.selection.mask.cpu() if keep is None else keep
    batch = pack(rollout.prompt_ids, rollout.completion_ids, rows, keep=keep, **layout).to(device)

    def kept(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[batch.rows, batch.columns]

    return MicroBatch(
        batch=batch,
        teacher_logprobs=kept(rollout.selection.teacher_logprobs),
        base_advantages=rollout.base_advantages[batch.rows],
        old_logprobs=kept(rollout.old_logprobs),
        weights=kept(rollout.selection.weights),
        teacher_advantages=kept(rollout.selection.teacher_advantages),
        engine_logprobs=kept(rollout.engine_logprobs),
        target=None if rollout.target is None else rollout.target.rows((batch.rows, batch.columns)),
        num_items=num_items,
    )


def check_finite(rollout: Rollout, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Stop before an update that would turn every weight into NaN, on all processes at once."""
    selection = rollout.selection
    sound = torch.isfinite(selection.teacher_logprobs)
    for values in (selection.weights, selection.teacher_advantages):
        if values is not None:
            sound = sound & torch.isfinite(values)
    if rollout.old_logprobs is not None:
        sound = sound & torch.isfinite(rollout.old_logprobs[:, : sound.size(1)])
    if rollout.target is not None:
        sound = sound & torch.isfinite(rollout.target.logprobs).all(-1)
    count = int(reduce((selection.mask & ~sound).sum().reshape(1)))
    if count:
        what = "have a log-probability, weight or advantage that is not finite"
        remedy = "load the teacher in bfloat16 (`teacher_init_kwargs`), and an engine too"
        raise ValueError(f"{count} tokens to train {what}; {remedy}.")


def cut_rollout(
    rollout: Rollout,
    windows: int,
    micro_batches: int,
    device: torch.device,
    layout: Mapping[str, Any],
    reduce: Callable[[torch.Tensor], torch.Tensor],
) -> list[MicroBatch]:
    """Cut a rollout batch into micro-batches, as many on every process; `reduce` sums over processes."""
    keep = rollout.selection.mask.cpu()
    lengths = rollout.lengths
    order = torch.randperm(len(lengths)) if windows > 1 else torch.arange(len(lengths))
    dealt = order.chunk(windows)
    counts = reduce(torch.stack([keep[rows].sum() for rows in dealt]).to(device))
    return [
        make_micro_batch(rollout, [int(rows[i]) for i in part], device, layout, keep, num_items)
        for rows, num_items in zip(dealt, counts, strict=True)
        for part in split_balanced([lengths[i] for i in rows], micro_batches)
    ]
