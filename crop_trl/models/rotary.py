"""Rotary frequencies in full precision: rounded to bf16, as when a whole model is cast, they turn late tokens away."""

import warnings

import torch


def restore_rotary_frequencies(model: torch.nn.Module) -> None:
    """
    Give rotary embeddings (`inv_freq`, made from `config` alone) their frequencies in fp32; warns where they were
    rounded.
    """
    rounded = False
    for module in model.modules():
        names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
        if not names or not hasattr(module, "config"):
            continue
        try:
            fresh = type(module)(module.config)
        except TypeError:
            continue
        for name in names:
            held, right = getattr(module, name), getattr(fresh, name, None)
            if right is None or right.shape != held.shape or torch.equal(held.float().cpu(), right.float().cpu()):
                continue
            setattr(module, name, right.to(held.device))
            rounded = True
    if rounded:
        warnings.warn(
            f"The rotary frequencies of {type(model).__name__} were rounded when it was loaded or cast, which moves "
            "late tokens; they are restored in float32.",
            stacklevel=3,
        )
