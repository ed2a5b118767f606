"""Several real processes, however they share the work, against one.

The launch files are those that users start from. DeepSpeed and FSDP2 run on CPUs over gloo here.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_model

from crop_trl.methods import METHODS

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).parent / "scripts" / "fixed_rollouts.py"
EVERY_METHOD = [f"{method}/resident/tied" for method in sorted(METHODS)]
RESIDENT = ["crop/resident/tied", "tip/resident/untied", "crop-student/resident/tied"]
SHARDED = ["crop/sharded/tied", "tip/sharded/untied"]

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("processes")]


def launch_command(config: str | None, processes: int, script: Path, arguments: list[str]) -> tuple[list[str], dict]:
    """Command and environment that run a script under one of the launch files, in fp32 and on CPUs if need be."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    on_gpus = torch.cuda.is_available()
    if config in (None, "ddp") and not on_gpus:
        environment["ACCELERATE_USE_CPU"] = "true"
    command = [sys.executable]
    if config is not None:
        command += ["-m", "accelerate.commands.launch"]
        command += ["--config_file", str(ROOT / "accelerate_configs" / f"{config}.yaml"), "--mixed_precision", "no"]
        command += ["--num_processes", str(processes), "--main_process_port", "0"]
    return [*command, str(script), *arguments], environment


def run_cases(folder: Path, config: str | None, processes: int, cases: list[str]) -> dict[str, torch.Tensor]:
    """8 responses in a step: whole on one process, in two micro-batches on each of several, in one on each of eight."""
    accumulation = 1 if config is None else max(1, min(2, 8 // processes))
    arguments = ["--output", str(folder), "--per-device", str(8 // processes // accumulation)]
    arguments += ["--accumulation", str(accumulation), "--cases", *cases]
    command, environment = launch_command(config, processes, SCRIPT, arguments)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    result = load_file(folder / "result.safetensors")
    for case in cases:
        # Some launch lines run a single process, or plain data parallelism, without a word.
        assert result[f"{case}/processes"].item() == processes
        backend = bytes(result[f"{case}/backend"].tolist()).decode()
        expected = {"ddp": {"MULTI_CPU", "MULTI_GPU"}, "fsdp2": {"FSDP"}, None: {"NO"}}.get(config, {"DEEPSPEED"})
        assert backend in expected
        assert result[f"{case}/zero_stage"].item() == (int(config[4]) if config and config.startswith("zero") else 0)
    return result


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return run_cases(tmp_path_factory.mktemp("one"), None, 1, [*EVERY_METHOD, "tip/resident/untied"])


def gradient(result: dict, case: str) -> torch.Tensor:
    """What a plain step of size one took off the weights."""
    start = make_model(0, tied=case.endswith("/tied")).named_parameters()
    start = torch.cat([weight.detach().double().flatten() for _, weight in sorted(start)])
    return start - result[f"{case}/weights"]


def differences(result: dict, case: str, one: dict) -> dict[str, float]:
    """How far a case lies from the same on one process: loss, gradient norm, and the gradient itself, all relative."""
    method, _, head = case.split("/")
    whole = f"{method}/resident/{head}"
    assert torch.equal(result[f"{case}/masks"], one[f"{whole}/masks"])
    assert result[f"{case}/masks"].any()
    found = {}
    for name in ("loss", "grad_norm", "gap_kept", "retention_ratio", "selected_tokens"):
        ours, theirs = result[f"{case}/{name}"], one[f"{whole}/{name}"]
        found[name] = float((ours - theirs).abs() / theirs.abs())
    ours, theirs = gradient(result, case), gradient(one, whole)
    found["gradient"] = float((ours - theirs).norm() / theirs.norm())
    return found


@pytest.mark.parametrize(
    ("config", "cases"),
    [
        ("ddp", EVERY_METHOD),
        ("zero1", RESIDENT),
        ("zero2", RESIDENT),
        ("zero3", RESIDENT + SHARDED),
        ("fsdp2", RESIDENT + SHARDED),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_two_processes_equal_one(tmp_path, one, config, cases):
    """Masks, loss and gradient, also of methods that normalise or draw over the whole batch or score the student."""
    two = run_cases(tmp_path, config, 2, cases)
    for case in cases:
        for name, difference in differences(two, case, one).items():
            assert difference < 1e-5, f"{case} {name}: {difference:.1e}"
        student, teacher = two[f"{case}/local_shares"].tolist()
        assert student < 0.6 if config in ("zero3", "fsdp2") else student == 1.0
        assert teacher < 0.6 if "/sharded/" in case else teacher == 1.0
    if config in ("zero3", "fsdp2"):
        # One process had less to score than the other, and went along for the sake of the collectives.
        assert two["crop/sharded/tied/extra_forwards"].any()


@pytest.mark.slow
@pytest.mark.parametrize("config", ["zero2", "zero3_8gpu", "fsdp2"])
def test_nothing_depends_on_the_number_of_processes(tmp_path, one, config):
    """Prints the largest differences from one process on 2, 4 and 8."""
    cases = RESIDENT if config == "zero2" else RESIDENT + SHARDED
    for processes in (2, 4, 8):
        result = run_cases(tmp_path / str(processes), config, processes, cases)
        found = [differences(result, case, one) for case in cases]
        worst = {name: max(each[name] for each in found) for name in found[0]}
        print(f"{config}, {processes} processes:", ", ".join(f"{name} {value:.1e}" for name, value in worst.items()))
        assert max(worst.values()) < 1e-5
