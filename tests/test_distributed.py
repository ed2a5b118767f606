"""Two real processes against one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from crop_trl.methods import METHODS

SCRIPT = Path(__file__).parent / "scripts" / "fixed_rollouts.py"


def launch(output: Path, processes: int, per_device: int, accumulation: int, methods: list[str]) -> dict:
    script = [
        str(SCRIPT),
        *("--output", str(output)),
        *("--per-device", str(per_device)),
        *("--accumulation", str(accumulation)),
        *("--methods", *methods),
    ]
    command = [sys.executable, *script]
    if processes > 1:
        command = [
            *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"),
            *("--num_processes", str(processes), "--num_machines", "1"),
            *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
            *script,
        ]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    result = load_file(output / "result.safetensors")
    # Some launch lines run a single process without a word.
    assert result[f"{methods[0]}/processes"].item() == processes
    return result


@pytest.mark.multiprocess
def test_two_processes_equal_one(tmp_path):
    """Loss, gradient and selection of every method, also of those that normalise or draw over the whole batch."""
    methods = sorted(METHODS)
    one = launch(tmp_path / "one", 1, 8, 1, methods)
    two = launch(tmp_path / "two", 2, 2, 2, methods)
    for method in methods:
        for name in ("loss", "grad_norm", "gap_kept", "retention_ratio"):
            key = f"{method}/{name}"
            torch.testing.assert_close(two[key], one[key], rtol=1e-5, atol=0, msg=lambda m, k=key: f"{k}: {m}")
        assert torch.equal(two[f"{method}/selected_tokens"], one[f"{method}/selected_tokens"])
        torch.testing.assert_close(two[f"{method}/embedding"], one[f"{method}/embedding"], rtol=1e-5, atol=1e-7)
