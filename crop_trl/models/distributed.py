"""The few collective operations the trainer needs."""

from collections.abc import Callable

import torch
from accelerate import Accelerator


def gather_ragged(values: torch.Tensor, accelerator: Accelerator) -> torch.Tensor:
    """Concatenate the 1-D tensors of all processes, which may differ in length, in the order of the processes."""
    if accelerator.num_processes == 1:
        return values
    lengths = accelerator.gather(torch.tensor([values.numel()], device=values.device)).tolist()
    padded = torch.zeros(max(lengths), dtype=values.dtype, device=values.device)
    padded[: values.numel()] = values
    gathered = accelerator.gather(padded).view(len(lengths), -1)
    return torch.cat([row[:length] for row, length in zip(gathered, lengths, strict=True)])


def largest_of(accelerator: Accelerator) -> Callable[[int], int]:
    """A function that takes a number on each process and returns the largest of them on all."""

    def largest(number: int) -> int:
        return int(accelerator.gather(torch.tensor([number], device=accelerator.device)).max())

    return largest


class RunningMeans:
    """Means over all processes for one reduction; every process must add the same names."""

    def __init__(self):
        self._sums: dict[str, list[torch.Tensor]] = {}

    def add(self, name: str, values: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Add `values` (those where `mask` is set), to be averaged over every element ever added under `name`."""
        values = values.detach().double() if values.device.type != "mps" else values.detach().float()
        if mask is None:
            total, count = values.sum(), torch.tensor(values.numel(), device=values.device)
        else:
            total, count = torch.where(mask, values, torch.zeros_like(values)).sum(), mask.sum()
        pair = torch.stack([total, count.to(total.dtype)])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def flush(self, accelerator: Accelerator) -> dict[str, float]:
        """Reduce, return `{name: mean}` and start anew; a name without elements anywhere is NaN."""
        if not self._sums:
            return {}
        names = sorted(self._sums)
        totals = accelerator.reduce(torch.stack([self._sums[name] for name in names]), reduction="sum").tolist()
        self._sums = {}
        return {name: total / count if count else float("nan") for name, (total, count) in zip(names, totals)}
