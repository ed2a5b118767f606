"""Pure on-policy distillation: tokens a second of CROPTrainer against TRL's experimental IWOPDTrainer.

    python benchmarks/peers.py

Both sides train the same random models on the same responses, each in a process of its own, one after the other on the
same card. First with responses that are given, so that a step is scoring and update; then with rollouts from colocated
vLLM. The peer's micro-batch is the largest of `--peer-rows` that fits.
"""

import argparse
import json
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
    save_model,
)
from trainers import GivenResponses, StepClock, given_lengths

# What a part is recorded as, and whether the engine takes part.
PARTS = {"given": ("opd_over_iwopd", False), "rollout": ("opd_over_iwopd_with_rollout", True)}


def make_ours(args, rows: int, folder: str, student, teacher, data, tokenizer):
    """CROPTrainer with the method `opd`."""
    from crop_trl import CROPConfig, CROPTrainer

    class GivenCROP(GivenResponses, CROPTrainer):
        """CROPTrainer on given responses."""

    settings = CROPConfig(
        method="opd", compile_layers=args.compile and args.with_rollout, **common(args, rows, folder), num_generations=4
    )
    kind = CROPTrainer if args.with_rollout else GivenCROP
    return kind(student, teacher, args=settings, train_dataset=data, processing_class=tokenizer)


def make_theirs(args, rows: int, folder: str, student, teacher, data, tokenizer):
    """IWOPDTrainer on policy, with its own objective of sampled tokens."""
    from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

    class GivenIWOPD(IWOPDTrainer):
        """IWOPDTrainer on given responses."""

        def _generate_student_completions(self, slices, on_policy_indices):
            pad = self.processing_class.pad_token_id
            prompts = [p[p != pad] for i in on_policy_indices for p in slices[i]["prompts"]]
            where = [i for i in on_policy_indices for _ in slices[i]["prompts"]]
            self._store_completions_in_buffer(slices, on_policy_indices, where, prompts, self.given_responses)

    settings = IWOPDConfig(
        distillation_objective="iw_opd",
        lmbda=1.0,
        num_generations=1,
        max_length=args.longest + 512,
        max_prompt_length=512,
        loss_top_k=0,
        **common(args, rows, folder),
    )
    data = Dataset.from_list(
        [
            {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": "w1"}]}
            for row in data
            for _ in range(4)
        ]
    )
    kind = IWOPDTrainer if args.with_rollout else GivenIWOPD
    return kind(student, teacher, args=settings, train_dataset=data, processing_class=tokenizer)


def common(args, rows: int, folder: str) -> dict:
    """Settings that both trainers know."""
    cuda = args.device.startswith("cuda")
    return dict(
        output_dir=folder,
        use_cpu=not cuda,
        bf16=cuda,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=args.responses // rows,
        max_completion_length=args.longest,
        gradient_checkpointing=True,
        learning_rate=1e-6,
        max_steps=1 + args.repeats,
        use_vllm=args.with_rollout,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=cuda,
        vllm_gpu_memory_utilization=args.vllm_memory,
        vllm_max_model_length=args.longest + 512,
        save_strategy="no",
        report_to="none",
        logging_steps=1_000,
        disable_tqdm=True,
    )


def measure(args) -> dict:
    """Run one side in this process; the largest micro-batch that fits."""
    cuda = args.device.startswith("cuda")
    folder, tokenizer = tempfile.mkdtemp(), make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    student = save_model(make_model(args.student, args.device), tokenizer, f"{folder}/student")
    teacher = make_model(args.teacher, args.device, torch.bfloat16 if cuda else torch.float32, seed=1)
    teacher = save_model(teacher, tokenizer, f"{folder}/teacher")
    lengths = draw_lengths(args.responses, args.mean, args.longest)
    data = Dataset.from_list(draw_rows(args.responses // 4 * (2 + args.repeats)))
    make = {"ours": make_ours, "theirs": make_theirs}[args.side]
    for rows in args.try_rows:
        clock = StepClock(args.device)
        try:
            trainer = make(args, rows, folder, student, teacher, data, tokenizer)
            trainer.given_responses = draw_responses(lengths, make_config(args.student).vocab_size)
            if args.with_rollout:
                given_lengths(trainer.vllm_generation.llm, lengths)
            clock.attach(trainer)
            trainer.train()
        except torch.cuda.OutOfMemoryError:
            print(f"{args.side}: micro-batches of {rows} do not fit", file=sys.stderr, flush=True)
            return {"fits": False}
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
        seconds = clock.median("step")
        return {"rows": rows, "seconds": seconds, "tokens_per_second": sum(lengths) / seconds, "peak_gib": peak}


def in_process(side: str, rows: list[int], with_rollout: bool) -> dict:
    """Run one side in a fresh process for each micro-batch size, until one fits: an engine cannot be unloaded."""
    for size in rows:
        command = [sys.executable, *sys.argv, "--side", side, "--try-rows", str(size)]
        command += ["--with-rollout"] if with_rollout else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
        if lines and "seconds" in (result := json.loads(lines[-1])):
            print(side, "with rollout" if with_rollout else "given responses", result, flush=True)
            return result
    raise SystemExit(f"No micro-batch of {rows} ran for {side}.")


def main() -> None:
    """Parse, measure, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", default="1.7B", choices=SHAPES)
    parser.add_argument("--teacher", default="4B", choices=SHAPES)
    add_rollout_arguments(parser)
    parser.add_argument("--our-rows", type=int, nargs="+", default=[8])
    parser.add_argument("--peer-rows", type=int, nargs="+", default=[4, 2, 1], help="largest first")
    parser.add_argument("--vllm-memory", type=float, default=0.35)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    add_measurement_arguments(parser, repeats=2)
    parser.add_argument("--side", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--try-rows", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--with-rollout", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if (most := max(*args.our_rows, *args.peer_rows)) > args.responses:
        parser.error(f"--our-rows or --peer-rows {most} is more than --responses {args.responses}")
    if args.side:
        print(json.dumps(measure(args)), flush=True)
        return
    details = {"student": args.student, "teacher": args.teacher, "responses": args.responses}
    for part in args.parts:
        key, with_rollout = PARTS[part]
        ours = in_process("ours", args.our_rows, with_rollout)
        theirs = in_process("theirs", args.peer_rows, with_rollout)
        both = (ours["tokens_per_second"], theirs["tokens_per_second"])
        record(key, *both, args.device, args.output, **details, sides=[ours, theirs])


if __name__ == "__main__":
    main()
