"""Compiled decoder layers, for scoring and for the update."""

import torch
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The decoder layers of a Transformers model, or of a wrapper of one; none where they are not marked as such."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def compile_layers(model: torch.nn.Module) -> None:
    """Compile the decoder layers of a model, in place: one graph for all of them and for every length."""
    layers = decoder_layers(model)
    if not layers:
        raise ValueError(f"`compile_layers` found no decoder layers in {type(model).__name__}; leave it off.")
    # One graph serves rows and lengths of every size but one; the limit is per function, shared by all layers, in
    # training, in scoring, and with a row alone.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    for layer in layers:
        layer.compile(dynamic=True)
