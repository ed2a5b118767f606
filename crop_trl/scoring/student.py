"""The student before it is wrapped for training: made ready to project chosen positions, and its scorer."""

import warnings
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from ..models.adapters import base_of
from ..models.averaging import AverageWeights
from ..models.compilation import compile_layers
from ..models.distributed import largest_of
from ..models.rotary import check_rotary_lengths, restore_rotary_frequencies
from ..models.sharding import gather_by_layer, is_sharded, keep_full_outputs
from .head import add_token_head
from .local import LocalScorer
from .placement import INITIAL


def warn_of_coarse_weights(student: torch.nn.Module, learning_rate: float) -> None:
    """Warn when the trained weights have a type in which small updates round to nothing."""
    coarse = {p.dtype for p in student.parameters() if p.requires_grad} & {torch.bfloat16, torch.float16}
    if coarse:
        kind = str(coarse.pop()).removeprefix("torch.")
        said = f"updates of `learning_rate` {learning_rate} can round to nothing; load it in float32"
        warnings.warn(f"The student's trainable weights are {kind}, where {said}.", stacklevel=3)


def make_own_teacher(student: LocalScorer, source: str, average: AverageWeights | None = None) -> LocalScorer:
    """The student as its own teacher: as it is, without its adapter, or with an average of its weights."""
    if average is not None:
        return student.reading_with(average.lent)
    return student.reading_with(student.model.disable_adapter if source == INITIAL else nullcontext)


def make_student(model: PreTrainedModel, args, pad_token_id: int, accelerator: Accelerator) -> LocalScorer:
    """Make the student ready for scoring and update, in place, and return its scorer."""
    keep_full_outputs(accelerator)
    warn_of_coarse_weights(model, args.learning_rate)
    bare = base_of(model)
    restore_rotary_frequencies(bare)
    check_rotary_lengths(bare, (args.max_prompt_length or 0) + (args.max_completion_length or 0))
    add_token_head(bare)
    gather_by_layer(bare, accelerator)
    if args.compile_layers:
        compile_layers(bare)
    return LocalScorer(
        model,
        args.score_top_k,
        pad_token_id,
        args.score_tokens_per_batch,
        context=accelerator.autocast,
        agree=largest_of(accelerator) if is_sharded(accelerator) else None,
        as_trained=True,
        pad_to_multiple_of=args.pad_to_multiple_of,
    )
