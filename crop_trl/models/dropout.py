"""Dropout, off for good."""

import re

import torch
from transformers import PreTrainedConfig

_RATE = re.compile(r"dropout|pdrop|layerdrop|jitter_noise")


def remove_dropout(model: torch.nn.Module) -> bool:
    """Set every rate of dropout in modules and configurations to 0, in place; whether there was any."""
    modules = list(model.modules())
    holders = [vars(module) for module in modules]
    for module in modules:
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            holders += [vars(config), vars(config.get_text_config())]
    found = False
    for values in holders:
        for name, value in values.items():
            if _RATE.search(name) and isinstance(value, int | float) and not isinstance(value, bool) and value:
                values[name], found = 0.0, True
    for module in modules:
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p:
            module.p, found = 0.0, True
    return found
