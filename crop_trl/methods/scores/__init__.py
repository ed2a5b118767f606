"""What methods compute, by family: scores, weights, targets and so on, each `(signals, ctx) -> [B, T]`; `ctx.measures`
takes what is worth logging."""

from .controls import least_likely_score, random_score
from .need import (
    confidence_weight,
    crop_entropy_score,
    entropy_score,
    importance_weight,
    likely_responses,
    overlap_weight,
    ta_opd_score,
    tip_score,
)
from .places import first_score, first_tokens, last_score, late_weight
from .relevance import (
    contrast_score,
    contrastive_target,
    crop_max_score,
    crop_score,
    crop_student_score,
    crop_weight,
    negative_surface_divergence,
    reversed_crop_score,
    semantic_divergence,
    surface_divergence,
)
from .rewarded import contrastive_credit, is_rewarded, modulated_credit, modulated_weight, privileged_credit
from .sampled import calibrated_gap, centred_gap, mixture_gap, power_gap, uncertainty_penalty, verified_gap

__all__ = [
    "calibrated_gap",
    "centred_gap",
    "confidence_weight",
    "contrast_score",
    "contrastive_credit",
    "contrastive_target",
    "crop_entropy_score",
    "crop_max_score",
    "crop_score",
    "crop_student_score",
    "crop_weight",
    "entropy_score",
    "first_score",
    "first_tokens",
    "importance_weight",
    "is_rewarded",
    "last_score",
    "late_weight",
    "least_likely_score",
    "likely_responses",
    "mixture_gap",
    "modulated_credit",
    "modulated_weight",
    "negative_surface_divergence",
    "overlap_weight",
    "power_gap",
    "privileged_credit",
    "random_score",
    "reversed_crop_score",
    "semantic_divergence",
    "surface_divergence",
    "ta_opd_score",
    "tip_score",
    "uncertainty_penalty",
    "verified_gap",
]
