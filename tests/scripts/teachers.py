"""Two steps with teachers of every source, on rollouts that depend on the prompt alone; process 0 writes losses,
weights and the average. With two processes and teachers by name, each process has rows of one of them alone."""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from launching import EverythingSplit, FixedRollouts, accelerator_settings, whole_weights
from tiny import make_model, make_rows, make_trainer, metric

from crop_trl import CROPConfig, Method, register_method

NAMES = ("left", "right")
register_method("hinted", Method(target="teacher/hint"))
register_method("two", Method(needs=("left/original",), score=lambda s, _: -s["left/original"].sampled_logprobs))


def rows():
    def add(row, place):
        hint = [{"role": "user", "content": row["prompt"][0]["content"] + f" {row['answer']}"}]
        return {"hint_prompt": hint, "teacher": NAMES[place % 2]}

    return make_rows(16).map(add, with_indices=True)


def run(case: str, args) -> dict[str, torch.Tensor]:
    source, *rest = case.split("+")
    by_name = source in ("named", "sharded")
    if by_name:
        teachers = {"teacher": {name: make_model(i + 1, hidden=48 - 16 * i) for i, name in enumerate(NAMES)}}
        teachers["teacher_placement"] = "resident" if source == "named" else source
    else:
        teachers = {"teacher_source": source, "teacher_decay": 0.6}
    if "resumed" in rest:
        teachers |= {"save_strategy": "steps", "save_steps": 1}
    make = partial(
        make_trainer,
        args.output / "run" / case,
        rows=rows(),
        trainer_class=FixedRollouts,
        # Small weights stay whole under ZeRO-3 unless told otherwise.
        config_class=CROPConfig if "whole" in rest else EverythingSplit,
        method="two" if by_name else "hinted",
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "down_proj"]) if "adapter" in rest else None,
        per_device_train_batch_size=args.per_device,
        score_tokens_per_batch=40,
        max_steps=2,
        optim="sgd",
        learning_rate=0.3,
        weight_decay=0.0,
        **teachers,
        **accelerator_settings(),
    )
    trainer = make()
    trainer.train()
    if "resumed" in rest:
        trainer = make()
        trainer.train(resume_from_checkpoint=str(args.output / "run" / case / "checkpoint-1"))
    found = {
        "processes": torch.tensor(trainer.accelerator.num_processes),
        "loss": torch.tensor(metric(trainer, "loss"), dtype=torch.float64),
        "gap": torch.tensor(metric(trainer, "distillation/gap_kept"), dtype=torch.float64),
        "weights": whole_weights(trainer),
    }
    for average in trainer.averages.values():
        with average.lent():
            found["average"] = whole_weights(trainer)
        assert torch.equal(whole_weights(trainer), found["weights"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--per-device", type=int, required=True)
    parser.add_argument("--cases", nargs="+", required=True)
    args = parser.parse_args()
    results = {}
    for case in args.cases:
        results.update({f"{case}/{name}": value for name, value in run(case, args).items()})
    if int(os.environ.get("RANK", "0")) == 0:
        args.output.mkdir(parents=True, exist_ok=True)
        save_file(results, str(args.output / "result.safetensors"))


if __name__ == "__main__":
    main()
