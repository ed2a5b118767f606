"""A few steps with real sampling and checkpoints, resumed if asked to; process 0 writes prompts and final weights.

With `--stall`, process 1 stops after the first checkpoint, and the others wait for it in a collective operation. With
`--evaluate-first`, why training after an evaluation is refused.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from safetensors.torch import save_file
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from launching import EverythingSplit, accelerator_settings, whole_weights
from tiny import make_model, make_rows, make_trainer, metric

SAVE_STEPS = 2


class Stall(TrainerCallback):
    """Leaves the id of process 1 in a file and goes no further."""

    def __init__(self, folder: Path):
        self.folder = folder

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == SAVE_STEPS and args.process_index == 1:
            (self.folder / "pid.tmp").write_text(str(os.getpid()))
            os.replace(self.folder / "pid.tmp", self.folder / "pid")
            time.sleep(3600)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--placement", default="sharded")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--stall", action="store_true")
    parser.add_argument("--evaluate-first", action="store_true")
    args = parser.parse_args()
    trainer = make_trainer(
        args.output / "run",
        student=make_model(0),
        config_class=EverythingSplit,
        teacher_placement=args.placement,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        save_strategy="steps",
        save_steps=SAVE_STEPS,
        eval_dataset=make_rows(4, seed=9) if args.evaluate_first else None,
        callbacks=[Stall(args.output)] if args.stall else None,
        **accelerator_settings(),
    )
    if args.evaluate_first:
        trainer.evaluate()
        try:
            trainer.train()
        except ValueError as error:
            if trainer.accelerator.is_main_process:
                args.output.mkdir(parents=True, exist_ok=True)
                (args.output / "result.json").write_text(json.dumps({"refused": str(error)}))
        return
    trainer.train(resume_from_checkpoint=args.resume or None)
    trainer.save_model()
    weights = whole_weights(trainer)
    if trainer.accelerator.is_main_process:
        save_file({"weights": weights}, str(args.output / "result.safetensors"))
        result = {
            "processes": trainer.accelerator.num_processes,
            "backend": trainer.accelerator.distributed_type.value,
            "prompts": list(trainer._logs["prompt"]),
            "completions": list(trainer._logs["completion"]),
            "selected_tokens": metric(trainer, "selection/selected_tokens"),
            "loss": metric(trainer, "loss"),
        }
        (args.output / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
