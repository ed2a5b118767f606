"""Two real processes against one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).parent / "scripts" / "fixed_rollouts.py"


def launch(output: Path, processes: int, per_device: int, accumulation: int, method: str) -> dict:
    script = [
        str(SCRIPT),
        *("--output", str(output)),
        *("--per-device", str(per_device)),
        *("--accumulation", str(accumulation)),
        *("--method", method),
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
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    result = load_file(output / "result.safetensors")
    # Some launch lines run a single process without a word.
    assert result["processes"].item() == processes
    return result


@pytest.mark.multiprocess
@pytest.mark.parametrize("method", ["crop", "random"])
def test_two_processes_equal_one(tmp_path, method):
    one = launch(tmp_path / "one", 1, 8, 1, method)
    two = launch(tmp_path / "two", 2, 2, 2, method)
    for name in ("loss", "grad_norm", "gap_kept", "retention_ratio"):
        torch.testing.assert_close(two[name], one[name], rtol=1e-5, atol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert torch.equal(two["selected_tokens"], one["selected_tokens"])
    torch.testing.assert_close(two["embedding"], one["embedding"], rtol=1e-5, atol=1e-7)
