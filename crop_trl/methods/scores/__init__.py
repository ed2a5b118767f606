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
)
from .rewarded import contrastive_credit, is_rewarded, modulated_credit, modulated_weight, privileged_credit
from .sampled import calibrated_gap, centred_gap, mixture_gap, power_gap, uncertainty_penalty, verified_gap
