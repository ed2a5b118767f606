"""One or more training steps on rollouts that depend on the prompt alone, so that runs of any shape sample the same.

Started by `accelerate launch` or `torchrun`; process 0 writes loss, gradient norm, selected tokens and the resulting
weights.
"""

import argparse
import hashlib
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import make_model, make_trainer, metric

from crop_trl import CROPTrainer


class FixedRollouts(CROPTrainer):
    """Samples by a hash of the prompt and of the response's place among that prompt's responses."""

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, **kwargs):
        first = self.accelerator.process_index * len(prompt_ids)
        completions = []
        for row, ids in enumerate(prompt_ids):
            digest = hashlib.sha256(repr((list(ids), (first + row) % num_generations)).encode()).digest()
            completions.append([5 + byte % 40 for byte in digest[: 1 + digest[0] % 12]])
        return completions, None


def run(method: str, args) -> dict[str, torch.Tensor]:
    """Train with one method; what a comparison between runs should look at."""
    student = make_model(0)
    trainer = make_trainer(
        args.output / f"run-{method}",
        student=student,
        trainer_class=FixedRollouts,
        method=method,
        per_device_train_batch_size=args.per_device,
        gradient_accumulation_steps=args.accumulation,
        max_steps=args.steps,
        optimizers=(torch.optim.SGD(student.parameters(), lr=0.1), None),
    )
    trainer.train()
    return {
        "processes": torch.tensor(trainer.accelerator.num_processes),
        "loss": torch.tensor(metric(trainer, "loss"), dtype=torch.float64),
        "grad_norm": torch.tensor(metric(trainer, "grad_norm"), dtype=torch.float64),
        "selected_tokens": torch.tensor(metric(trainer, "selection/selected_tokens")),
        "gap_kept": torch.tensor(metric(trainer, "distillation/gap_kept"), dtype=torch.float64),
        "retention_ratio": torch.tensor(metric(trainer, "selection/retention_ratio"), dtype=torch.float64),
        "embedding": trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings().weight.detach().clone(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--per-device", type=int, required=True)
    parser.add_argument("--accumulation", type=int, required=True)
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=1)
    args = parser.parse_args()
    results = {}
    for method in args.methods:
        results.update({f"{method}/{name}": value for name, value in run(method, args).items()})
    if int(os.environ.get("RANK", "0")) == 0:
        args.output.mkdir(parents=True, exist_ok=True)
        save_file(results, str(args.output / "result.safetensors"))


if __name__ == "__main__":
    main()
