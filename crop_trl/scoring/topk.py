"""The tiled projection that makes top-K log-probabilities."""

from collections.abc import Callable

import torch

from .tile import tile_topk

# Logits of one tile: rows x vocabulary. 2**27 fp32 values are 512 MiB, whatever the sequence length or the vocabulary;
# a GPU multiplies tiles of half the size a seventh slower, while a CPU needs several temporary ones of the same size.
TILE_ELEMENTS = 2**27
_CPU_TILE_ELEMENTS = 2**24


def head_transform(config) -> tuple[float | None, float]:
    """`(softcap, scale)`: `z = head(h) * scale`, then `softcap * tanh(z / softcap)` unless it is `None`."""
    text = config.get_text_config()
    softcap = getattr(text, "final_logit_softcapping", None)
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        scale = getattr(text, name, None)
        if scale is not None:
            return softcap, float(scale)
    divisor = getattr(text, "logits_scaling", None)
    if divisor is None:
        return softcap, 1.0
    # The same name means a factor in HyperCLOVA X and a divisor in Granite and MiniCPM.
    return softcap, float(divisor) if text.model_type == "hyperclovax" else 1.0 / float(divisor)


def head_logits(hidden, weight, bias, softcap, scale, as_trained) -> torch.Tensor:
    """Logits in fp32 of hidden states `[n, H]` by a head `[V, H]`; see [`topk_projection`]."""
    as_trained = as_trained or torch.is_autocast_enabled(hidden.device.type)
    if hidden.device.type == "cuda" and hidden.dtype in (torch.float16, torch.bfloat16) and not as_trained:
        # The tensor cores accumulate in fp32 anyway; rounding the result to bf16 would move a logit of 20 by up to 0.06
        # and make the top K full of ties.
        z = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        # For a student in training, under autocast or with the half-precision weights of DeepSpeed, the logits are
        # rounded as its training pass rounds them, so that the probability ratio is 1 before the first update.
        z = torch.mm(hidden, weight.t()).float()
    if bias is not None:
        z += bias.float()
    if scale != 1.0:
        z *= scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z


@torch.no_grad()
def topk_projection(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    top_k: int,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    as_trained: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Project hidden states onto the vocabulary, a tile of rows at a time, and keep what scoring needs.

    `as_trained` rounds logits to the type of `hidden`, as the training pass does, where they could be had in fp32.
    Shapes: hidden `[N, H]`, weight `[V, H]`, bias `[V]`, target_ids `[N]`; for what is returned see
    [`topk_in_tiles`]."""
    weight = weight.to(hidden.dtype)

    def logits(rows: torch.Tensor) -> torch.Tensor:
        return head_logits(rows, weight, bias, softcap, scale, as_trained)

    return topk_in_tiles(hidden, logits, weight.size(0), target_ids, top_k)


def tile_rows(device: torch.device, vocab: int) -> int:
    """Rows of hidden states whose logits make up a tile."""
    return max(1, (TILE_ELEMENTS if device.type == "cuda" else _CPU_TILE_ELEMENTS) // vocab)


@torch.no_grad()
def topk_in_tiles(
    hidden: torch.Tensor,
    logits: Callable[[torch.Tensor], torch.Tensor],
    vocab: int,
    target_ids: torch.Tensor,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The K most likely tokens after each of N hidden states, whose fp32 logits a function makes.

    Peak memory is a few tiles, whatever the number of positions: the `[N, V]` logits never exist. Returned are token
    ids `[N, K]` (int32), their log-probabilities `[N, K]` and those of the targets `[N]` (fp32), K = min(top_k, V)."""
    n, k = hidden.size(0), min(top_k, vocab)
    token_ids = torch.empty((n, k), dtype=torch.int32, device=hidden.device)
    logprobs = torch.empty((n, k), dtype=torch.float32, device=hidden.device)
    target_logprobs = torch.empty(n, dtype=torch.float32, device=hidden.device)
    tile = tile_rows(hidden.device, vocab)
    for start in range(0, n, tile):
        rows = slice(start, start + tile)
        z = logits(hidden[rows])
        log_normalizer, values, indices = tile_topk(z, k)
        target_logprobs[rows] = (z.gather(-1, target_ids[rows, None].long()) - log_normalizer).squeeze(-1)
        logprobs[rows] = values - log_normalizer
        token_ids[rows] = indices.int()
    return token_ids, logprobs, target_logprobs
