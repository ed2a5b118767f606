"""Tokens a second and GPU of whole CROP steps, under the launch files that users start from.

    python benchmarks/throughput.py --launch single_gpu --compile
    python benchmarks/throughput.py --launch single_gpu ddp zero2 zero3 --processes 2
    python benchmarks/throughput.py --launch zero2 --processes 2 --student 4B --teacher 8B --vllm-memory 0.3

Random weights of real shapes, rollouts from vLLM on each GPU with response lengths that are given, the same ones in the
same places for any number of processes. Each arrangement is a launch of its own, and a row of the table: tokens of
responses a second and GPU, seconds of a step and shares of its phases, as medians of all steps but the first; how much
of that time each card ran no kernel, by nvidia-smi; loss, retention and the gap between engine and trainer; the most
memory in use on a GPU, of whatever owns it and of it by PyTorch. All of it by step lands in
RESULTS/ARRANGEMENT-PROCESSES.json. Beside `single_gpu`, which takes one process, others are compared with it.

`--engine given` trains on the same responses everywhere, without an engine, and `--compare` says how far two such runs
lie apart:

    python benchmarks/throughput.py --launch zero2 --processes 2 --engine given --steps 3
    python benchmarks/throughput.py --launch zero2 --processes 4 --engine given --steps 3
    python benchmarks/throughput.py --compare zero2-2 zero2-4

On a machine without GPUs, `--student tiny --teacher tiny --engine given` runs the same on CPUs, but for `fsdp2`.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import torch
from accelerate.utils import gather_object
from baseline import card_name, record
from datasets import Dataset
from safetensors.torch import load_file, save_file
from shapes import SHAPES, draw_lengths, draw_responses, draw_rows, make_config, make_model, make_tokenizer, save_model
from trainers import GivenResponses, given_lengths
from transformers import TrainerCallback

from crop_trl import CROPConfig, CROPTrainer

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("rollout", "scoring", "update")
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


class StepEnds(TrainerCallback):
    """The time at the end of each step."""

    def __init__(self):
        self.times: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        """Note the time."""
        self.times.append(time.time())


class Idleness(threading.Thread):
    """How much of the time each card ran no kernel, twice a second; nothing where nvidia-smi is missing."""

    def __init__(self):
        super().__init__(daemon=True)
        self.seen: list[tuple[float, str, float]] = []
        command = ["nvidia-smi", "--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits", "-lms", "500"]
        if cards := os.environ.get("CUDA_VISIBLE_DEVICES"):
            command += ["-i", cards]
        found = shutil.which("nvidia-smi")
        self.program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if found else None

    def run(self):
        """Read until the program is stopped."""
        for line in self.program.stdout if self.program else ():
            card, busy = line.split(",")
            if busy.strip().isdecimal():
                self.seen.append((time.time(), card, 1 - float(busy) / 100))

    def stop(self, since: float, until: float) -> dict[str, float]:
        """Stop; the mean share of each card within two times."""
        if self.program:
            self.program.terminate()
            self.join()
        cards: dict[str, list[float]] = {}
        for when, card, idle in self.seen:
            if since <= when <= until:
                cards.setdefault(card, []).append(idle)
        return {card: round(statistics.mean(shares), 3) for card, shares in cards.items()}


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
        output_dir=str(args.results / "run"),
        method=args.method,
        prompts_per_step=args.prompts,
        per_device_train_batch_size=args.rows,
        max_completion_length=args.longest,
        max_steps=args.steps,
        gradient_checkpointing=args.checkpointing,
        compile_layers=args.compile,
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
    ends = StepEnds()
    trainer.add_callback(ends)
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
            "ends": ends.times,
            "steps": steps,
            "peaks": peaks,
        }
        name = f"{args.worker}-{accelerator.num_processes}"
        (args.results / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
        save_file({"mask": trainer.first_mask}, str(args.results / f"{name}.safetensors"))
    accelerator.end_training()


def launch(args, arrangement: str) -> dict:
    """Run one arrangement to its end and read what it wrote."""
    config = ROOT / "accelerate_configs" / f"{arrangement}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    processes = 1 if arrangement == "single_gpu" else args.processes
    command += ["--num_processes", str(processes), "--main_process_port", "0"]
    environment = dict(os.environ)
    if not ON_GPUS:
        command += ["--mixed_precision", "no"]
        if arrangement in ("ddp", "single_gpu"):
            environment["ACCELERATE_USE_CPU"] = "true"
    path = args.results / f"{arrangement}-{processes}.json"
    path.unlink(missing_ok=True)
    idleness = Idleness()
    idleness.start()
    try:
        subprocess.run([*command, __file__, "--worker", arrangement, *sys.argv[1:]], env=environment, check=True)
    finally:
        result = json.loads(path.read_text()) if path.exists() else {"ends": [0.0]}
        idle = idleness.stop(result["ends"][0], result["ends"][-1])
    seconds = statistics.median(after - before for before, after in pairwise(result["ends"]))
    rest = result["steps"][1:]
    phases = {name: statistics.median(step[f"{name}_s"] for step in rest) for name in PHASES}
    result |= {"idle": idle, "step_s": round(seconds, 3), "phases": {n: round(s, 3) for n, s in phases.items()}}
    result["tokens_per_second"] = round(result["tokens"] / seconds, 1)
    path.write_text(json.dumps(result, indent=2) + "\n")
    return result


def summary(result: dict) -> str:
    """A row of the table; of memory that of the fullest process."""

    def median(name: str) -> float:
        values = [step[name] for step in result["steps"][1:] if step[name] is not None]
        return statistics.median(values) if values else float("nan")

    shares = [f"{100 * seconds / result['step_s']:.0f} %" for seconds in result["phases"].values()]
    idle = ", ".join(f"{100 * share:.0f} %" for share in result["idle"].values()) or "-"
    peaks = [max(peak[kind] for peak in result["peaks"]) for kind in ("device_gib", "torch_gib")]
    cells = [result["arrangement"], result["processes"], f"{result['tokens_per_second'] / result['processes']:.0f}"]
    cells += [f"{result['step_s']:.1f}", *shares, idle, f"{result['steps'][-1]['loss']:.4f}"]
    cells += [f"{median('retention'):.3f}", f"{median('engine_gap'):.4f}", *(f"{peak:.1f}" for peak in peaks)]
    return f"| {' | '.join(map(str, cells))} |"


def record_all(args, results: list[dict]) -> None:
    """Each arrangement against what its rollout alone would give, and against one GPU where that was measured too."""
    one = next((r["tokens_per_second"] for r in results if r["arrangement"] == "single_gpu"), None)
    for result in results:
        n, name = result["processes"], result["arrangement"]
        details = {k: result[k] for k in ("processes", "step_s", "phases", "idle", "tokens")}
        details |= {"student": args.student, "teacher": args.teacher, "method": args.method, "compiled": args.compile}
        where = ("cuda" if ON_GPUS else "cpu", args.output)
        ours, alone = result["tokens_per_second"] / n, result["tokens"] / result["phases"]["rollout"] / n
        record(f"throughput_{args.student}_from_{args.teacher}_{name}", ours, alone, *where, **details)
        if one and name != "single_gpu":
            record(f"scaling_{name}", result["tokens_per_second"], one, *where, **details)


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
    if args.launch and args.steps < 2:
        return f"--steps must be at least 2, since the first one is not counted, got {args.steps}"
    for name in ("processes", "prompts", "rows", "longest", "mean", "tokens_per_batch"):
        if getattr(args, name) < 1:
            return f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}"
    if args.launch and args.prompts * 4 % (args.processes * args.rows):
        share = f"--processes {args.processes} x --rows {args.rows}"
        return f"--prompts {args.prompts} x 4 responses do not divide into {share}"
    for name in args.compare or ():
        if not all((args.results / f"{name}.{ending}").exists() for ending in ("json", "safetensors")):
            there = ", ".join(sorted(path.stem for path in args.results.glob("*.safetensors"))) or "none"
            return f"--compare {name!r} has no result in {args.results}; there are: {there}"
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
    parser.add_argument("--compile", action="store_true", help="with `compile_layers`")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "throughput", help="folder of what was logged")
    parser.add_argument("--output", type=Path, help="folder of the baseline files")
    args = parser.parse_args()
    if wrong := trouble(args):
        parser.error(wrong)
    args.results.mkdir(parents=True, exist_ok=True)
    if args.worker:
        work(args)
    elif args.prepare:
        prepare(args)
    elif args.compare:
        print(compare(args.results, *args.compare))
    elif args.launch:
        # In a process of its own, which leaves nothing on the GPU behind.
        subprocess.run([sys.executable, __file__, "--prepare", *sys.argv[1:]], check=True)
        columns = ["arrangement", "GPUs", "tokens/s and GPU", "step", *PHASES, "idle", "loss", "retention", "gap"]
        print(f"| {' | '.join([*columns, 'device', 'torch'])} |\n|{'---|' * (len(columns) + 2)}", flush=True)
        results, failed = [], []
        for arrangement in args.launch:
            try:
                results.append(launch(args, arrangement))
                print(summary(results[-1]), flush=True)
            except subprocess.CalledProcessError as error:
                failed.append(arrangement)
                print(f"| {arrangement} | {args.processes} | failed with status {error.returncode} |", flush=True)
        record_all(args, results)
        if failed:
            sys.exit(f"error: {', '.join(failed)} failed; what they said is above.")
    else:
        parser.error("say what to do: --launch, --compare or --prepare")


if __name__ == "__main__":
    main()
