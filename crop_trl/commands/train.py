"""Train a student with CROP, or with any other method of `crop_trl`, on triplet records.

    crop-trl train --accelerate_config cpu --config examples/configs/tiny_math.yaml

`--accelerate_config` takes a launch file of ours by name (cpu, single_gpu, ddp, zero2, zero3, fsdp2, ...) or any by its
path; without it accelerate's default holds. Every field of the YAML file can be overridden on the command line, for
instance `--method random --seed 1`. The method `base` evaluates the student and trains nothing.

With `--runs_dir DIR`, or started by a W&B agent, a run takes a folder of its own in DIR that is named by what it
changes of the `--config` file. If it is half done there it goes on, and if it is finished it ends at once.
"""

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

# A library that looks for its optional parts on the hub at every start would wait for it on a machine without one.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import psutil

from ..files import alone_in
from ..studies.naming import KEPT, LOCK, NamedRun, is_finished, named_run
from .errors import told
from .launch import end_with_launcher, is_launched, launch, split_options

_MODULE = "crop_trl.commands.train"


def launched(argv: list[str]) -> None:
    """As a command: on as many processes as the launch file says."""
    with told():
        options, rest = split_options(argv)
    if is_launched() or {"-h", "--help"} & set(argv):
        return main(rest)
    launch(_MODULE, options, rest)


def train_parser():
    """The parser of the command's settings; those of the launcher are split off before."""
    from trl import ModelConfig

    from ..runs import ScriptArguments, TrainConfig
    from .options import SettingsParser

    parser = SettingsParser("train", (ScriptArguments, TrainConfig, ModelConfig), __doc__)
    parser.add_argument(
        "--runs_dir", help="Folder in which the run's own is named by its settings, in place of `output_dir`."
    )
    return parser


def read_settings(argv: list[str]) -> tuple[dict[str, Any], NamedRun | None]:
    """All that is set, and the name of a run that is one of a study. Raises `ValueError` for what is wrong."""
    parser = train_parser()
    file, given = parser.layers(argv)
    settings = {name: value for name, value in {**file, **given}.items() if name != "config"}
    runs_dir, by_agent = settings.pop("runs_dir", None), "WANDB_SWEEP_ID" in os.environ
    if by_agent and "report_to" not in given:
        settings["report_to"] = "wandb"
    if {"runs_dir", "output_dir"} <= given.keys():
        raise ValueError("`runs_dir` and `output_dir` exclude each other; give one.")
    if not by_agent and ("output_dir" in given or not runs_dir):
        return settings, None
    run = named_run(parser.defaults(), file, given)
    # An agent starts many runs with one command, so what it gives is never the folder of one.
    runs_dir = given.get("output_dir") or runs_dir or settings.get("output_dir") or "runs"
    settings["output_dir"] = str(Path(runs_dir) / run.key)
    settings.setdefault("run_name", f"{run.world}: {run.name}")
    return settings, run


def main(argv: list[str] | None = None) -> None:
    """Parse, train, evaluate, draw: on this process, which a launcher may have started."""
    end_with_launcher()
    with told():
        options, argv = split_options(sys.argv[1:] if argv is None else argv)
    if options and not is_launched():
        return launch(_MODULE, options, argv)
    with ExitStack() as held:
        _train(argv, held)


def _train(argv: list[str], held: ExitStack) -> None:
    from ..prompts import save_how_asked
    from ..runs import finish_run, make_trainer
    from ..training.checkpoints import SaveError, last_with_steps_left
    from ..training.reporting import start_reports

    with told():
        settings, run = read_settings(argv)
        if run is not None:
            folder = Path(settings["output_dir"])
            run.check_folder(folder)
            if is_finished(folder):
                return print(f"{folder} is finished; nothing is left to do.")
            if os.environ.get("RANK", "0") == "0":
                held.enter_context(alone_in(folder / LOCK, f"{str(folder)!r}"))
                run.claim(folder)
        script, args, model = train_parser().parse_dict(settings)
        if run is not None:
            args.save_total_limit = args.save_total_limit and max(args.save_total_limit, KEPT)
            args.resume_from_checkpoint = last_with_steps_left(folder, args.max_steps)
            if args.resume_from_checkpoint and args.process_index == 0:
                print(f"Resuming from {args.resume_from_checkpoint}.")
        trainer = make_trainer(script, args, model)
        start_reports(trainer)
    again = "Interrupted; `--resume_from_checkpoint true` goes on from the last checkpoint, if one was written."
    # A full disk, for instance.
    with told(SaveError, OSError, interrupted=again if args.train else None):
        if args.train:
            if args.eval_on_start and trainer.accelerator.is_main_process:
                print(f"Evaluating the student on {len(trainer.eval_dataset)} held-out problems, then training.")
            if trainer.accelerator.is_main_process:
                asked = (script.prompt_template, script.conversational, args.chat_template_kwargs)
                save_how_asked(args.output_dir, *asked)
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
            trainer.save_model()
            trainer.save_state()
        finish_run(trainer, script.heatmap, psutil.Process().create_time(), script.view)


if __name__ == "__main__":
    main()
