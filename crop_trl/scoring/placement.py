"""Where a local teacher lives: on the training device, in CPU memory between scoring phases, quantised, or sharded."""

import time

import torch
from transformers import BitsAndBytesConfig

# What a teacher is: a model of its own, the student, its weights at the start, or an average of those in training.
MODEL, STUDENT, INITIAL, AVERAGE = SOURCES = ("model", "student", "initial", "average")
PLACEMENTS = ("resident", "offload", "sharded")
QUANTIZATIONS = ("8bit", "4bit", "fp8")


def dtype_of(value) -> torch.dtype | None:
    """The torch type that a setting names, as loading takes it."""
    found = getattr(torch, str(value).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


def quantization_config(quantization: str, compute_dtype: str | torch.dtype) -> BitsAndBytesConfig:
    """How bitsandbytes stores a teacher: LLM.int8 for `"8bit"`, NF4 for `"4bit"`; the output head stays as it is."""
    if quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype_of(compute_dtype) or torch.bfloat16
    )


class OffloadedWeights:
    """Lends a device to a frozen model, which outside is in pinned CPU memory; `seconds`: the last move."""

    def __init__(self, model: torch.nn.Module, device):
        self.device = torch.device(device)
        self.seconds = 0.0
        self._home = []
        for tensor in (*model.parameters(), *model.buffers()):
            home = tensor.data.cpu()
            if self.device.type == "cuda":
                home = home.pin_memory()
            tensor.data = home
            self._home.append((tensor, home))

    def __enter__(self):
        started = time.perf_counter()
        for tensor, home in self._home:
            tensor.data = home.to(self.device, non_blocking=True)
        if self.device.type == "cuda":
            # Once a scoring phase, and the first forward would wait for the weights anyway.
            torch.cuda.current_stream(self.device).synchronize()
        self.seconds = time.perf_counter() - started
        return self

    def __exit__(self, *exception):
        for tensor, home in self._home:
            tensor.data = home
