"""Rotary frequencies in full precision.

A model that is cast as a whole, or built by ZeRO-3 with some versions of Transformers, holds the frequencies of its
rotary positions in bf16. The phase of a late token is then off by whole turns: log-probabilities drift with the
position, away from the engine's, and nothing says so.
"""

import warnings

import torch


def restore_rotary_frequencies(model: torch.nn.Module) -> None:
    """
    Give the rotary position embeddings of a model the frequencies that its configuration asks for, in fp32.

    Warns when they were rounded. Modules that do not follow Transformers' form (a buffer named `inv_freq`, made from
    `config` alone) are left as they are.
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
