"""Scores and weights that ask where the student has most to learn: its uncertainty, its distance from the teacher."""

import torch

from ..budget import quantile, quantile_normalize
from ..context import SelectionContext, Signals
from ..divergence import topk_entropy, topk_forward_kl, topk_overlap, topk_overlap_mass
from .relevance import crop_score

_IW_EPS = 1e-8


def _normalized(value: torch.Tensor, name: str, ctx: SelectionContext) -> torch.Tensor:
    ctx.measures[name] = value
    return quantile_normalize(value, ctx.loss_mask, gather=ctx.gather)


def _soft_or(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # Written so that a token saturated in either reaches exactly 1: such tokens tie, and the earlier one wins.
    return 1.0 - (1.0 - a) * (1.0 - b)


def entropy_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """How unsure the student is: its entropy over K entries, normalised over the batch."""
    return _normalized(topk_entropy(signals["student/original"]), "student_entropy", ctx)


def _normalized_forward_kl(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    kl = topk_forward_kl(signals["teacher/original"], signals["student/original"])
    return _normalized(kl, "forward_kl", ctx)


def tip_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """How unsure the student is, or how far from the teacher: soft-OR of normalised entropy and normalised
    KL(teacher || student)."""
    return _soft_or(entropy_score(signals, ctx), _normalized_forward_kl(signals, ctx))


def ta_opd_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """How far the student is from a teacher whose likeliest tokens it expects too: normalised KL times the normalised
    teacher mass on ids that both returned."""
    overlap = topk_overlap_mass(signals["teacher/original"], signals["student/original"])
    return _normalized_forward_kl(signals, ctx) * _normalized(overlap, "overlap_mass", ctx)


def crop_entropy_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """How unsure the student is, or how much the token depends on the problem, as in `crop`: soft-OR of normalised
    entropy and normalised CROP margin."""
    return _soft_or(entropy_score(signals, ctx), _normalized(crop_score(signals, ctx), "crop_margin", ctx))


def importance_weight(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """Weights that fall from `iw_max_weight` to 1 as the share of the response's discrepancy already passed grows: `1 +
    (w_max - 1)(1 - F)`, F the mass of |log T - log S_old| strictly before a token over the total."""
    gap = signals["teacher/original"].sampled_logprobs - signals["student/original"].sampled_logprobs
    gap = torch.where(ctx.loss_mask, gap.abs(), torch.zeros_like(gap))
    before = gap.cumsum(-1) - gap
    passed = before / (gap.sum(-1, keepdim=True) + _IW_EPS)
    weight = 1.0 + (ctx.settings.iw_max_weight - 1.0) * (1.0 - passed)
    ctx.measures["importance_weight"] = weight
    return weight


def overlap_weight(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """Weights that fall along a response: by `drop` for each token so far at which student and teacher share less than
    `overlap` of their K likeliest ids, from `base` + 1 down to `base`.

    Prune-OPD (arXiv 2605.07804), `prune_opd.py` in the authors' commit, as a fork has it; settings of their scripts.
    Their advantage is one of the K entries, here it is that of the sampled token. What the method does to the length of
    responses is left out."""
    own = ctx.method_settings
    overlap = topk_overlap(signals["student/original"], signals["teacher/original"])
    ctx.measures["overlap"] = overlap
    apart = ((overlap < own["overlap"]) & ctx.loss_mask).cumsum(-1)
    return (1.0 - own["drop"] * apart).clamp(min=0.0) + own["base"]


def likely_responses(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """All responses but those that the teacher finds least likely: the share `dropped`, by the mean over their tokens.

    FiRe-OPD (arXiv 2606.02684), `dp_actor.py` of YuYingLi0/FiRe-OPD. There the quantile is that of a micro-batch on one
    process; here of the batch of all processes."""
    teacher = torch.where(ctx.loss_mask, signals["teacher/original"].sampled_logprobs.double(), 0.0)
    count = ctx.loss_mask.sum(-1, keepdim=True)
    mean = teacher.sum(-1, keepdim=True) / count.clamp(min=1)
    means = ctx.pooled(mean, count > 0)
    if not means.numel():
        return ctx.loss_mask
    return (mean >= quantile(means.sort().values, ctx.method_settings["dropped"])).expand_as(ctx.loss_mask)


def confidence_weight(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """Weights by how sure the teacher is and how unsure the student: `(1 + alpha (1 - H_T / max H_T)) (1 + beta H_S /
    max H_S)`, with a mean of 1 over the batch.

    FiRe-OPD (arXiv 2606.02684), `dp_actor.py` of YuYingLi0/FiRe-OPD. Maxima and mean are over the batch of all
    processes, there over a micro-batch; entropies are of K entries and not of the vocabulary."""
    own, shares = ctx.method_settings, []
    for reader in ("teacher", "student"):
        entropy = topk_entropy(signals[f"{reader}/original"])
        ctx.measures[f"{reader}_entropy"] = entropy
        pooled = ctx.pooled(entropy)
        shares.append((entropy / pooled.max().clamp(min=1e-6)).clamp(0.0, 1.0) if pooled.numel() else entropy)
    teacher, student = shares
    weight = (1.0 + own["alpha"] * (1.0 - teacher)) * (1.0 + own["beta"] * student)
    return weight / ctx.pooled(weight).mean()
