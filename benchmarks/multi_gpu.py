"""Whole CROP steps on several GPUs, under the launch files that users start from.

    python benchmarks/multi_gpu.py --launch ddp zero2 zero3 fsdp2 --processes 2

Random weights of real shapes, rollouts from vLLM on each GPU with response lengths that are given, the same ones in the
same places for any number of processes. Each arrangement is a launch of its own; its loss, retention, gap between
engine and trainer, seconds and memory of every process land in OUTPUT/ARRANGEMENT-PROCESSES.json. `--engine given`
trains on the same responses everywhere, without an engine, and `--compare` says how far two such runs lie apart:

    python benchmarks/multi_gpu.py --launch zero2 --processes 2 --engine given --steps 3
    python benchmarks/multi_gpu.py --launch zero2 --processes 4 --engine given --steps 3
    python benchmarks/multi_gpu.py --compare zero2-2 zero2-4

On a machine without GPUs, `--student tiny --teacher tiny --engine given` runs the same on CPUs, but for `fsdp2`.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import torch
from accelerate.utils import gather_object
from baseline import card_name
from datasets import Dataset
from safetensors.torch import load_file, save_file
from shapes import SHAPES, draw_lengths, draw_responses, draw_rows, make_config, make_model, make_tokenizer, save_model
from trainers import GivenResponses, given_lengths

from crop_trl import CROPConfig, CROPTrainer

ROOT = Path(__file__).resolve().parents[1]
ON_GPUS = torch.cuda.is_available()
METRICS = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "retention": "selection/retention_ratio",
    "selected_tokens": "selection/selected_tokens",
    "engine_gap": "sampling/sampling_logp_difference/mean",
    "rollout_s": "seconds/rollout",
    "scoring_s": "seconds/scoring",
    "update_s": "seconds/update",
    "scoring_padding": "scoring/padding_share",
    "update_padding": "update/padding_share",
}


class Watched(CROPTrainer):
    """Remembers which tokens the first step kept, on all processes."""

    first_mask = None

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.first_mask is None:
            mask = output["rollout"].selection.mask
            full = torch.zeros(len(mask), self.args.max_completion_length, dtype=torch.uint8, device=mask.device)
            full[:, : mask.size(1)] = mask
            self.first_mask = self.accelerator.gather(full).cpu()
        return output


class GivenWatched(GivenResponses, Watched):
    """The same, on responses that are given."""


class MemoryWatch(threading.Thread):
    """The most memory in use on this process's device, of whatever owns it, looked at ten times a second."""

    def __init__(self, device: torch.device):
        super().__init__(daemon=True)
        # Named, since a thread of its own would look at the first GPU.
        self.device, self.peak_gib, self._done = device, 0.0, threading.Event()

    def run(self):
        """Look until told to stop."""
        while ON_GPUS and not self._done.wait(0.1):
            free, total = torch.cuda.mem_get_info(self.device)
            self.peak_gib = max(self.peak_gib, (total - free) / 2**30)

    def stop(self) -> float:
        """Stop looking; the peak in GiB."""
        self._done.set()
        return self.peak_gib


def on_this_machine() -> dict:
    """Settings of precision and devices."""
    if ON_GPUS:
        return {"bf16": True}
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        return {"bf16": False, "ddp_backend": "gloo"}
    return {"bf16": False, "use_cpu": True}


def prepare(args) -> None:
    """Write models of the shapes asked for, unless they are there."""
    for seed, (role, shape) in enumerate((("student", args.student), ("teacher", args.teacher))):
        folder = args.models / f"{role}-{shape}"
        if not (folder / "model.safetensors.index.json").exists() and not (folder / "model.safetensors").exists():
            device = "cuda" if ON_GPUS else "cpu"
            save_model(make_model(shape, device, torch.bfloat16, seed), make_tokenizer(), str(folder))


def work(args) -> None:
    """Train, as one of several processes."""
    responses = args.prompts * 4
    settings = CROPConfig(
        output_dir=str(args.output / "run"),
        method=args.method,
        prompts_per_step=args.prompts,
        per_device_train_batch_size=args.rows,
        max_completion_length=args.longest,
        max_steps=args.steps,
        gradient_checkpointing=args.checkpointing,
        teacher_placement=args.placement,
        score_tokens_per_batch=args.tokens_per_batch,
        use_vllm=args.engine == "vllm",
        vllm_mode="colocate",
        vllm_enable_sleep_mode=args.sleep,
        vllm_gpu_memory_utilization=args.vllm_memory,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        **on_this_machine(),
    )
    trainer_class = Watched if args.engine == "vllm" else GivenWatched
    trainer = trainer_class(
        str(args.models / f"student-{args.student}"),
        str(args.models / f"teacher-{args.teacher}"),
        args=settings,
        # The same prompts in every step, so that runs of another number of steps see them too.
        train_dataset=Dataset.from_list(draw_rows(args.prompts) * (args.steps + 1)),
        processing_class=make_tokenizer(),
    )
    accelerator = trainer.accelerator
    share = responses // accelerator.num_processes
    mine = slice(accelerator.process_index * share, (accelerator.process_index + 1) * share)
    lengths = draw_lengths(responses, args.mean, args.longest)
    if args.engine == "vllm":
        given_lengths(trainer.vllm_generation.llm, lengths[mine])
    else:
        trainer.given_responses = draw_responses(lengths, make_config(args.student).vocab_size)[mine]
    memory = MemoryWatch(accelerator.device)
    memory.start()
    trainer.train()
    peak = {
        "process": accelerator.process_index,
        "device_gib": round(memory.stop(), 2),
        "torch_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if ON_GPUS else 0.0,
    }
    peaks = gather_object([peak])
    if accelerator.is_main_process:
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        steps = [{name: entry.get(key) for name, key in METRICS.items()} for entry in history]
        result = {
            "arrangement": args.worker,
            "processes": accelerator.num_processes,
            "backend": accelerator.distributed_type.value,
            "card": card_name("cuda" if ON_GPUS else "cpu"),
            "settings": {name: str(value) for name, value in vars(args).items() if name not in ("launch", "compare")},
            "tokens": sum(lengths),
            "steps": steps,
            "peaks": peaks,
        }
        name = f"{args.worker}-{accelerator.num_processes}"
        (args.output / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
        save_file({"mask": trainer.first_mask}, str(args.output / f"{name}.safetensors"))
    accelerator.end_training()


def launch(args, arrangement: str) -> dict:
    """Run one arrangement to its end and read what it wrote."""
    config = ROOT / "accelerate_configs" / f"{arrangement}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["--num_processes", str(args.processes), "--main_process_port", "0"]
    environment = dict(os.environ)
    if not ON_GPUS:
        command += ["--mixed_precision", "no"]
        if arrangement == "ddp":
            environment["ACCELERATE_USE_CPU"] = "true"
    result = args.output / f"{arrangement}-{args.processes}.json"
    result.unlink(missing_ok=True)
    subprocess.run([*command, __file__, "--worker", arrangement, *sys.argv[1:]], env=environment, check=True)
    return json.loads(result.read_text())


def summary(result: dict) -> str:
    """One line: medians over the steps after the first, memory of the fullest process."""
    rest = result["steps"][1:] or result["steps"]

    def median(name):
        values = sorted(step[name] for step in rest if step[name] is not None)
        return values[len(values) // 2] if values else float("nan")

    seconds = [median(name) for name in ("rollout_s", "scoring_s", "update_s")]
    return (
        f"| {result['arrangement']} | {result['processes']} | {result['steps'][-1]['loss']:.4f} | "
        f"{median('retention'):.3f} | {median('engine_gap'):.4f} | "
        + " | ".join(f"{value:.1f}" for value in (*seconds, sum(seconds)))
        + f" | {max(peak['device_gib'] for peak in result['peaks']):.1f} | "
        f"{max(peak['torch_gib'] for peak in result['peaks']):.1f} |"
    )


def compare(folder: Path, first: str, second: str) -> str:
    """How far two runs on the same responses lie apart: tokens that both kept, and the first loss and gradient norm."""
    masks = [load_file(folder / f"{name}.safetensors")["mask"].bool() for name in (first, second)]
    steps = [json.loads((folder / f"{name}.json").read_text())["steps"][0] for name in (first, second)]
    overlap = (masks[0] & masks[1]).sum().item() / max(1, (masks[0] | masks[1]).sum().item())
    apart = {name: abs(steps[0][name] / steps[1][name] - 1) for name in ("loss", "grad_norm", "selected_tokens")}
    return f"{first} and {second}: {overlap:.5f} of the kept tokens in common; relative differences " + ", ".join(
        f"{name} {value:.1e}" for name, value in apart.items()
    )


def trouble(args) -> str | None:
    """What is wrong with the options, before models are written and processes started."""
    for name in args.launch or ():
        if not (ROOT / "accelerate_configs" / f"{name}.yaml").exists():
            known = ", ".join(sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")))
            return f"--launch {name!r} is not known: choose among {known}"
        if name.startswith("fsdp") and not ON_GPUS:
            return f"--launch {name} needs GPUs; without them choose ddp, zero2 or zero3"
    for name in ("processes", "prompts", "steps", "rows", "longest", "mean", "tokens_per_batch"):
        if getattr(args, name) < 1:
            return f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}"
    if args.launch and args.prompts * 4 % (args.processes * args.rows):
        share = f"--processes {args.processes} x --rows {args.rows}"
        return f"--prompts {args.prompts} x 4 responses do not divide into {share}"
    for name in args.compare or ():
        if not all((args.output / f"{name}.{ending}").exists() for ending in ("json", "safetensors")):
            there = ", ".join(sorted(path.stem for path in args.output.glob("*.safetensors"))) or "none"
            return f"--compare {name!r} has no result in {args.output}; there are: {there}"
    return None


def main() -> None:
    """Parse, then launch, compare, or work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch", nargs="+", metavar="ARRANGEMENT", help="names of accelerate_configs/NAME.yaml")
    parser.add_argument("--compare", nargs=2, metavar="RESULT")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--prepare", action="store_true", help="write the models and do nothing else")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--student", default="1.7B", choices=SHAPES)
    parser.add_argument("--teacher", default="4B", choices=SHAPES)
    parser.add_argument("--method", default="crop")
    parser.add_argument("--prompts", type=int, default=16, help="of a step, with four responses each")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--mean", type=float, default=1_500)
    parser.add_argument("--longest", type=int, default=4_096)
    parser.add_argument("--rows", type=int, default=4, help="responses of a micro-batch, on average")
    parser.add_argument("--tokens-per-batch", type=int, default=16_384)
    parser.add_argument("--placement", default="resident", help="resident, or sharded under zero3 and fsdp2")
    parser.add_argument("--engine", choices=("vllm", "given"), default="vllm" if ON_GPUS else "given")
    parser.add_argument("--vllm-memory", type=float, default=0.35)
    parser.add_argument("--sleep", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--models", type=Path, default=ROOT / "runs" / "models")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "multi_gpu")
    args = parser.parse_args()
    if wrong := trouble(args):
        parser.error(wrong)
    args.output.mkdir(parents=True, exist_ok=True)
    if args.worker:
        work(args)
    elif args.prepare:
        prepare(args)
    elif args.compare:
        print(compare(args.output, *args.compare))
    elif args.launch:
        # In a process of its own, which leaves nothing on the GPU behind.
        subprocess.run([sys.executable, __file__, "--prepare", *sys.argv[1:]], check=True)
        print(
            "| arrangement | processes | loss | retention | gap | rollout | scoring | update | step | device | torch |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
        failed = []
        for arrangement in args.launch:
            try:
                print(summary(launch(args, arrangement)), flush=True)
            except subprocess.CalledProcessError as error:
                failed.append(arrangement)
                print(f"| {arrangement} | {args.processes} | failed with status {error.returncode} |", flush=True)
        if failed:
            sys.exit(f"error: {', '.join(failed)} failed; what they said is above.")
    else:
        parser.error("say what to do: --launch, --compare or --prepare")


if __name__ == "__main__":
    main()
