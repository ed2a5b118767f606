"""Teachers and student of a run: made ready to score, and looked at before the first step."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers import TrainerCallback

from ..checks import told_of
from ..config import CROPConfig
from ..methods import get_method
from ..models.averaging import AverageWeights
from ..models.dropout import remove_dropout
from ..prompts import STUDENT, TEACHER, prompt_kinds
from ..scoring import Scorer
from ..scoring.placement import AVERAGE, MODEL
from ..scoring.preflight import check_own_logits, run_preflight
from ..scoring.student import make_own_teacher, make_student
from ..scoring.teacher import connect_teacher, make_teacher
from . import data
from .ends import check_ends


def connect_teachers(
    teachers: Mapping[str, tuple[Any, CROPConfig]], tokenizer, teacher_processing_class, trust: bool
) -> tuple[dict[str, tuple[Any, CROPConfig]], dict[str, int | None]]:
    """Teachers with those on a server connected, and the end of text of each model, which reads as the student does."""
    found, ends = {}, {}
    for name, (one, own) in teachers.items():
        with told_of(name):
            check_ends(own, one, tokenizer)
            if own.teacher_server_urls:
                one = connect_teacher(one, tokenizer, own)
            elif own.teacher_source == MODEL:
                revision = own.teacher_kwargs.get("revision")
                ends[name] = data.check_same_tokenizer(tokenizer, one, teacher_processing_class, trust, revision)
        found[name] = (one, own)
    return found, ends


def make_scorers(
    trainer, teachers: Mapping[str, tuple[Any, CROPConfig]], ends: Mapping[str, int | None]
) -> dict[str, Scorer]:
    """Teachers and student, made ready to score responses."""
    model, args, tokenizer, accelerator = trainer.model, trainer.args, trainer._tokenizer, trainer.accelerator
    student = make_student(model, args, tokenizer.pad_token_id, accelerator)
    averaging = {name: own.teacher_decay for name, (_, own) in teachers.items() if own.teacher_source == AVERAGE}
    trainer.averages = {name: AverageWeights(model, decay) for name, decay in averaging.items()}
    found = {}
    for name, (one, own) in teachers.items():
        with told_of(name):
            if one is None:
                found[name] = make_own_teacher(student, own.teacher_source, trainer.averages.get(name))
            else:
                found[name] = make_teacher(one, model, own, tokenizer, accelerator, ends.get(name))
    if not args.on_policy and remove_dropout(model) and accelerator.is_main_process:
        print("Dropout is off: updates that are not on policy compare with the student as it sampled.")
    return {**found, STUDENT: student}


class Preflight(TrainerCallback):
    """Looks at the teachers once they are made, and on every process at the student once it is wrapped for training:
    at its own forward, and at it as a teacher where it is one."""

    def __init__(self, trainer, row: Mapping[str, Any]):
        self.trainer, self.row = trainer, row
        student = trainer.scorers[STUDENT].model
        own = {name for name, teacher in trainer.teachers.items() if getattr(teacher, "model", None) is student}
        self.own_teachers = sorted(own)
        for name in sorted(trainer.teachers.keys() - own):  # the same order on all processes
            self.check_teacher(name)

    def on_train_begin(self, args, state, control, **kwargs):
        trainer = self.trainer
        (ids,) = trainer._tokens(self.row, [self.row["prompt"]])
        with trainer._as_scored():
            # A single short row without gradients: with `compile_layers` it would get graphs that serve nothing else.
            with torch.compiler.set_stance("force_eager"):
                check_own_logits(trainer.scorers[STUDENT], ids, ids, STUDENT)
            for name in self.own_teachers:
                self.check_teacher(name)
        trainer.scorers[STUDENT].stats.reset()

    def check_teacher(self, name: str) -> str:
        """Raise `ValueError` unless a teacher can score this run's prompts; print and return what was found."""
        trainer, args, teacher = self.trainer, self.trainer.args, self.trainer.scorers[name]
        with told_of(name):
            found = run_preflight(
                teacher,
                self.row,
                prompt_kinds(get_method(args.method).needs),
                partial(trainer._tokens, self.row),
                trainer._tokenizer,
                top_k=args.score_top_k,
                num_tokens=len(trainer._tokenizer),
                student_ends=trainer.eos_token_ids if args.stop_token_ids is None else None,
                chat_template_kwargs=args.chat_template_kwargs,
            )
        if hasattr(teacher, "stats"):
            teacher.stats.reset()
        if trainer.accelerator.is_main_process and not args.disable_tqdm:
            print(f"Preflight{'' if name == TEACHER else f' of {name}'}: {found}.")
        return found
