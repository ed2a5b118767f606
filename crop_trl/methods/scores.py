"""What methods compute: scores, weights and targets, each `(signals, ctx) -> [B, T]`; `ctx.measures` takes what is
worth logging."""

import numpy as np
import torch

from .budget import quantile_normalize
from .context import SelectionContext, Signals
from .divergence import topk_entropy, topk_forward_kl, topk_jsd, topk_overlap_mass

_IW_EPS = 1e-8


def _divergences(signals: Signals, scorer: str, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`JSD(P_original, P_variant)` of every variant, `[M, B, T]`, and which variants a row has, `[M, B, 1]`."""
    original = signals[f"{scorer}/original"]
    values, present = [], []
    for variant in signals.variants(f"{scorer}/{kind}"):
        value = topk_jsd(original, variant)
        has_row = torch.ones_like(value[:, :1], dtype=torch.bool)
        if variant.mask is not None:
            has_row = variant.mask.any(-1, keepdim=True)
        values.append(value)
        present.append(has_row)
    return torch.stack(values), torch.stack(present)


def _mean_of_present(values: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    return torch.where(present, values, torch.zeros_like(values)).sum(0) / present.sum(0).clamp(min=1)


def semantic_divergence(signals: Signals, ctx: SelectionContext, scorer: str = "teacher") -> torch.Tensor:
    """How far a changed condition moves the distribution: JSD(P_o, P_c), the mean over several counterfactuals."""
    value = _mean_of_present(*_divergences(signals, scorer, "counterfactual"))
    ctx.measures["semantic_divergence"] = value
    return value


def surface_divergence(signals: Signals, ctx: SelectionContext, scorer: str = "teacher") -> torch.Tensor:
    """How far mere rewording moves the distribution: JSD(P_o, P_p), the mean over several paraphrases."""
    value = _mean_of_present(*_divergences(signals, scorer, "paraphrase"))
    ctx.measures["surface_divergence"] = value
    return value


def crop_score(signals: Signals, ctx: SelectionContext, scorer: str = "teacher") -> torch.Tensor:
    """
    How much further a changed condition moves the distribution than a paraphrase does: JSD(P_o, P_c) - JSD(P_o, P_p).

    Equation "crop-score" of the paper; the mean over several counterfactuals.
    """
    return semantic_divergence(signals, ctx, scorer) - surface_divergence(signals, ctx, scorer)


def crop_student_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """The CROP margin, from the rollout-time student's distributions instead of the teacher's."""
    return crop_score(signals, ctx, scorer="student")


def crop_max_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """The largest CROP margin over several counterfactuals: depending on any one of the conditions counts."""
    values, present = _divergences(signals, "teacher", "counterfactual")
    largest = torch.where(present, values, torch.full_like(values, float("-inf"))).amax(0)
    ctx.measures["semantic_divergence"] = largest
    return largest - surface_divergence(signals, ctx)


def reversed_crop_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """The CROP margin turned round: what depends least on the problem."""
    return -crop_score(signals, ctx)


def negative_surface_divergence(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """The paraphrase term alone: the most stable tokens first."""
    return -surface_divergence(signals, ctx)


def random_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """Uniform scores, drawn for row i of the global batch from a generator of (seed + step, i)."""
    width = ctx.loss_mask.size(1)
    draws = [np.random.default_rng([ctx.settings.seed + ctx.step, row]).random(width) for row in ctx.rows.tolist()]
    return torch.from_numpy(np.stack(draws)).to(ctx.loss_mask.device) if draws else ctx.loss_mask.double()


def first_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """The beginning of each response."""
    return -ctx.loss_mask.cumsum(-1).float()


def last_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """The end of each response."""
    return ctx.loss_mask.cumsum(-1).float()


def least_likely_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """What the student itself found least likely: -log S_old of the response token."""
    return -signals["student/original"].sampled_logprobs


def _normalized(value: torch.Tensor, name: str, ctx: SelectionContext) -> torch.Tensor:
    ctx.measures[name] = value
    return quantile_normalize(value, ctx.loss_mask, gather=ctx.gather)


def _soft_or(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # Written so that a token saturated in either reaches exactly 1: such tokens tie, and the earlier one wins.
    return 1.0 - (1.0 - a) * (1.0 - b)


def entropy_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """Student entropy over its K entries, normalised over the batch."""
    return _normalized(topk_entropy(signals["student/original"]), "student_entropy", ctx)


def _normalized_forward_kl(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    kl = topk_forward_kl(signals["teacher/original"], signals["student/original"])
    return _normalized(kl, "forward_kl", ctx)


def tip_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """Uncertain or in disagreement: soft-OR of normalised entropy and normalised KL(teacher || student)."""
    return _soft_or(entropy_score(signals, ctx), _normalized_forward_kl(signals, ctx))


def ta_opd_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """In disagreement and teachable: normalised KL times the normalised teacher mass on ids that both returned."""
    overlap = topk_overlap_mass(signals["teacher/original"], signals["student/original"])
    return _normalized_forward_kl(signals, ctx) * _normalized(overlap, "overlap_mass", ctx)


def crop_entropy_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """Relevant or uncertain: soft-OR of normalised entropy and normalised CROP margin."""
    return _soft_or(entropy_score(signals, ctx), _normalized(crop_score(signals, ctx), "crop_margin", ctx))


def importance_weight(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """
    Weights that fall from `iw_max_weight` to 1 as the share of the response's discrepancy already passed grows:
    `1 + (w_max - 1)(1 - F)`, F the mass of |log T - log S_old| strictly before a token over the total.
    """
    gap = signals["teacher/original"].sampled_logprobs - signals["student/original"].sampled_logprobs
    gap = torch.where(ctx.loss_mask, gap.abs(), torch.zeros_like(gap))
    before = gap.cumsum(-1) - gap
    passed = before / (gap.sum(-1, keepdim=True) + _IW_EPS)
    weight = 1.0 + (ctx.settings.iw_max_weight - 1.0) * (1.0 - passed)
    ctx.measures["importance_weight"] = weight
    return weight


def _contrast(signals: Signals, ctx: SelectionContext, own_lambda: float) -> torch.Tensor:
    strength = own_lambda if ctx.settings.credit_lambda is None else ctx.settings.credit_lambda
    unrelated = signals["teacher/negative"].sampled_logprobs
    return signals["teacher/original"].sampled_logprobs - strength * unrelated


def contrastive_target(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """`log T(y|x) - lambda * mean_j log T(y|x_j)` over unrelated prompts x_j, lambda 0.1 by default."""
    return _contrast(signals, ctx, own_lambda=0.1)


def contrast_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """How much more likely the token is after its own prompt than after unrelated ones; lambda 1.0 by default."""
    return _contrast(signals, ctx, own_lambda=1.0)
