"""The teacher before training starts: what it may be, and how it is loaded."""

from contextlib import nullcontext

from accelerate import Accelerator
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from trl.distributed import DistributedBackend

from ..models.compilation import compile_layers
from ..models.distributed import largest_of
from ..models.fp8 import quantize_layers
from ..models.rotary import check_rotary_lengths, restore_rotary_frequencies
from ..models.sharding import load_whole, shard_teacher
from . import Scorer
from .head import add_token_head
from .local import LocalScorer
from .placement import OffloadedWeights, quantization_config
from .server import ServerScorer


def connect_teacher(teacher: str | None, tokenizer: PreTrainedTokenizerBase | None, args) -> ServerScorer:
    """The scorer of a teacher on servers, after everything that can be checked without the student."""
    if teacher is not None and not isinstance(teacher, str):
        kind = type(teacher).__name__
        raise ValueError(f"`teacher` is a {kind}, and `teacher_server_urls` is set; remove one of the two.")
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
    scorer.check_length((args.max_prompt_length or 0) + (args.max_completion_length or 0))
    if tokenizer is not None:
        scorer.check_vocabulary(tokenizer)
    return scorer


def load_teacher(path: str, init_kwargs: dict) -> PreTrainedModel:
    """A causal language model from a folder or the hub, all of whose weights are there."""
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **init_kwargs)
    except TypeError as error:
        what = "take out of `teacher_init_kwargs` what `from_pretrained` does not know"
        raise ValueError(f"The teacher cannot be loaded ({error}); {what}.") from error
    if loaded["missing_keys"]:
        missing = ", ".join(sorted(loaded["missing_keys"])[:3])
        raise ValueError(
            f"The teacher {path!r} has no {missing}, which would be random, as of a reward model or a classifier; "
            "choose a causal language model."
        )
    return model


def freeze(teacher: PreTrainedModel, longest: int) -> None:
    """Make a model, in place, one that only reads, up to `longest` tokens. Raises `ValueError` where it cannot."""
    teacher.eval().requires_grad_(False)
    restore_rotary_frequencies(teacher)
    check_rotary_lengths(teacher, longest)


def make_teacher(
    teacher: str | PreTrainedModel | PeftModel | Scorer,
    student: PreTrainedModel,
    args,
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
    end_token_id: int | None = None,
) -> Scorer:
    """The scorer of a teacher: of a model, of one that is loaded from a path, or the one that is given."""
    sharded, num_tokens = args.teacher_placement == "sharded", len(tokenizer)
    if isinstance(teacher, str):
        init_kwargs = {
            "dtype": "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
            "trust_remote_code": args.trust_remote_code,
            **args.teacher_kwargs,
        }
        if args.teacher_quantization in ("8bit", "4bit"):
            init_kwargs["quantization_config"] = quantization_config(args.teacher_quantization, init_kwargs["dtype"])
        if init_kwargs.get("quantization_config") is not None:
            # Weights are quantised where they are going to stay.
            init_kwargs.setdefault("device_map", {"": accelerator.device})
        # ZeRO-3 splits the weights as they are read, so that no process ever holds them all.
        with nullcontext() if sharded and DistributedBackend(accelerator).is_zero3 else load_whole():
            teacher = load_teacher(teacher, init_kwargs)
    if isinstance(teacher, PeftModel):
        teacher = teacher.get_base_model()  # whose layers hold the adapter
    if not isinstance(teacher, PreTrainedModel):
        return teacher
    entries = teacher.config.get_text_config().vocab_size
    if entries < num_tokens:
        raise ValueError(
            f"The teacher has {entries} vocabulary entries, fewer than the {num_tokens} tokens of the student's "
            "tokenizer; choose a teacher of the same family."
        )
    own = {id(parameter) for parameter in student.parameters()}
    if any(id(parameter) in own for parameter in teacher.parameters()):
        raise ValueError("Student and teacher share weights; pass a copy of the model, or its path, as `teacher`.")
    freeze(teacher, (args.max_prompt_length or 0) + (args.max_completion_length or 0))
    scoring = {
        "top_k": args.score_top_k,
        "pad_token_id": tokenizer.pad_token_id,
        "tokens_per_batch": args.score_tokens_per_batch,
        "pad_to_multiple_of": args.pad_to_multiple_of,
        "end_token_id": end_token_id,
    }
    if sharded:
        add_token_head(teacher)
        return LocalScorer(shard_teacher(teacher, accelerator), agree=largest_of(accelerator), **scoring)
    if any(hasattr(parameter, "ds_id") for parameter in teacher.parameters()):
        raise ValueError("`teacher` is split by ZeRO-3; pass its path, or set `teacher_placement` to 'sharded'.")
    if args.teacher_quantization == "fp8":
        quantize_layers(teacher, accelerator.device)
    where = nullcontext()
    if args.teacher_placement == "offload":
        if getattr(teacher, "is_quantized", False):
            raise ValueError("`teacher_placement` 'offload' does not work for a quantised one; set it to 'resident'.")
        where = OffloadedWeights(teacher, accelerator.device)
    elif getattr(teacher, "hf_device_map", None) is None:  # else `device_map` said where
        teacher = teacher.to(accelerator.device)
    if args.compile_layers:
        compile_layers(teacher)
    return LocalScorer(teacher, ready=lambda: where, **scoring)
