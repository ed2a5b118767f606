"""Train a student with CROP, or with any other method of `crop_trl`, on triplet records.

    crop-trl train --accelerate_config cpu --config examples/configs/tiny_math.yaml

`--accelerate_config` takes a launch file of ours by name (cpu, single_gpu, ddp, zero2, zero3, fsdp2, ...) or any by its
path; without it accelerate's default holds. Every field of the YAML file can be overridden on the command line, for
instance `--method random --seed 1`. The method `base` evaluates the student and trains nothing.
"""

import os
import sys

# A library that looks for its optional parts on the hub at every start would wait for it on a machine without one.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from .errors import told
from .launch import is_launched, launch, split_options

_MODULE = "crop_trl.commands.train"


def launched(argv: list[str]) -> None:
    """As a command: on as many processes as the launch file says."""
    with told():
        options, rest = split_options(argv)
    if is_launched() or {"-h", "--help"} & set(argv):
        return main(rest)
    launch(_MODULE, options, rest)


def main(argv: list[str] | None = None) -> None:
    """Parse, train, evaluate, draw: on this process, which a launcher may have started."""
    with told():
        options, argv = split_options(sys.argv[1:] if argv is None else argv)
    if options and not is_launched():
        return launch(_MODULE, options, argv)

    from trl import ModelConfig

    from ..prompts import save_template
    from ..runs import ScriptArguments, TrainConfig, finish_run, make_trainer
    from ..training.checkpoints import SaveError
    from ..training.reporting import start_reports
    from .options import SettingsParser

    with told():
        parser = SettingsParser("train", (ScriptArguments, TrainConfig, ModelConfig), __doc__)
        script, args, model = parser.read(argv)
        trainer = make_trainer(script, args, model)
        start_reports(trainer)
    if args.train:
        if args.eval_on_start and trainer.accelerator.is_main_process:
            print(f"Evaluating the student on {len(trainer.eval_dataset)} held-out problems, then training.")
        again = "Interrupted; `--resume_from_checkpoint true` goes on from the last checkpoint, if one was written."
        with told(SaveError, interrupted=again):
            if trainer.accelerator.is_main_process:
                save_template(args.output_dir, script.prompt_template)
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
            trainer.save_model()
            trainer.save_state()
    finish_run(trainer, script.heatmap)


if __name__ == "__main__":
    main()
