"""Adapters: models that are a few weights on top of another."""

from pathlib import Path

from accelerate.utils import is_peft_model


def base_of(model):
    """The Transformers model under adapters, or the model itself."""
    return model.get_base_model() if is_peft_model(model) else model


def check_adapter(model, peft_config) -> None:
    """Raise `ValueError` for adapters that put positions of their own before the prompt."""
    configs = [peft_config] if peft_config is not None else list(getattr(model, "peft_config", {}).values())
    for config in configs:
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"`peft_config` {type(config).__name__} is not supported: it puts positions of its own before the "
                "prompt; use LoRA or another adapter of the weights."
            )


def starts_at_nothing(peft_config) -> bool:
    """Whether a new adapter leaves the model as it is until it is trained, and the weights below it for good."""
    return peft_config is not None and getattr(peft_config, "init_lora_weights", None) in (True, "gaussian")


def is_adapter(model) -> bool:
    """Whether a model, or what a folder holds, is an adapter on another model."""
    if isinstance(model, str):
        return (Path(model) / "adapter_config.json").exists()
    return is_peft_model(model) or getattr(model, "_hf_peft_config_loaded", False)
