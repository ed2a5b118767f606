"""Sample one batch of responses, score it every way there is, and see what each method would train of it.

    crop-trl replay --config examples/configs/tiny_math.yaml --use_cpu true \
        --num_counterfactuals 4 --bank runs/bank.safetensors

With a bank that exists the models are not loaded: it is read and the methods are applied to it again. `--selector` adds
a method of your own.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from trl import ModelConfig

from ..analysis.bank import RolloutBank, collect_bank
from ..analysis.bank_report import bank_report
from ..checks import check_numbers
from ..config import option
from ..prompts import TEACHER
from ..runs import ScriptArguments, TrainConfig, make_trainer
from ..training.data import tokenizer_of
from .errors import told
from .options import SettingsParser


@dataclass
class ReplayArguments:
    """Where the bank lies and what to show of it."""

    bank: str = option("runs/bank.safetensors", "File to write, or to read if it exists.")
    bank_prompts: int = option(64, "Prompts to sample from.")


def _found(name: str | None) -> str | None:
    """A name that holds in any working directory: of what lies here its absolute path."""
    return os.path.abspath(name) if name and os.path.exists(name) else name


def read_or_sample(
    path: Path,
    prompts: int,
    script: ScriptArguments,
    args: TrainConfig,
    model: ModelConfig,
    responses: int | None = None,
) -> RolloutBank:
    """The bank in this file; where there is none, one of responses to so many prompts, which is written there. Raises
    `ValueError` for a bank with a teacher of another source than the run that is described."""
    if path.exists():
        print(f"Reading {path}.")
        bank = RolloutBank.load(path)
        for setting in ("teachers", "teacher_source") if model.model_name_or_path else ():
            now = getattr(args, setting)
            was = bank.settings.get(setting, now)
            if was != now:
                other = f"{str(path)!r} was sampled with {was!r}; give that, or another `--bank`"
                raise ValueError(f"`{setting}` is {now!r}, but {other}.")
        return bank
    check_numbers({"bank_prompts": prompts, "responses": responses}, 1, whole=True, optional=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    trainer = make_trainer(script, args, model)
    rows = trainer.train_dataset.select(range(min(prompts, len(trainer.train_dataset))))
    bank = collect_bank(trainer, rows, responses)
    bank.settings = {
        "method": args.method,
        "model_name_or_path": _found(model.model_name_or_path),
        "teacher": trainer.run_settings.get(TEACHER) or ", ".join(trainer.teachers),
        "teacher_source": args.teacher_source,
        "teachers": args.teachers,
        "teacher_model_name_or_path": _found(args.teacher_model_name_or_path),
        "dataset_name": _found(script.dataset_name),
        "seed": args.seed,
    }
    bank.save(path)
    print(f"Wrote {path}.")
    return bank


def student_tokenizer(name: str | None, args: TrainConfig, model: ModelConfig):
    """As training loads it, of the student of that name; `None` without one."""
    return tokenizer_of(name, None, "model_name_or_path", args.trust_remote_code, model.model_revision)


def main(argv: list[str] | None = None) -> None:
    """Parse, sample or read, report."""
    with told():
        kinds = (ReplayArguments, ScriptArguments, TrainConfig, ModelConfig)
        replay, script, args, model = SettingsParser("replay", kinds, __doc__).read(argv)
        bank = read_or_sample(Path(replay.bank), replay.bank_prompts, script, args, model)
        tokenizer = student_tokenizer(model.model_name_or_path, args, model)
        report = bank_report(bank, args.selection_settings, tokenizer, args.method)
    print(report)


if __name__ == "__main__":
    main()
