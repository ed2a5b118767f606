"""The update: with the 20 % mask against all tokens, and against TRL's GRPO trainer on the same rollouts.

    python benchmarks/update.py

Real trainers, random weights, given responses; a step is forward and backward over all responses and the optimizer.
CROPTrainer takes masked and dense steps in turns. `--rows` are the micro-batch sizes to try, in responses on average:
each side's best counts for `update_over_trl`, and every one is printed.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from baseline import record
from datasets import Dataset
from shapes import draw_lengths, draw_responses, draw_rows, make_config, make_model, make_tokenizer
from trainers import GivenResponses, StepClock, UniformTeacher, forget
from trl import GRPOConfig, GRPOTrainer

from crop_trl import CROPConfig, CROPTrainer


class GivenCROP(GivenResponses, CROPTrainer):
    """CROPTrainer on given responses."""


class GivenGRPO(GivenResponses, GRPOTrainer):
    """GRPOTrainer on given responses."""


def reward(completion_ids, **kwargs) -> list[float]:
    """Something that differs within a group."""
    return [float(len(ids)) for ids in completion_ids]


def run(kind, model, args, rows: int, methods=(), checkpointing: bool = True, profile: bool = False) -> StepClock:
    """A few steps of one trainer."""
    cuda = args.device.startswith("cuda")
    settings = dict(
        output_dir=tempfile.mkdtemp(),
        use_cpu=not cuda,
        bf16=cuda,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=args.responses // rows,
        num_generations=4,
        max_completion_length=args.longest,
        gradient_checkpointing=checkpointing,
        learning_rate=1e-6,
        max_steps=(1 + args.repeats) * max(1, len(methods)),
        save_strategy="no",
        report_to="none",
        logging_steps=1_000,
        disable_tqdm=True,
    )
    data = Dataset.from_list(draw_rows(args.responses // 4) * (settings["max_steps"] + 1))
    shared = dict(train_dataset=data, processing_class=make_tokenizer())
    if kind is GivenCROP:
        teacher = UniformTeacher(16, model.config.vocab_size, args.device)
        trainer = kind(model, teacher, args=CROPConfig(**settings), **shared)
    else:
        trainer = kind(model, reward, args=GRPOConfig(**settings), **shared)
    trainer.given_responses = draw_responses(draw_lengths(args.responses, args.mean, args.longest), args.vocab)
    clock = StepClock(args.device, methods)
    clock.attach(trainer)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    clock.peak_gib = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    if profile:
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profiler:
            trainer.args.max_steps, trainer.state.global_step = 1, 0
            trainer.train()
        key = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        print(profiler.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=70), flush=True)
    forget(trainer)
    return clock


def main() -> None:
    """Parse, measure, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.7B")
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--mean", type=float, default=1_500)
    parser.add_argument("--longest", type=int, default=4_096)
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="also print the kernels of a masked step")
    parser.add_argument("--without-checkpointing", type=int, nargs="*", default=[], help="rows to try as well")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="folder of the baseline files")
    args = parser.parse_args()
    args.vocab = make_config(args.shape).vocab_size

    model = make_model(args.shape, args.device)
    details = {"shape": args.shape, "responses": args.responses, "longest": args.longest}
    ours, theirs = {}, {}
    for rows in args.rows:
        clock = run(GivenCROP, model, args, rows, ("crop", "opd"), profile=args.profile and rows == args.rows[-1])
        ours[rows] = clock.median("update", "crop"), clock.median("update", "opd"), clock.peak_gib
        print(f"rows {rows}: masked {ours[rows][0]:.3f} s, dense {ours[rows][1]:.3f} s, {clock.peak_gib:.1f} GiB")
        print(f"  {clock.rows[-2]}", flush=True)
    for rows in args.without_checkpointing:
        clock = run(GivenCROP, model, args, rows, ("crop", "opd"), checkpointing=False)
        print(
            f"rows {rows}, no checkpointing: masked {clock.median('update', 'crop'):.3f} s, dense "
            f"{clock.median('update', 'opd'):.3f} s, {clock.peak_gib:.1f} GiB",
            flush=True,
        )
    for rows in args.rows:
        clock = run(GivenGRPO, model, args, rows)
        theirs[rows] = clock.median("update"), clock.peak_gib
        print(f"rows {rows}: TRL {theirs[rows][0]:.3f} s, {theirs[rows][1]:.1f} GiB", flush=True)
    best, their_best = min(ours, key=lambda r: ours[r][0]), min(theirs, key=lambda r: theirs[r][0])
    record("sparse_update", *ours[best][:2], args.device, args.output, **details, rows=best)
    peaks = {"peak_gib": [round(ours[best][2], 2), round(theirs[their_best][1], 2)]}
    record(
        *("update_over_trl", ours[best][0], theirs[their_best][0], args.device, args.output),
        **details,
        rows=[best, their_best],
        **peaks,
    )


if __name__ == "__main__":
    main()
