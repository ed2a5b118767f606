"""The distillation loss, a pure function of tensors: clipped on sampled tokens, or a divergence from the teacher."""

from typing import NamedTuple

import torch


class LossTerms(NamedTuple):
    """What the loss is made of, token by token: `loss` carries gradient, the others are for logs."""

    loss: torch.Tensor
    ratio: torch.Tensor
    advantages: torch.Tensor
    divergence: torch.Tensor | None = None


def opd_terms(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    teacher_logprobs: torch.Tensor,
    base_advantages: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    lambda_opd: float = 1.0,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.28,
    delta: float | None = None,
    divergence: torch.Tensor | None = None,
    teacher_advantages: torch.Tensor | None = None,
) -> LossTerms:
    """Terms of the loss for each token (equation "crop-loss"): `max(-r A, -clip(r, 1 - epsilon_low, 1 + epsilon_high)
    A)` with `r = exp(log S - log S_old)` and `A = w * (A_base + lambda_opd * (log T - log S_old))`. `delta` bounds the
    first r, which nothing else does where A is negative (GRPO's two-sided clipping). `teacher_advantages` take the
    place of `log T - log S_old`.

    With `divergence`, of the student's whole distribution from the teacher's, this takes the place of the teacher's
    part of the advantage: `A = w * A_base`, and `w * lambda_opd * divergence` is added, without ratio or clip.

    All tensors are of one shape, flat over tokens or `[B, T]`; see [`sampled_opd_loss`] for what they are. Gradient
    flows through `logprobs` and `divergence` alone."""
    weights = torch.ones_like(logprobs) if weights is None else weights.detach()
    added = teacher_logprobs - old_logprobs if teacher_advantages is None else teacher_advantages
    added = 0.0 if divergence is not None else added.detach()
    advantages = weights * (base_advantages.detach() + lambda_opd * added)
    ratio = torch.exp(logprobs - old_logprobs.detach())
    clipped = ratio.clamp(1.0 - epsilon_low, 1.0 + epsilon_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    loss = torch.maximum(-bounded * advantages, -clipped * advantages)
    if divergence is None:
        return LossTerms(loss, ratio.detach(), advantages)
    return LossTerms(loss + weights * lambda_opd * divergence, ratio.detach(), advantages, divergence.detach())


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
    teacher_advantages: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    PPO-clipped sampled-token distillation loss, a mean over the kept tokens.

    The terms of [`opd_terms`], summed over `loss_mask` and divided by `num_items`. With the global number of kept
    tokens as `num_items`, the sum over micro-batches and processes is the paper's token mean (equation "crop-loss"),
    however the batch was split.

    Args:
        logprobs (`torch.Tensor` of shape `[B, T]`):
            Log-probabilities of the sampled tokens under the student (nats), with gradient.
        old_logprobs, teacher_logprobs (`torch.Tensor` of shape `[B, T]`):
            The same under the rollout-time student and the teacher; no gradient flows into them.
        base_advantages (`torch.Tensor` of shape `[B]`): One per response; zeros without a reward.
        loss_mask (`torch.Tensor` of shape `[B, T]`):
            Non-zero at the tokens that are kept. Values elsewhere are ignored, NaN included.
        weights (`torch.Tensor` of shape `[B, T]`, *optional*): Per-token weights of the advantage.
        lambda_opd, epsilon_low, epsilon_high (`float`):
            Strength of the teacher's correction and the two clipping radii of the probability ratio.
        num_items (`int` or `torch.Tensor`, *optional*):
            Denominator; by default the number of tokens in `loss_mask`. Never below 1.
        teacher_advantages (`torch.Tensor` of shape `[B, T]`, *optional*):
            What the teacher adds to the advantages before `lambda_opd`; by default `log T - log S_old`.

    Returns:
        Scalar `torch.Tensor`.
    """
    mask = loss_mask.bool()
    # Only what is kept enters any arithmetic: NaN times zero would be NaN, in the loss and in its gradient.
    logprobs, old_logprobs, teacher_logprobs = (x[mask] for x in (logprobs, old_logprobs, teacher_logprobs))
    terms = opd_terms(
        logprobs,
        old_logprobs,
        teacher_logprobs,
        base_advantages.unsqueeze(-1).expand_as(mask)[mask],
        weights=None if weights is None else weights[mask],
        lambda_opd=lambda_opd,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        teacher_advantages=None if teacher_advantages is None else teacher_advantages[mask],
    )
    return terms.loss.sum() / token_count(terms.loss, num_items)


def token_count(per_token: torch.Tensor, num_items: int | torch.Tensor | None = None) -> torch.Tensor:
    """The denominator of the loss: `num_items`, by default as many as there are tokens, never below 1."""
    count = per_token.numel() if num_items is None else num_items
    return torch.as_tensor(count, device=per_token.device).clamp(min=1)
