"""Several real processes, however they share the work, against one.

The launch files are those that users start from. DeepSpeed and FSDP2 run on CPUs over gloo here, and on GPUs over NCCL
where there are enough of them: `pytest tests/test_distributed.py -m "slow or not slow" -n 0`. With NCCL 2.31 or later
one GPU is enough for all processes; README.md has the command.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate.utils import DeepSpeedPlugin, patch_environment
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from crop_trl.checks import check_launch
from crop_trl.commands.launch import launch_file
from crop_trl.methods import METHODS
from crop_trl.training.checkpoints import checkpoint_to_resume

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).parent / "scripts" / "fixed_rollouts.py"
STEPS_SCRIPT = Path(__file__).parent / "scripts" / "resumable.py"
ONE_GPU = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and torch.cuda.is_available()
GPUS = 8 if ONE_GPU else torch.cuda.device_count()
# Which kernel of a GPU runs, and so how it rounds, depends on the shape of a batch.
TOLERANCE = 1e-4 if GPUS > 1 else 1e-5
EVERY_METHOD = [f"{method}/resident/tied" for method in sorted(METHODS)]
RESIDENT = ["crop/resident/tied", "tip/resident/untied", "crop-student/resident/tied", "crop/resident/adapter"]
SHARDED = ["crop/sharded/tied", "tip/sharded/untied"]

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("processes")]


def launch_command(
    config: str | None, processes: int, script: Path, arguments: list[str], precision: str = "no"
) -> tuple[list[str], dict]:
    """Command and environment that run a script under one of the launch files, on CPUs if need be."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if ONE_GPU:
        environment["PYTHONPATH"] = f"{ROOT / 'tests' / 'one_gpu'}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    if GPUS < 2 or processes > GPUS:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if config in (None, "ddp"):
            environment["ACCELERATE_USE_CPU"] = "true"
    elif processes == 1:
        # A process that sees several GPUs would be taken for data parallelism in threads.
        environment["CUDA_VISIBLE_DEVICES"] = "0"
    command = [sys.executable]
    if config is not None:
        command += ["-m", "accelerate.commands.launch"]
        command += [
            "--config_file",
            str(launch_file(config)),
            "--mixed_precision",
            precision,
        ]
        command += ["--num_processes", str(processes), "--main_process_port", "0"]
    return [*command, str(script), *arguments], environment


def run_cases(
    folder: Path, config: str | None, processes: int, cases: list[str], precision: str = "no"
) -> dict[str, torch.Tensor]:
    """8 responses in a step: whole on one process, in two micro-batches on each of several, in one on each of eight."""
    accumulation = 1 if config is None else max(1, min(2, 8 // processes))
    arguments = ["--output", str(folder), "--per-device", str(8 // processes // accumulation)]
    arguments += ["--accumulation", str(accumulation), "--cases", *cases]
    arguments += ["--bf16"] if precision == "bf16" else []
    command, environment = launch_command(config, processes, SCRIPT, arguments, precision)
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
    return run_cases(tmp_path_factory.mktemp("one"), None, 1, sorted({*EVERY_METHOD, *RESIDENT}))


def differences(result: dict, case: str, one: dict) -> dict[str, float]:
    """How far a case lies from the same on one process: loss, gradient norm, and the gradient itself, all relative."""
    method, _, model = case.split("/")
    whole = f"{method}/resident/{model}"
    assert torch.equal(result[f"{case}/masks"], one[f"{whole}/masks"])
    assert result[f"{case}/masks"].any()
    found = {}
    for name in ("loss", "grad_norm", "gap_kept", "retention_ratio", "selected_tokens", "eval_loss", "eval_reward"):
        ours, theirs = result[f"{case}/{name}"], one[f"{whole}/{name}"]
        found[name] = float((ours - theirs).abs() / theirs.abs())
    # A plain step of size one takes the gradient off the weights.
    ours, theirs = result[f"{case}/gradient"], one[f"{whole}/gradient"]
    found["gradient"] = float((ours - theirs).norm() / theirs.norm())
    return found


@pytest.mark.parametrize(
    ("config", "cases"),
    [
        ("ddp", EVERY_METHOD),
        pytest.param("zero1", RESIDENT, marks=pytest.mark.slow),
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
            assert difference < TOLERANCE, f"{case} {name}: {difference:.1e}"
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
        assert max(worst.values()) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "zero2", "zero3", "fsdp2"])
def test_mixed_precision_stays_close(tmp_path, one, config):
    """In bf16, as the launch files have it, against one process in fp32; bf16 on one process is off by 2 % itself."""
    cases = ["opd/resident/tied", "crop/resident/tied"]
    two = run_cases(tmp_path, config, 2, cases, precision="bf16")
    for case in cases:
        found = differences(two, case, one)
        # The weights are, log-probabilities must not be.
        assert not two[f"{case}/rounded"]
        print(config, case, {name: f"{value:.1e}" for name, value in found.items()})
        assert found["gradient"] < 0.05 and found["loss"] < 0.03


def run_steps(folder: Path, config: str, *flags: str) -> dict:
    """Four steps with a checkpoint after the second, whole or resumed; prompts, weights and the saved model."""
    folder.mkdir(exist_ok=True)
    command, environment = launch_command(config, 2, STEPS_SCRIPT, ["--output", str(folder), *flags])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((folder / "result.json").read_text())
    assert result["processes"] == 2
    result["weights"] = load_file(folder / "result.safetensors")["weights"]
    saved = AutoModelForCausalLM.from_pretrained(folder / "run").named_parameters()
    saved = torch.cat([weight.detach().double().flatten() for _, weight in sorted(saved)])
    assert torch.equal(saved, result["weights"])
    return result


def kill_one_process(folder: Path, config: str) -> tuple[float, str]:
    """Kill process 1 after the first checkpoint, while 0 waits for it; seconds to the end, and what was said."""
    folder.mkdir()
    command, environment = launch_command(config, 2, STEPS_SCRIPT, ["--output", str(folder), "--stall"])
    with open(folder / "log.txt", "w") as log:
        launcher = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 200
        while not (folder / "pid").exists():
            assert launcher.poll() is None and time.monotonic() < deadline, (folder / "log.txt").read_text()[-3000:]
            time.sleep(0.1)
        others = psutil.Process(launcher.pid).children(recursive=True)
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
        killed = time.monotonic()
        assert launcher.wait(timeout=60) != 0
        seconds = time.monotonic() - killed
        _, alive = psutil.wait_procs(others, timeout=1)
        assert not alive
    finally:
        launcher.kill()
    return seconds, (folder / "log.txt").read_text()


@pytest.mark.parametrize("config", ["zero3", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_killed_process_ends_the_others_and_the_run_goes_on_from_its_checkpoint(tmp_path, config):
    seconds, said = kill_one_process(tmp_path / "killed", config)
    assert seconds < 60
    # Which process, and of what it died.
    assert re.search(r"rank\s*: 1 .*\n.*exitcode\s*: -9", said) and "SIGKILL" in said
    assert [path.name for path in (tmp_path / "killed" / "run").glob("checkpoint-*")] == ["checkpoint-2"]

    resumed = run_steps(tmp_path / "killed", config, "--resume")
    whole = run_steps(tmp_path / "whole", config)
    for name in ("prompts", "completions", "selected_tokens", "backend"):
        assert resumed[name] == whole[name], name
    # Some sums on a GPU are taken in an order that changes from run to run.
    same = {"rtol": 0, "atol": 0 if GPUS < 2 else 1e-5}
    assert resumed["loss"] == pytest.approx(whole["loss"], rel=same["rtol"], abs=same["atol"])
    torch.testing.assert_close(resumed["weights"], whole["weights"], **same)
    refuses_what_it_cannot_go_on_from(tmp_path / "killed", config)


def refuses_what_it_cannot_go_on_from(folder: Path, config: str) -> None:
    """Without a part that one process alone reads, on every process; and launched with another stage of ZeRO."""
    shared = {"deepspeed_plugin": SimpleNamespace(zero_stage=3)}
    states = [f"global_step2/zero_pp_rank_{part}_states.pt" for part in ("1_mp_rank_00_optim", "0_mp_rank_00_model")]
    parts = ["latest", *states]
    if config == "fsdp2":
        shared = {"fsdp": "full_shard", "fsdp_config": {"version": 2}}
        parts = ["optimizer_0/.metadata", "optimizer_0/__1_0.distcp"]
    checkpoint = folder / "run" / "checkpoint-2"
    for part in parts:
        (checkpoint / part).rename(folder / "hidden")
        for process in (0, 1):
            args = asked_for(**shared, process_index=process, local_process_index=process, max_steps=4)
            with pytest.raises(ValueError, match=f"checkpoint-2' holds no {part}, which is a part of it"):
                checkpoint_to_resume(str(checkpoint), args)
        (folder / "hidden").rename(checkpoint / part)
    if config == "zero3":
        flags = ["--output", str(folder), "--resume", "--placement", "resident"]
        command, environment = launch_command("zero2", 2, STEPS_SCRIPT, flags)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode and "was written under ZeRO-3, and this run launches ZeRO-2" in done.stderr


def zero3_without_weights() -> DeepSpeedPlugin:
    with patch_environment(accelerate_mixed_precision="no"):
        return DeepSpeedPlugin(zero_stage=3, zero3_save_16bit_model=False)


def asked_for(**settings) -> SimpleNamespace:
    defaults = {
        "ignore_data_skip": True,
        "deepspeed_plugin": None,
        "fsdp": None,
        "fsdp_config": None,
        "teacher_placement": "resident",
    }
    defaults |= {"n_gpu": 1, "use_vllm": False, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 1}
    defaults |= {
        "bf16": False,
        "fp16": False,
        "teacher_server_urls": None,
        "teacher_server_timeout": 600.0,
        "ddp_timeout": 1800,
    }
    state = SimpleNamespace(distributed_type=SimpleNamespace(value=settings.pop("distributed_type", "MULTI_GPU")))
    return SimpleNamespace(**{**defaults, "world_size": 2, "distributed_state": state, **settings})


@pytest.mark.parametrize(
    ("environment", "settings", "sentence"),
    [
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, {"world_size": 1}, "started 2 processes, but each would train as one"),
        ({"PMI_SIZE": "4"}, {"world_size": 1}, "The environment says `PMI_SIZE` 4, but 1 would train; unset it"),
        ({"WORLD_SIZE": "0"}, {"world_size": 1}, "The environment says `WORLD_SIZE` 0, but 1 would train"),
        (
            {"ACCELERATE_MIXED_PRECISION": "bf16"},
            {"world_size": 1},
            "`mixed_precision: bf16`, which would run though `bf16` and `fp16` are false",
        ),
        (
            {"WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            {"deepspeed_plugin": zero3_without_weights()},
            "With `zero3_save_16bit_model: false` the saved model would have no weights",
        ),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
            {"distributed_type": "MULTI_CPU"},
            r"FSDP was asked for, but with `use_cpu` plain data-parallel training would run; .* \(FSDP needs GPUs\)",
        ),
        # Without this, one sentence would send to `use_cpu` and the other away from it.
        (
            {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
            {"world_size": 1},
            "would train as one of 1; FSDP needs GPUs, so launch with DeepSpeed or plain data parallelism",
        ),
        (
            {},
            {"distributed_type": "MULTI_CPU", "deepspeed_plugin": SimpleNamespace(zero_stage=2)},
            "DeepSpeed was asked for, but with `use_cpu` plain",
        ),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, {}, "FSDP version 1 is not supported"),
        (
            {},
            {"world_size": 1, "n_gpu": 4},
            "One process sees 4 GPUs .* --num_processes 4`, or set CUDA_VISIBLE_DEVICES",
        ),
        (
            {},
            {"world_size": 3, "use_vllm": True, "vllm_tensor_parallel_size": 2},
            "`vllm_tensor_parallel_size` 2 does not divide the 3 processes",
        ),
        (
            {},
            {"teacher_server_urls": ["http://a"], "teacher_server_timeout": 3600.0},
            "`teacher_server_timeout` 3600 is not less than `ddp_timeout` 1800",
        ),
        ({}, {"teacher_placement": "sharded"}, "'sharded' needs a launch with DeepSpeed ZeRO-3 or FSDP2"),
        (
            {},
            {"teacher_placement": "sharded", "deepspeed_plugin": SimpleNamespace(zero_stage=2)},
            "'sharded' needs a launch with DeepSpeed ZeRO-3 or FSDP2",
        ),
    ],
)
def test_a_launch_that_would_run_something_else_is_refused(monkeypatch, environment, settings, sentence):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=sentence):
        check_launch(asked_for(**settings))


@pytest.mark.slow
def test_a_real_launch_that_would_run_something_else_is_refused(tmp_path):
    """DeepSpeed beside `use_cpu`: the launcher says nothing, and plain data parallelism would run."""
    command, environment = launch_command("zero2", 2, SCRIPT, ["--output", str(tmp_path), "--per-device", "4"])
    command += ["--accumulation", "1", "--cases", "crop/resident/tied"]
    environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode != 0
    assert (
        "ValueError: DeepSpeed was asked for, but with `use_cpu` plain data-parallel training would run" in done.stderr
    )
