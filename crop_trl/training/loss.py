"""The clipped sampled-token distillation loss, a pure function of tensors."""

import torch


def opd_advantages(
    old_logprobs: torch.Tensor,
    teacher_logprobs: torch.Tensor,
    base_advantages: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    lambda_opd: float = 1.0,
) -> torch.Tensor:
    """
    Token advantages `w * (A_base - lambda_opd * (log S_old - log T))`, without gradient.

    Args:
        old_logprobs, teacher_logprobs (`torch.Tensor` of shape `[B, T]`):
            Log-probabilities of the sampled tokens under the rollout-time student and the teacher (nats).
        base_advantages (`torch.Tensor` of shape `[B]`):
            One per response; zeros without a reward.
        weights (`torch.Tensor` of shape `[B, T]`, *optional*):
            Multiplies the whole advantage.
        lambda_opd (`float`, *optional*, defaults to `1.0`):
            Strength of the teacher's correction.

    Returns:
        `torch.Tensor` of shape `[B, T]`.
    """
    gap = old_logprobs.detach() - teacher_logprobs.detach()
    advantages = base_advantages.detach().unsqueeze(-1) - lambda_opd * gap
    return advantages if weights is None else advantages * weights.detach()


def sampled_opd_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    teacher_logprobs: torch.Tensor,
    base_advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    lambda_opd: float = 1.0,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.28,
    num_items: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """
    PPO-clipped sampled-token distillation loss, a mean over the selected tokens.

    Per token `max(-r A, -clip(r, 1 - epsilon_low, 1 + epsilon_high) A)` with `r = exp(log S - log S_old)` and the
    advantages of [`opd_advantages`]; summed over `loss_mask` and divided by `num_items`. With the global number of
    selected tokens as `num_items`, the sum over micro-batches and processes is the paper's token mean (equation
    "crop-loss"), however the batch was split.

    Args:
        logprobs (`torch.Tensor` of shape `[B, T]`):
            Log-probabilities of the sampled tokens under the student, with gradient.
        old_logprobs, teacher_logprobs (`torch.Tensor` of shape `[B, T]`):
            The same under the rollout-time student and the teacher; no gradient flows into them.
        base_advantages (`torch.Tensor` of shape `[B]`):
            One per response.
        loss_mask (`torch.Tensor` of shape `[B, T]`):
            Non-zero at the tokens that are trained. Values elsewhere are ignored, NaN included.
        weights (`torch.Tensor` of shape `[B, T]`, *optional*):
            Per-token weights of the advantage.
        lambda_opd, epsilon_low, epsilon_high (`float`):
            Strength of the teacher's correction and the two clipping radii of the probability ratio.
        num_items (`int` or `torch.Tensor`, *optional*):
            Denominator; by default the number of tokens in `loss_mask`. Never below 1.

    Returns:
        Scalar `torch.Tensor`.
    """
    mask = loss_mask.bool()

    def at_mask(x: torch.Tensor) -> torch.Tensor:
        # Masked before any arithmetic: NaN times zero would be NaN, in the loss and in its gradient.
        return torch.where(mask, x, torch.zeros_like(x))

    advantages = at_mask(
        opd_advantages(old_logprobs, teacher_logprobs, base_advantages, weights=weights, lambda_opd=lambda_opd)
    )
    ratio = torch.exp(at_mask(logprobs) - at_mask(old_logprobs.detach()))
    clipped = ratio.clamp(1.0 - epsilon_low, 1.0 + epsilon_high)
    per_token = torch.maximum(-ratio * advantages, -clipped * advantages)
    total = torch.where(mask, per_token, torch.zeros_like(per_token)).sum()
    count = mask.sum() if num_items is None else torch.as_tensor(num_items, device=total.device)
    return total / count.clamp(min=1)
