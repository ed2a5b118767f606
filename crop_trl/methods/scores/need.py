"""Scores and weights that ask where the student has most to learn: its uncertainty, its distance from the teacher."""

import torch

from ..budget import quantile_normalize
from ..context import SelectionContext, Signals
from ..divergence import topk_entropy, topk_forward_kl, topk_overlap_mass
from .relevance import crop_score

_IW_EPS = 1e-8


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
