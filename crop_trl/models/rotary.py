"""Rotary frequencies in full precision: rounded to bf16, as when a whole model is cast, they turn late tokens away."""

import warnings

import torch


def restore_rotary_frequencies(model: torch.nn.Module) -> None:
    """Give rotary embeddings (`inv_freq`) their frequencies in fp32; warns where they were rounded."""
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
        name = type(model).__name__
        warnings.warn(f"The rotary frequencies of {name} were rounded, and are restored in float32.", stacklevel=3)


def check_rotary_lengths(model: torch.nn.Module, longest: int) -> None:
    """Raise `ValueError` for rotary positions whose frequencies follow from the longest sequence of a batch."""
    text = model.config.get_text_config()
    given = getattr(text, "rope_parameters", None) or {}
    kinds = [given, *(value for value in given.values() if isinstance(value, dict))]
    for rope in (each for each in kinds if each.get("rope_type") in ("longrope", "dynamic")):
        known = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", text.max_position_embeddings
        )
        if longest > known:
            raise ValueError(
                f"{type(model).__name__} has `{rope['rope_type']}` rotary positions, which change for a batch with its "
                f"first sequence of more than {known} tokens, and prompt and response may have {longest}; lower "
                "`max_prompt_length` or `max_completion_length`, or choose another model."
            )
