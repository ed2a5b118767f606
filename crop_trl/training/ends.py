"""End tokens. A Base student and a chat teacher end their responses with different ones, and each finds the other's
unlikely; here all of them end a response and count as one."""

import warnings

from accelerate.utils import is_peft_model
from transformers import PreTrainedTokenizerBase

from ..checks import DECLARED
from ..models.adapters import base_of
from ..scoring import Scorer
from ..scoring.local import LocalScorer


def check_ends(args, teacher, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raise `ValueError` unless `stop_token_ids` are tokens and the teacher can tell how likely each of them is."""
    ids = args.stop_token_ids
    if ids is None:
        return
    theirs = "`teacher_server_urls`" if args.teacher_server_urls else None
    if isinstance(teacher, Scorer) and not isinstance(teacher, LocalScorer):
        theirs = f"a {type(teacher).__name__}"
    if theirs:
        why = "which returns the sampled end token's log-probability alone"
        raise ValueError(f"`stop_token_ids` {ids!r} does not work with {theirs}, {why}; leave it out.")
    unknown = [] if tokenizer is None or ids == DECLARED else [id for id in ids if id >= len(tokenizer)]
    if unknown:
        what = f"{', '.join(map(str, unknown))}, and the tokenizer has {len(tokenizer)} tokens"
        raise ValueError(f"`stop_token_ids` names {what}; name others, or set it to {DECLARED!r}.")


def share_ends(trainer) -> None:
    """Let every end token of student and teacher, or those set, end a response and count as one."""
    given = trainer.args.stop_token_ids
    if given is None:
        return
    declared = [end for teacher in trainer.teachers.values() for end in teacher.ends or ()]
    others = declared if given == DECLARED else given
    ends = sorted({*trainer.eos_token_ids, *others})
    if trainer.accelerator.is_main_process and not trainer.args.disable_tqdm:
        names = ", ".join(f"{trainer._tokenizer.decode([end])!r} ({end})" for end in ends)
        print(f"Responses end with {names}{', which count as one' if len(ends) > 1 else ''}.")
    if len(ends) == 1:
        return
    trainer.eos_token_ids = ends  # by which GRPO tells what ended from what was cut off
    base_of(trainer.model).generation_config.eos_token_id = ends
    if is_peft_model(trainer.model):
        said = f"so tell what samples from it that the tokens {ends} end a response"
        warnings.warn(f"An adapter is saved without a `generation_config`, {said}.", stacklevel=2)
    if trainer.use_vllm:
        engine = trainer.vllm_generation
        engine.generation_kwargs = {**engine.generation_kwargs, "stop_token_ids": ends}
    else:
        trainer.generation_config.eos_token_id = trainer.generation_kwargs["eos_token_id"] = ends
    for scorer in trainer.scorers.values():
        scorer.layout["ends"] = ends
