"""Scores that know nothing of the teacher."""

import numpy as np
import torch

from ..context import SelectionContext, Signals


def random_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """By chance: uniform scores, drawn for row i of the global batch from a generator of (seed + step, i)."""
    width = ctx.loss_mask.size(1)
    draws = [np.random.default_rng([ctx.settings.seed + ctx.step, row]).random(width) for row in ctx.rows.tolist()]
    return torch.from_numpy(np.stack(draws)).to(ctx.loss_mask.device) if draws else ctx.loss_mask.double()


def least_likely_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """What the student itself found least likely: -log S_old of the response token."""
    return -signals["student/original"].sampled_logprobs
