"""An exponential average of the weights in training, which the model itself takes on while it reads as a teacher."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule


class AverageWeights:
    """The average of a model's trainable weights over its optimizer steps, in fp32, in the shares they are in."""

    def __init__(self, model: torch.nn.Module, decay: float):
        self.model, self.decay = model, decay
        self._average: dict[str, torch.Tensor] = {}

    def _shares(self) -> dict[str, torch.Tensor]:
        """This process's part of each trainable weight, to be changed in place."""
        self._reshard()
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if any(hasattr(p, "ds_tensor") for p in trained.values()):
            return {name: p.ds_tensor.data for name, p in trained.items()}
        return {name: (p.to_local() if hasattr(p, "to_local") else p).detach() for name, p in trained.items()}

    def start(self, file: Path | None = None) -> None:
        """Begin with the weights as they are, or where a file left off."""
        kept = {} if file is None else load_file(file)
        shares = self._shares().items()
        self._average = {name: kept.get(name, own).to(own.device, torch.float32, copy=True) for name, own in shares}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after an optimizer step."""
        for name, own in self._shares().items():
            self._average[name].lerp_(own.float(), 1 - self.decay)

    def save(self, file: Path) -> None:
        """Write down this process's part."""
        save_file({name: average.cpu() for name, average in self._average.items()}, file)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Within it the model has the average for its weights."""
        shares = self._shares() if self._average else {}
        own = {name: share.clone() for name, share in shares.items()}
        try:
            self._put(shares, self._average)
            yield
        finally:
            self._put(shares, own)

    @torch.no_grad()
    def _put(self, shares: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
        for name, share in shares.items():
            share.copy_(values[name])
        # What sharding has gathered of a weight would be used in place of what was changed.
        self._reshard()
        split = [p for p in self.model.parameters() if hasattr(p, "ds_status")]
        whole = [p for p in split if p.ds_status.name == "AVAILABLE"]
        if shares and whole:
            whole[0].partition(whole)
            whole[0].all_gather(whole)

    def _reshard(self) -> None:
        """Let go of whole weights that FSDP2 keeps from one forward to the next."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
