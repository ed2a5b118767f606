"""Decoder matrices in fp8 (e4m3), with a scale for each row of weights, and one for each token as it comes."""

import torch
from torch import nn

from .compilation import decoder_layers

_TYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(_TYPE).max


def _round(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[R, K]` in fp8, and their scales `[R, 1]`."""
    values = values.float()
    scale = (values.abs().amax(-1, keepdim=True) / _LARGEST).clamp(min=1e-12)
    return (values / scale).to(_TYPE), scale


class Fp8Linear(nn.Module):
    """A linear layer without gradient, whose products are of fp8 numbers and add up in fp32."""

    def __init__(self, linear: nn.Linear, device):
        super().__init__()
        weight, scale = _round(linear.weight.detach().to(device))
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().to(device), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, scale = _round(hidden.reshape(-1, hidden.size(-1)))
        out = torch._scaled_mm(
            rows,
            self.weight.t(),
            scale_a=scale,
            scale_b=self.scale.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        out = out.view(*hidden.shape[:-1], -1).to(hidden.dtype)
        return out if self.bias is None else out + self.bias


def quantize_layers(model: nn.Module, device) -> None:
    """Put a model's decoder layers on a device in fp8, in place and one matrix after the other."""
    device = torch.device(device)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError("`teacher_quantization` 'fp8' needs an Ada or Hopper GPU, or a later one; choose '8bit'.")
    found = 0
    for layer in decoder_layers(model):
        for name, module in list(layer.named_modules()):
            # The products want multiples of 16.
            if isinstance(module, nn.Linear) and not (module.in_features % 16 or module.out_features % 16):
                parent, _, own = name.rpartition(".")
                setattr(layer.get_submodule(parent), own, Fp8Linear(module, device))
                found += 1
    if not found:
        raise ValueError(f"`teacher_quantization` 'fp8' finds no matrix in {type(model).__name__}; choose '8bit'.")
