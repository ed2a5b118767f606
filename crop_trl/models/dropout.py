"""Dropout, off for good."""

import torch


def remove_dropout(model: torch.nn.Module) -> bool:
    """Set every rate of dropout in a model to 0, in place; whether there was any."""
    found = False
    for module in model.modules():
        rates = [name for name, value in vars(module).items() if name.endswith(("dropout", "layerdrop")) and value]
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p:
            rates.append("p")
        for name in rates:
            if isinstance(getattr(module, name), float):
                setattr(module, name, 0.0)
                found = True
    return found
