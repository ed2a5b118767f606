"""Timing, and the file of last measured ratios of one card."""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

GIB = 2**30
FOLDER = Path(__file__).parent / "baselines"


def add_measurement_arguments(parser: argparse.ArgumentParser, repeats: int) -> None:
    """Options for how often, where, and where to put the result."""
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="folder of the baseline files")


def synchronize(device: str) -> None:
    """Wait for the device, so that a host clock can be read."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def seconds(function: Callable[[], object], device: str) -> float:
    """Wall clock of one call, with the device idle before and after."""
    synchronize(device)
    started = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - started


def compare(functions: dict[str, Callable[[], object]], device: str, repeats: int = 3) -> dict[str, float]:
    """Median seconds of each, after one call to warm up, taken in turns so that a drifting clock hits all alike."""
    for function in functions.values():
        function()
    times = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(seconds(function, device))
    return {name: statistics.median(values) for name, values in times.items()}


def peak_gib(function: Callable[[], object], device: str) -> float:
    """Peak memory of a call above what was in use before it: the allocator's on CUDA, resident memory on the CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / GIB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    function()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / GIB


def kernel_table(function: Callable[[], object], device: str, rows: int = 25) -> str:
    """Where the time of one call goes: the kernels that take most of it, or the operators on a CPU."""
    cuda = torch.device(device).type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    # Kernels alone: with the host's side as well, a step of 100,000 launches takes minutes to add up.
    with torch.profiler.profile(activities=[kind]) as profiler:
        function()
        synchronize(device)
    key = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=key, row_limit=rows, max_name_column_width=90)


def card_name(device: str) -> str:
    """The card, as a file name."""
    name = torch.cuda.get_device_name() if torch.device(device).type == "cuda" else "CPU"
    return name.removeprefix("NVIDIA ").replace(" ", "-")


def _commit() -> str | None:
    if commit := os.environ.get("BENCHMARK_COMMIT"):
        return commit
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=FOLDER.parent, capture_output=True, text=True, check=False
    )
    return git.stdout.strip() or None


def record(key: str, ours: float, reference: float, device: str, folder: Path | None = None, **details) -> None:
    """
    Print one ratio and keep it as the last row of `key` for this card.

    Args:
        key (`str`): Name of the ratio.
        ours, reference (`float`): Both sides, measured in one run.
        device (`str`): Where.
        folder (`Path`, *optional*): Where the file of the card lies; by default `benchmarks/baselines`.
        details: Anything else that belongs to the row.
    """
    folder = FOLDER if folder is None else folder
    path = folder / f"{card_name(device)}.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    rows[key] = {
        "ours": round(ours, 4),
        "reference": round(reference, 4),
        "ratio": round(ours / reference, 4),
        "command": " ".join(["python", os.path.relpath(sys.argv[0], FOLDER.parents[1]), *sys.argv[1:]]),
        "commit": _commit(),
        "torch": torch.__version__,
        **details,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=2, sort_keys=True) + "\n")
    print(json.dumps({"key": key, **rows[key]}), flush=True)
