"""What methods compute, by family: scores, weights and targets, each `(signals, ctx) -> [B, T]`; `ctx.measures` takes
what is worth logging."""

from .controls import first_score, last_score, least_likely_score, random_score
from .need import crop_entropy_score, entropy_score, importance_weight, ta_opd_score, tip_score
from .relevance import (
    contrast_score,
    contrastive_target,
    crop_max_score,
    crop_score,
    crop_student_score,
    negative_surface_divergence,
    reversed_crop_score,
    semantic_divergence,
    surface_divergence,
)

__all__ = [
    "contrast_score",
    "contrastive_target",
    "crop_entropy_score",
    "crop_max_score",
    "crop_score",
    "crop_student_score",
    "entropy_score",
    "first_score",
    "importance_weight",
    "last_score",
    "least_likely_score",
    "negative_surface_divergence",
    "random_score",
    "reversed_crop_score",
    "semantic_divergence",
    "surface_divergence",
    "ta_opd_score",
    "tip_score",
]
