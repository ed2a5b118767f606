"""A whole step with rollouts from colocated vLLM: CROP against pure on-policy distillation.

    python benchmarks/step.py

One trainer takes the methods in turns, so that both sides see the same engine, models and response lengths. Random
weights; the engine is told how long each response is.
"""

import argparse
import tempfile

import torch
from baseline import add_measurement_arguments, record
from datasets import Dataset
from shapes import SHAPES, add_rollout_arguments, draw_lengths, draw_rows, make_model, make_tokenizer, save_model
from trainers import StepClock, given_lengths

from crop_trl import CROPConfig, CROPTrainer

PARTS = ("step", "seconds/rollout", "seconds/scoring", "update")


def make_trainer(args, methods: list[str], **more) -> CROPTrainer:
    """A trainer with random models, `more` settings, and with `use_vllm` an engine whose response lengths are given."""
    cuda = args.device.startswith("cuda")
    folder = tempfile.mkdtemp()
    settings = CROPConfig(
        output_dir=folder,
        use_cpu=not cuda,
        bf16=cuda,
        method=methods[0],
        per_device_train_batch_size=args.rows,
        gradient_accumulation_steps=args.responses // args.rows,
        max_completion_length=args.longest,
        gradient_checkpointing=args.checkpointing,
        compile_layers=args.compile and cuda,
        max_steps=len(methods) * (args.warmup + args.repeats),
        use_vllm=args.vllm,
        vllm_enable_sleep_mode=cuda,
        vllm_gpu_memory_utilization=args.vllm_memory,
        teacher_placement=args.placement,
        score_tokens_per_batch=args.tokens_per_batch,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        **{"vllm_mode": "colocate", **more},
    )
    tokenizer = make_tokenizer()
    student = save_model(make_model(args.student, args.device), tokenizer, f"{folder}/student")
    teacher = None
    if "teacher_server_urls" not in more:
        teacher = make_model(args.teacher, args.device, torch.bfloat16 if cuda else torch.float32, seed=1)
    rows = draw_rows(args.responses // 4 * (settings.max_steps + 1))
    trainer = CROPTrainer(
        student, teacher, args=settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    if args.vllm and settings.vllm_mode == "colocate":
        given_lengths(trainer.vllm_generation.llm, draw_lengths(args.responses, args.mean, args.longest))
    return trainer


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of [`make_trainer`], and of measuring its steps."""
    parser.add_argument("--student", default="1.7B", choices=SHAPES)
    parser.add_argument("--teacher", default="4B", choices=SHAPES)
    add_rollout_arguments(parser)
    parser.add_argument("--rows", type=int, default=4, help="responses of a micro-batch, on average")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each method that are not counted")
    parser.add_argument("--tokens-per-batch", type=int, default=16_384)
    parser.add_argument("--placement", default="resident")
    parser.add_argument("--vllm-memory", type=float, default=0.35)
    parser.add_argument("--vllm", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    add_measurement_arguments(parser, repeats=2)


def main() -> None:
    """Parse, measure, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_step_arguments(parser)
    args = parser.parse_args()

    methods = ["crop", "opd"]
    trainer = make_trainer(args, methods)
    clock = StepClock(args.device, methods)
    clock.attach(trainer)
    trainer.train()
    medians = {m: {part: round(clock.median(part, m, args.warmup), 3) for part in PARTS} for m in methods}
    peak = torch.cuda.max_memory_allocated() / 2**30 if args.device.startswith("cuda") else 0.0
    details = {"student": args.student, "teacher": args.teacher, "responses": args.responses, "parts": medians}
    details.update(compiled=args.compile, checkpointing=args.checkpointing, peak_gib=round(peak, 2))
    details["seconds_compiling"] = round(sum(row["compiling"] for row in clock.rows))
    record("crop_over_opd", medians["crop"]["step"], medians["opd"]["step"], args.device, args.output, **details)


if __name__ == "__main__":
    main()
