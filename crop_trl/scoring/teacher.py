"""Students and teachers before training starts: what they may be, and how a teacher is loaded."""

import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from trl.distributed import DistributedBackend

from ..models.compilation import compile_layers
from ..models.distributed import largest_of
from ..models.rotary import restore_rotary_frequencies
from ..models.sharding import load_whole, shard_teacher
from ..text import masked
from . import Scorer
from .head import add_token_head
from .local import LocalScorer
from .placement import OffloadedWeights, quantization_config
from .server import ServerScorer


def check_adapter(model, peft_config) -> None:
    """Raise `ValueError` for adapters that put positions of their own before the prompt."""
    configs = [peft_config] if peft_config is not None else list(getattr(model, "peft_config", {}).values())
    for config in configs:
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"`peft_config` {type(config).__name__} is not supported: it puts positions of its own before the "
                "prompt; use LoRA or another adapter of the weights."
            )


def is_adapter(model) -> bool:
    """Whether a model, or what a folder holds, is an adapter on another model."""
    if isinstance(model, str):
        return (Path(model) / "adapter_config.json").exists()
    return is_peft_model(model) or getattr(model, "_hf_peft_config_loaded", False)


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


def connect_teacher(teacher: str | None, tokenizer: PreTrainedTokenizerBase | None, args) -> ServerScorer:
    """
    The scorer of a teacher on servers, after everything that can be checked without the student.

    Args:
        teacher (`str`, *optional*):
            Name or path under which the servers hold it.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The student's.
        args ([`~crop_trl.CROPConfig`]):
            Addresses, K, and the limits on lengths and waiting.

    Raises:
        `ValueError`: a server does not answer, serves another model or vocabulary, takes too few tokens or returns
        fewer than K entries.
    """
    if teacher is not None and not isinstance(teacher, str):
        raise ValueError(
            f"`teacher` is a {type(teacher).__name__}, but `teacher_server_urls` puts the teacher on a server; remove "
            "one of the two."
        )
    scorer = ServerScorer(
        args.teacher_server_urls,
        teacher,
        args.score_top_k,
        args.teacher_server_timeout,
        device=args.device,
        process_index=args.process_index,
        num_processes=args.world_size,
    )
    # The smallest sequence there is: tells whether the server returns K entries.
    scorer.score([[0]], [[0]])
    scorer.stats.reset()
    scorer.check_length((args.max_prompt_length or 0) + args.max_completion_length)
    if tokenizer is not None:
        scorer.check_vocabulary(tokenizer)
    return scorer


def make_teacher(
    teacher: str | PreTrainedModel | Scorer, student: PreTrainedModel, args, pad_token_id: int, accelerator: Accelerator
) -> Scorer:
    """
    The scorer of a teacher.

    Args:
        teacher (`str` or [`~transformers.PreTrainedModel`] or [`~crop_trl.scoring.Scorer`]):
            Where to load it from, the model itself, or a scorer, which is returned as it is.
        student ([`~transformers.PreTrainedModel`]):
            What it has to fit.
        args ([`~crop_trl.CROPConfig`]):
            Precision, keyword arguments of loading, placement, K and the tokens of a batch.
        pad_token_id (`int`):
            Any valid id.
        accelerator ([`~accelerate.Accelerator`]):
            Device of a model, and how weights are spread over processes.

    Returns:
        [`~crop_trl.scoring.Scorer`]; a model is put into evaluation mode and takes no gradient.

    Raises:
        `ValueError`: fewer vocabulary entries than the student, weights shared with it, or a part of them only.
    """
    sharded = args.teacher_placement == "sharded"
    if isinstance(teacher, str):
        init_kwargs = {
            "dtype": "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
            "trust_remote_code": args.trust_remote_code,
            **(args.teacher_init_kwargs or {}),
        }
        if args.teacher_quantization is not None:
            init_kwargs["quantization_config"] = quantization_config(args.teacher_quantization, init_kwargs["dtype"])
        if init_kwargs.get("quantization_config") is not None:
            # Weights are quantised where they are going to stay.
            init_kwargs.setdefault("device_map", {"": accelerator.device})
        # ZeRO-3 splits the weights as they are read, so that no process ever holds them all.
        with nullcontext() if sharded and DistributedBackend(accelerator).is_zero3 else load_whole():
            try:
                teacher = AutoModelForCausalLM.from_pretrained(teacher, **init_kwargs)
            except TypeError as error:
                raise ValueError(
                    f"The teacher cannot be loaded with `teacher_init_kwargs` {masked(args.teacher_init_kwargs)} "
                    f"({error}); take out what `from_pretrained` does not know."
                ) from error
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
    teacher = teacher.eval().requires_grad_(False)
    restore_rotary_frequencies(teacher)
    scoring = {
        "top_k": args.score_top_k,
        "pad_token_id": pad_token_id,
        "tokens_per_batch": args.score_tokens_per_batch,
        "pad_to_multiple_of": args.pad_to_multiple_of,
    }
    if sharded:
        add_token_head(teacher)
        return LocalScorer(shard_teacher(teacher, accelerator), agree=largest_of(accelerator), **scoring)
    if any(hasattr(parameter, "ds_id") for parameter in teacher.parameters()):
        raise ValueError(
            "`teacher` is a model that ZeRO-3 split as it was loaded; pass its path, or set `teacher_placement` to "
            "'sharded'."
        )
    offload = None
    if args.teacher_placement == "offload":
        if getattr(teacher, "is_quantized", False):
            raise ValueError(
                "`teacher_placement` 'offload' does not work with a quantised teacher, whose weights stay on their "
                "device; set it to 'resident'."
            )
        offload = OffloadedWeights(teacher, accelerator.device)
    elif getattr(teacher, "hf_device_map", None) is None:  # else `device_map` said where
        teacher = teacher.to(accelerator.device)
    if args.compile_layers:
        compile_layers(teacher)
    return LocalScorer(teacher, offload=offload, **scoring)
