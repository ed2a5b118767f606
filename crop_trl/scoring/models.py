"""Students and teachers before training starts: what they may be, and how a teacher is loaded."""

import warnings

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..compilation import compile_layers
from . import Scorer
from .local import LocalScorer


def check_adapter(model, peft_config) -> None:
    """Raise `ValueError` for adapters that put positions of their own before the prompt."""
    configs = [peft_config] if peft_config is not None else list(getattr(model, "peft_config", {}).values())
    for config in configs:
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"`peft_config` {type(config).__name__} is not supported: it puts positions of its own before the "
                "prompt; use LoRA or another adapter of the weights."
            )


def warn_of_coarse_weights(student: torch.nn.Module, learning_rate: float) -> None:
    """Warn when the trained weights have a type in which small updates round to nothing."""
    coarse = {p.dtype for p in student.parameters() if p.requires_grad} & {torch.bfloat16, torch.float16}
    if coarse:
        warnings.warn(
            f"The student's trainable weights are {str(coarse.pop()).removeprefix('torch.')}, where updates of "
            f"`learning_rate` {learning_rate} can round to nothing; load it in float32 (bf16 then means mixed "
            "precision).",
            stacklevel=3,
        )


def make_teacher(
    teacher: str | PreTrainedModel | Scorer, student: PreTrainedModel, args, pad_token_id: int, device: torch.device
) -> Scorer:
    """
    The scorer of a teacher.

    Args:
        teacher (`str` or [`~transformers.PreTrainedModel`] or [`~crop_trl.scoring.Scorer`]):
            Where to load it from, the model itself, or a scorer, which is returned as it is.
        student ([`~transformers.PreTrainedModel`]):
            What it has to fit.
        args ([`~crop_trl.CROPConfig`]):
            Precision, keyword arguments of loading, K and the tokens of a batch.
        pad_token_id (`int`):
            Any valid id.
        device (`torch.device`):
            Where a model goes.

    Returns:
        [`~crop_trl.scoring.Scorer`]; a model is put into evaluation mode and takes no gradient.

    Raises:
        `ValueError`: fewer vocabulary entries than the student, or weights shared with it.
    """
    if isinstance(teacher, str):
        init_kwargs = {
            "dtype": "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
            "trust_remote_code": args.trust_remote_code,
            **(args.teacher_init_kwargs or {}),
        }
        teacher = AutoModelForCausalLM.from_pretrained(teacher, **init_kwargs)
    if not isinstance(teacher, PreTrainedModel):
        return teacher
    entries, sampled = (model.config.get_text_config().vocab_size for model in (teacher, student))
    if entries < sampled:
        raise ValueError(
            f"The teacher has {entries} vocabulary entries, fewer than the {sampled} that the student can sample; "
            "choose a teacher of the same family."
        )
    own = {id(parameter) for parameter in student.parameters()}
    if any(id(parameter) in own for parameter in teacher.parameters()):
        raise ValueError("Student and teacher share weights; pass a copy of the model, or its path, as `teacher`.")
    teacher = teacher.to(device).eval().requires_grad_(False)
    if args.compile_layers:
        compile_layers(teacher)
    return LocalScorer(teacher, args.score_top_k, pad_token_id, args.score_tokens_per_batch)
