"""What depends on where in its response a token stands, and on nothing that was read there."""

import torch

from ..context import SelectionContext, Signals


def first_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """The beginning of each response."""
    return -ctx.loss_mask.cumsum(-1).float()


def last_score(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """The end of each response."""
    return ctx.loss_mask.cumsum(-1).float()


def first_tokens(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """The beginning of each response, whatever the budget: its first `tokens` tokens.

    ESR (arXiv 2605.27028), section 4. There no more than these are sampled, which `max_completion_length` does as well;
    here the whole response is, and they alone are kept."""
    return ctx.loss_mask.cumsum(-1) <= ctx.method_settings["tokens"]


def late_weight(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """Weights that rise from `floor` to 1 along a response, half of the way at the share `middle` of it, within
    `width`.

    PW-OPSD (arXiv 2605.21606), `code/ea_opsd_trainer.py` of SaFo-Lab/PW-OPSD. There the loss is a mean over responses;
    here it is one over tokens, which the authors have as an ablation."""
    own = ctx.method_settings
    place = (ctx.positions + 0.5) / ctx.lengths.clamp(min=1)[:, None]
    weight = own["floor"] + (1.0 - own["floor"]) * torch.sigmoid((place - own["middle"]) / own["width"])
    ctx.measures["place_weight"] = weight
    return weight
