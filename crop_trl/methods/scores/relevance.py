"""Scores that ask how much a token depends on its own problem: CROP and its relatives, CREDIT."""

import torch

from ..budget import quantile_normalize
from ..context import SelectionContext, Signals, TopKLogprobs
from ..divergence import topk_jsd


def has_variant(variant: TopKLogprobs) -> torch.Tensor:
    """Which rows were read after a prompt of which others have more, `[B, 1]`."""
    if variant.mask is None:
        return torch.ones_like(variant.logprobs[:, :1, 0], dtype=torch.bool)
    return variant.mask.any(-1, keepdim=True)


def _divergences(signals: Signals, scorer: str, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`JSD(P_original, P_variant)` of every variant, `[M, B, T]`, and which variants a row has, `[M, B, 1]`."""
    original = signals[f"{scorer}/original"]
    values, present = [], []
    for variant in signals.variants(f"{scorer}/{kind}"):
        value = topk_jsd(original, variant)
        values.append(value)
        present.append(has_variant(variant))
    return torch.stack(values), torch.stack(present)


def _mean_of_present(values: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    return torch.where(present, values, torch.zeros_like(values)).sum(0) / present.sum(0).clamp(min=1)


def semantic_divergence(signals: Signals, ctx: SelectionContext, scorer: str = "teacher") -> torch.Tensor:
    """How far a changed condition moves the prediction: JSD(P_o, P_c), the mean over several counterfactuals."""
    value = _mean_of_present(*_divergences(signals, scorer, "counterfactual"))
    ctx.measures["semantic_divergence"] = value
    return value


def surface_divergence(signals: Signals, ctx: SelectionContext, scorer: str = "teacher") -> torch.Tensor:
    """How far mere rewording moves the prediction: JSD(P_o, P_p), the mean over several paraphrases."""
    value = _mean_of_present(*_divergences(signals, scorer, "paraphrase"))
    ctx.measures["surface_divergence"] = value
    return value


def crop_score(signals: Signals, ctx: SelectionContext, scorer: str = "teacher") -> torch.Tensor:
    """How much further a changed condition moves the prediction than a paraphrase does: JSD(P_o, P_c) - JSD(P_o, P_p).

    Equation "crop-score" of the paper; the mean over several counterfactuals."""
    return semantic_divergence(signals, ctx, scorer) - surface_divergence(signals, ctx, scorer)


def crop_student_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """As in `crop`, but how far the student's own prediction moves: the CROP margin of the student that sampled."""
    return crop_score(signals, ctx, scorer="student")


def crop_max_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """As in `crop`, by the counterfactual that moves the prediction furthest: the largest margin, so that depending on
    any one of the conditions counts."""
    values, present = _divergences(signals, "teacher", "counterfactual")
    largest = torch.where(present, values, torch.full_like(values, float("-inf"))).amax(0)
    ctx.measures["semantic_divergence"] = largest
    return largest - surface_divergence(signals, ctx)


def reversed_crop_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """What depends least on the problem: the CROP margin with its sign reversed."""
    return -crop_score(signals, ctx)


def negative_surface_divergence(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """What a paraphrase moves least: the paraphrase term of the CROP margin alone."""
    return -surface_divergence(signals, ctx)


def crop_weight(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """Soft weights by the CROP margin: `floor` for every token, and the rest of the weight in proportion to what lies
    above 0 of its margin.

    Ours. The margins are scaled to [0, 1] by their quantiles over the batch, and the weights have a mean of 1 there, so
    that the size of a step is that of training on every token."""
    floor = ctx.method_settings["floor"]
    margin = quantile_normalize(crop_score(signals, ctx).clamp(min=0.0), ctx.loss_mask, gather=ctx.gather)
    mean = ctx.pooled(margin).mean()
    weight = floor + (1.0 - floor) * torch.where(mean == 0, torch.ones_like(margin), margin / mean)
    ctx.measures["relevance_weight"] = weight
    return weight


def _contrast(signals: Signals, ctx: SelectionContext, own_lambda: float) -> torch.Tensor:
    strength = own_lambda if ctx.settings.credit_lambda is None else ctx.settings.credit_lambda
    unrelated = signals["teacher/negative"].sampled_logprobs
    return signals["teacher/original"].sampled_logprobs - strength * unrelated


def contrastive_target(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """`log T(y|x) - lambda * mean_j log T(y|x_j)` over unrelated prompts x_j, lambda 0.1 by default."""
    return _contrast(signals, ctx, own_lambda=0.1)


def contrast_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """How much likelier the token is after its own prompt than after unrelated ones: lambda is 1.0 by default."""
    return _contrast(signals, ctx, own_lambda=1.0)
