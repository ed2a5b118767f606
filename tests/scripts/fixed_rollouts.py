"""One training step on rollouts that depend on the prompt alone, so that runs of any shape sample the same.

Started by `accelerate launch` or `torchrun`; process 0 writes masks, loss, gradient norm and gradient of every case. A
case is `method/placement/model`, such as `crop/sharded/untied`; an `adapter` is trained on frozen weights, and `own`
takes the road of heads that are more than a matrix; with `ends` half of the responses end with one of twenty tokens;
`topk` takes the other loss. Several of these are joined by `+`.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from launching import EverythingSplit, FixedRollouts, accelerator_settings, local_share, whole_weights
from tiny import make_model, make_rows, make_trainer, metric, what_it_reads
from trl.distributed import DistributedBackend

from crop_trl import METHODS, Method, register_method


def by_reward(signals, ctx):
    """The end of a response with an odd reward, the beginning of one with an even."""
    return (2 * (ctx.rewards["response_lengths"] % 2) - 1)[:, None] * ctx.positions


register_method("by-reward", Method(needs=("teacher/empty",), score=by_reward, needs_rewards=True))


def response_lengths(completion_ids, **kwargs) -> list[float]:
    """A reward that differs from response to response; it has no weight in training."""
    return [float(len(ids)) for ids in completion_ids]


def run(case: str, args) -> dict[str, torch.Tensor]:
    """Train one case; what a comparison between runs should look at."""
    method, placement, model = case.split("/")
    model = model.split("+")
    adapter = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0) if "adapter" in model else None
    student, teacher = (make_model(i, hidden=size, tied="untied" not in model) for i, size in enumerate((32, 48)))
    if "own" in model:
        # As with a head that is more than a matrix: the model's own forward makes the logits.
        student._head_is_matrix = teacher._head_is_matrix = False
    if "ends" in model:
        teacher.generation_config.eos_token_id = list(range(5, 25))
    trainer = make_trainer(
        args.output / "run" / case,
        student=student,
        teacher=teacher,
        trainer_class=FixedRollouts,
        config_class=EverythingSplit,
        method=method,
        peft_config=adapter,
        teacher_placement=placement,
        stop_token_ids="declared" if "ends" in model else None,
        distillation_loss="topk" if "topk" in model else "sampled",
        per_device_train_batch_size=args.per_device,
        # Fewer prompts than two processes share evenly.
        eval_dataset=make_rows(5, seed=9),
        per_device_eval_batch_size=args.per_device,
        # Which is the same for every method.
        eval_on_start=method in ("crop", "opd", "tip", "by-reward") or model != ["tied"],
        rows=what_it_reads(method)["rows"],
        reward_funcs=[response_lengths],
        reward_weights=[float(METHODS[method].needs_advantages)],
        gradient_accumulation_steps=args.accumulation,
        # A few sequences a forward, so that processes need different numbers of them.
        score_tokens_per_batch=40,
        # Weights after a plain step show the gradient itself; DeepSpeed ignores an optimizer that is passed.
        optim="sgd",
        learning_rate=1.0,
        weight_decay=0.0,
        max_grad_norm=0.0,
        bf16=args.bf16,
        **accelerator_settings(),
    )
    counts = []
    scorer = trainer.scorers["teacher"]
    if scorer.agree is not None:
        agree = scorer.agree
        scorer.agree = lambda count: counts.append((count, agree(count))) or counts[-1][1]
    start = whole_weights(trainer)
    trainer.train()
    extra = torch.tensor([sum(most - count for count, most in counts)])
    accelerator = trainer.accelerator
    return {
        "processes": torch.tensor(accelerator.num_processes),
        "backend": torch.frombuffer(bytearray(accelerator.distributed_type.value.encode()), dtype=torch.uint8),
        "zero_stage": torch.tensor(DistributedBackend(accelerator).zero_stage),
        "local_shares": torch.tensor([local_share(trainer.model), local_share(scorer.model)]),
        "extra_forwards": accelerator.gather(extra.to(accelerator.device)),
        "masks": trainer.masks,
        "rounded": torch.tensor(trainer.rounded),
        "loss": torch.tensor(metric(trainer, "loss"), dtype=torch.float64),
        "grad_norm": torch.tensor(metric(trainer, "grad_norm"), dtype=torch.float64),
        "selected_tokens": torch.tensor(metric(trainer, "selection/selected_tokens")),
        "gap_kept": torch.tensor(metric(trainer, "distillation/gap_kept"), dtype=torch.float64),
        "retention_ratio": torch.tensor(metric(trainer, "selection/retention_ratio"), dtype=torch.float64),
        "eval_loss": torch.tensor(metric(trainer, "eval_loss"), dtype=torch.float64),
        "eval_reward": torch.tensor(metric(trainer, "eval_rewards/response_lengths/mean"), dtype=torch.float64),
        "gradient": start - whole_weights(trainer),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--per-device", type=int, required=True)
    parser.add_argument("--accumulation", type=int, required=True)
    parser.add_argument("--cases", nargs="+", required=True)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    results = {}
    for case in args.cases:
        results.update({f"{case}/{name}": value for name, value in run(case, args).items()})
    if int(os.environ.get("RANK", "0")) == 0:
        args.output.mkdir(parents=True, exist_ok=True)
        save_file(results, str(args.output / "result.safetensors"))


if __name__ == "__main__":
    main()
