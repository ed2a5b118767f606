"""Grids of runs that take two steps each, and studies of them as processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def make_grid(folder: Path, file: str = "grid.yaml", launch: str = "cpu", **parameters) -> Path:
    """A grid of runs that take two steps each."""
    base = yaml.safe_load((ROOT / "examples/configs/tiny_math.yaml").read_text())
    for name in ("dataset_name", "eval_dataset_name"):
        lines = (ROOT / base[name]).read_text().splitlines()[: 16 if name == "dataset_name" else 8]
        base[name] = str(folder / f"{name}.jsonl")
        Path(base[name]).write_text("\n".join(lines) + "\n")
    base |= {"prompts_per_step": 4, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 32, "max_steps": 2}
    base |= {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    base |= {"heatmap": False, "logging_steps": 1, "world": "short", "max_completion_length": 40}
    base["chat_template_kwargs"] = {"mood": "calm"}
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    train = ["crop-trl", "train", "--accelerate_config", launch, "--config", str(folder / "base.yaml"), "${args}"]
    values = {name: {"values": value} for name, value in parameters.items()}
    grid = {"method": "grid", "program": "crop-trl", "command": train, "parameters": values}
    (folder / file).write_text(yaml.safe_dump(grid, sort_keys=False))
    return folder / file


def alone() -> dict[str, str]:
    """The environment of a program that no launcher started."""
    return {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "RANK", "ACCELERATE_USE_CPU")}


def start(output: Path, *grids: Path, options: tuple[str, ...] = ()) -> subprocess.Popen:
    words = [sys.executable, "-m", "crop_trl.commands", "study", *map(str, grids), "--output", str(output), *options]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, env=alone(), start_new_session=True, **streams)


def wait_for(condition, process: subprocess.Popen) -> None:
    """An hour ends what hangs."""
    while not condition():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
