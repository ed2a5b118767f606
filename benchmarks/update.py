"""The update: with the 20 % mask against all tokens, and against TRL's GRPO trainer on the same rollouts.

    python benchmarks/update.py

Real trainers, random weights, given responses; a step is forward and backward over all responses and the optimizer.
CROPTrainer takes masked and dense steps in turns. `--rows` are the micro-batch sizes to try, in responses on average:
each side's best counts for `update_over_trl`, and every one is printed.
"""

import argparse
import tempfile

import torch
from baseline import add_measurement_arguments, kernel_table, record
from datasets import Dataset
from shapes import (
    SHAPES,
    add_rollout_arguments,
    draw_lengths,
    draw_responses,
    draw_rows,
    make_config,
    make_model,
    make_tokenizer,
)
from trainers import GivenResponses, StepClock, UniformTeacher, forget
from trl import GRPOConfig, GRPOTrainer

from crop_trl import CROPConfig, CROPTrainer
from crop_trl.models.compilation import compile_layers


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
    # A trainer turns checkpointing on and leaves it so, and the model outlives the trainer.
    model.gradient_checkpointing_disable()
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
        trainer.args.max_steps = 1
        print(kernel_table(trainer.train, args.device), flush=True)
    forget(trainer)
    return clock


def main() -> None:
    """Parse, measure, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.7B", choices=SHAPES)
    add_rollout_arguments(parser)
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--profile", action="store_true", help="also print the kernels of a masked step")
    parser.add_argument("--without-checkpointing", type=int, nargs="*", default=[], help="rows to try as well")
    parser.add_argument("--compile", action="store_true", help="then the same with `compile_layers`")
    add_measurement_arguments(parser, repeats=2)
    args = parser.parse_args()
    if max(args.rows) > args.responses:
        parser.error(f"--rows {max(args.rows)} is more than --responses {args.responses}")
    args.vocab = make_config(args.shape).vocab_size

    model = make_model(args.shape, args.device)
    details = {"shape": args.shape, "responses": args.responses, "longest": args.longest}

    def ours(checkpointing: bool, profile: bool = False) -> tuple[int, StepClock]:
        clocks = {}
        for rows in args.rows if checkpointing else args.without_checkpointing:
            clocks[rows] = run(GivenCROP, model, args, rows, ("crop", "opd"), checkpointing, profile)
            print(
                f"rows {rows}, checkpointing {checkpointing}: masked {clocks[rows].median('update', 'crop'):.3f} s, "
                f"dense {clocks[rows].median('update', 'opd'):.3f} s, {clocks[rows].peak_gib:.1f} GiB",
                flush=True,
            )
        best = min(clocks, key=lambda rows: clocks[rows].median("update", "crop"))
        return best, clocks[best]

    def theirs() -> tuple[int, StepClock]:
        clocks = {}
        for rows in args.rows:
            clocks[rows] = run(GivenGRPO, model, args, rows)
            print(
                f"rows {rows}: TRL {clocks[rows].median('update'):.3f} s, {clocks[rows].peak_gib:.1f} GiB", flush=True
            )
        best = min(clocks, key=lambda rows: clocks[rows].median("update"))
        return best, clocks[best]

    peer_rows, peer = theirs()

    def compare(suffix: str, checkpointing: bool, profile: bool = False) -> None:
        rows, clock = ours(checkpointing, profile)
        masked, dense = clock.median("update", "crop"), clock.median("update", "opd")
        extra = {"rows": [rows, peer_rows], "peak_gib": [round(clock.peak_gib, 2), round(peer.peak_gib, 2)]}
        record(f"sparse_update{suffix}", masked, dense, args.device, args.output, **details, rows=rows)
        against_peer = (masked, peer.median("update"))
        record(f"update{suffix}_over_trl", *against_peer, args.device, args.output, **details, **extra)

    compare("", True, args.profile)
    if args.without_checkpointing:
        compare("_without_checkpointing", False)
    if args.compile:
        compile_layers(model)
        compare("_compiled", True)
        if args.without_checkpointing:
            compare("_compiled_without_checkpointing", False)


if __name__ == "__main__":
    main()
