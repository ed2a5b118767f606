"""What `compile_layers` costs at the first start of a run, and at the second, for which PyTorch has kept the graphs.

    python benchmarks/compiling.py

Two processes, one after the other, with a folder for the cache that is empty at first. Each takes the same `--repeats`
steps of CROP on given responses; counted is all the time that PyTorch spends on compiling, tracing included. With
`--sample` the student writes the responses itself, by CUDA graphs, and that is compiled too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

import torch
from baseline import add_measurement_arguments, record
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
from torch._dynamo.utils import calculate_time_spent, counters
from trainers import StepClock
from update import GivenCROP

from crop_trl import CROPConfig, CROPTrainer


def work(args) -> dict:
    """A short run: seconds of compiling before the first step and in each one, and the number of graphs."""
    cuda = args.device.startswith("cuda")
    settings = CROPConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=not cuda,
        bf16=cuda,
        per_device_train_batch_size=args.rows,
        gradient_accumulation_steps=args.responses // args.rows,
        max_completion_length=args.longest,
        max_steps=args.repeats,
        # Without `--sample` responses are given and this does nothing; `compile_layers` asks for it.
        use_cuda_graphs=True,
        compile_layers=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    student = make_model(args.student, args.device)
    teacher = make_model(args.teacher, args.device, torch.bfloat16 if cuda else torch.float32, seed=1)
    data = Dataset.from_list(draw_rows(args.responses // 4 * (args.repeats + 1)))
    kind = CROPTrainer if args.sample else GivenCROP
    trainer = kind(student, teacher, args=settings, train_dataset=data, processing_class=make_tokenizer())
    before = calculate_time_spent().get("total_wall_time", 0.0)
    lengths = draw_lengths(args.responses, args.mean, args.longest)
    trainer.given_responses = draw_responses(lengths, make_config(args.student).vocab_size)
    clock = StepClock(args.device)
    clock.attach(trainer)
    trainer.train()
    return {
        "seconds": calculate_time_spent()["total_wall_time"],
        "by_step": [round(s, 2) for s in (before, *(row["compiling"] for row in clock.rows))],
        "graphs": counters["stats"]["unique_graphs"],
    }


def main() -> None:
    """Parse, start twice, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", default="1.7B", choices=SHAPES)
    parser.add_argument("--teacher", default="4B", choices=SHAPES)
    add_rollout_arguments(parser)
    parser.add_argument("--rows", type=int, default=4, help="responses of a micro-batch, on average")
    parser.add_argument("--sample", action="store_true", help="let the student write, --longest tokens each")
    parser.add_argument("--threads", type=int, help="that compile at once, in place of what was chosen")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    add_measurement_arguments(parser, repeats=3)
    args = parser.parse_args()
    if args.worker:
        if args.threads:
            # Not by the environment: vLLM, where it is installed, sets it to 1 as it is imported.
            torch._inductor.config.compile_threads = args.threads
        print("worked", json.dumps(work(args)))
        return
    starts = []
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        environment.pop("TRITON_CACHE_DIR", None)  # then a part of it
        for _ in range(2):
            command = [sys.executable, __file__, "--worker", *sys.argv[1:]]
            run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            starts.append(json.loads(run.stdout.rpartition("worked ")[2]))
            print(json.dumps(starts[-1]), flush=True)
    cold, warm = starts
    details = {"student": args.student, "teacher": args.teacher, "graphs": warm["graphs"], "sampled": args.sample}
    key = "compile_warm_sampling_s" if args.sample else "compile_warm_s"
    record(key, warm["seconds"], cold["seconds"], args.device, args.output, **details)


if __name__ == "__main__":
    main()
