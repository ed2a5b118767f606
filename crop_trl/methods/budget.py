"""Which tokens a budget keeps: the budget itself, the top-b mask and the batch quantile normalisation."""

from fractions import Fraction

import torch

from .context import Gather


def response_budget(n_valid: int | torch.Tensor, ratio: float, min_tokens: int = 1) -> int | torch.Tensor:
    """
    Number of positions to keep out of `n_valid`: `min(n, max(1, min_tokens, floor(ratio * n)))`.

    The floor is taken of the decimal number that was written, not of its binary approximation: 0.29 of 100 is 29.
    CROP paper, equation "crop-response-budget".

    Args:
        n_valid (`int` or `torch.Tensor`): Number of candidate positions; any shape when a tensor.
        ratio (`float`): Nominal retention ratio, in (0, 1].
        min_tokens (`int`, *optional*, defaults to `1`): Fewest positions kept in a response that has any.

    Returns:
        The budget, in the type and shape of `n_valid`; 0 where there are no candidates.

    Raises:
        `ValueError`: `ratio` outside (0, 1] or `min_tokens` below 1.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"`retention_ratio` must lie in (0, 1], got {ratio}: 0.2 keeps a fifth of each response.")
    if min_tokens < 1:
        raise ValueError(f"`min_tokens` must be at least 1, got {min_tokens}.")
    exact = Fraction(str(ratio))

    def budget(n: int) -> int:
        return min(n, max(1, min_tokens, n * exact.numerator // exact.denominator))

    if not isinstance(n_valid, torch.Tensor):
        return budget(int(n_valid))
    # Exact integers for every possible length, then one look-up: a float product would be off by one at round numbers.
    longest = int(n_valid.max()) if n_valid.numel() else 0
    table = torch.tensor([budget(n) for n in range(longest + 1)], device=n_valid.device, dtype=n_valid.dtype)
    return table[n_valid.long()]


def select_top_b(scores: torch.Tensor, loss_mask: torch.Tensor, ratio: float, min_tokens: int = 1) -> torch.BoolTensor:
    """
    Keep the highest-scoring positions of each response, within its own budget.

    Candidates are the positions with `loss_mask` set and a finite score. Equal scores: the earlier position wins, on
    every device. A response without a single finite score keeps its whole `loss_mask`. CROP paper, equation
    "crop-mask".

    Args:
        scores (`torch.Tensor` of shape `[B, T]`):
            Higher is kept first; a negative score can be kept, NaN and infinities never are.
        loss_mask (`torch.Tensor` of shape `[B, T]`): Non-zero where a token may enter the loss.
        ratio, min_tokens:
            See [`response_budget`].

    Returns:
        `torch.BoolTensor` of shape `[B, T]`.
    """
    allowed = loss_mask.bool()
    candidates = allowed & torch.isfinite(scores)
    n_candidates = candidates.sum(-1)
    budget = response_budget(n_candidates, ratio, min_tokens)
    # Adding zero turns -0.0 into 0.0, which some radix sorts order differently; the sort is stable, so ties keep their
    # order in the response.
    keys = torch.where(candidates, scores + 0.0, torch.full_like(scores, float("-inf")))
    order = keys.sort(dim=-1, descending=True, stable=True).indices
    within_budget = torch.arange(scores.size(-1), device=scores.device) < budget.unsqueeze(-1)
    kept = torch.zeros_like(candidates).scatter_(-1, order, within_budget)
    return torch.where((n_candidates > 0).unsqueeze(-1), kept & candidates, allowed)


def quantile(ordered: torch.Tensor, q: float) -> torch.Tensor:
    """The q-quantile of sorted values, with linear interpolation."""
    # torch.quantile refuses more than 16 M values; on sorted values the linear interpolation is two look-ups.
    position = q * (ordered.numel() - 1)
    lower = int(position)
    upper = min(lower + 1, ordered.numel() - 1)
    return torch.lerp(ordered[lower], ordered[upper], position - lower)


def quantile_normalize(
    x: torch.Tensor,
    mask: torch.Tensor,
    low: float = 0.05,
    high: float = 0.95,
    eps: float = 1e-8,
    gather: Gather | None = None,
) -> torch.Tensor:
    """
    Scale a measure to [0, 1] by its quantiles over the whole rollout batch:
    `clip((x - q_low) / (q_high - q_low + eps), 0, 1)`.

    Quantiles are exact, with linear interpolation, over every valid finite value of every process.

    Args:
        x (`torch.Tensor` of shape `[B, T]`): The measure.
        mask (`torch.Tensor` of shape `[B, T]`): Non-zero at valid positions.
        low, high (`float`): Quantile levels.
        eps (`float`): Keeps a constant measure from dividing by zero.
        gather (`Callable`, *optional*):
            Takes this process's valid values, 1-D and of any length, and returns those of all processes in one 1-D
            tensor. `None`: this process is all there is.

    Returns:
        `torch.Tensor` of shape `[B, T]`; 0 outside `mask`, NaN where `x` is NaN inside it.
    """
    valid = mask.bool()
    values = x[valid & torch.isfinite(x)]
    if gather is not None:
        values = gather(values)
    if values.numel() == 0:
        # Nothing finite anywhere, so nothing to scale by: missing values stay missing.
        return torch.where(valid, torch.full_like(x, float("nan")), torch.zeros_like(x))
    ordered = values.sort().values
    q_low, q_high = quantile(ordered, low), quantile(ordered, high)
    scaled = ((x - q_low) / (q_high - q_low + eps)).clamp(0.0, 1.0)
    return torch.where(valid, scaled, torch.zeros_like(scaled))
