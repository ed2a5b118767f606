"""Several real processes, however they share the work, against one.

The launch files are those that users start from. DeepSpeed and FSDP2 run on CPUs over gloo here, and on GPUs over NCCL
where there are enough of them: `pytest tests/test_distributed.py -m "slow or not slow" -n 0`. With NCCL 2.31 or later
one GPU is enough for all processes; README.md has the command.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file
from test_checks import asked_for
from transformers import AutoModelForCausalLM

from crop_trl.commands.launch import launch_file
from crop_trl.methods import METHODS
from crop_trl.training.checkpoints import checkpoint_to_resume

TESTS = Path(__file__).parent
# As `crop-trl train` launches itself: what stands before the script's own arguments is accelerate's.
LAUNCH = """
import sys
from crop_trl.commands.launch import launch
at = sys.argv.index("several.py")
launch("scripts.several", sys.argv[1:at], sys.argv[at + 1 :])
"""
# Ends a launch that hangs, before PyTorch's own limit of half an hour for a collective operation does.
HANG = 1200
ONE_GPU = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and torch.cuda.is_available()
GPUS = 8 if ONE_GPU else torch.cuda.device_count()
# Which kernel of a GPU runs, and so how it rounds, depends on the shape of a batch.
TOLERANCE = 1e-4 if GPUS > 1 else 1e-5
# One that reads rewards, and prompts that the row does not hold, is registered by the script.
EVERY_METHOD = [f"{method}/resident/tied" for method in [*sorted(METHODS), "by-reward"]]
RESIDENT = ["crop/resident/tied", "tip/resident/untied", "crop-student/resident/tied", "crop/resident/adapter"]
RESIDENT += ["crop/resident/own", "opd/resident/ends"]
TOPK = ["crop/resident/topk", "iw-opd/resident/untied+topk", "crop/resident/own+topk", "opd/resident/ends+topk"]
RESIDENT += TOPK
ONE = sorted({*EVERY_METHOD, *RESIDENT})
SHARDED = ["crop/sharded/tied", "tip/sharded/untied", "crop/sharded/own", "opd/sharded/ends"]
CASES = {
    "ddp": [*EVERY_METHOD, "opd/resident/ends", *TOPK],
    "zero1": RESIDENT,
    "zero2": RESIDENT,
    "zero3": RESIDENT + SHARDED,
    "fsdp2": RESIDENT + SHARDED,
}
# Teachers of every source, under the launch files where they may differ.
OWN = ["student", "initial+adapter", "average", "average+adapter", "average+resumed"]
TEACHERS = {
    "ddp": [*OWN, "initial", "named"],
    "zero2": OWN,
    # `whole`: small weights stay on every process, as they do by default.
    "zero3": [*OWN, "average+whole", "named", "sharded"],
    "fsdp2": [*OWN, "named", "sharded"],
    None: ["student", "initial", "initial+adapter", "average", "average+adapter", "named"],
}
# `pytest` runs both ends, whole copies and everything split.
SLOW = {"zero1", "zero2", "fsdp2"}

pytestmark = pytest.mark.multiprocess


def arrangements(*configs: str):
    """Launch files as a test's parameter."""
    marked = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in configs]
    return pytest.mark.parametrize("config", marked)


def launch_command(
    config: str | None, processes: int, arguments: list[str], precision: str = "no"
) -> tuple[list[str], dict]:
    """Command and environment that run test scripts under one of the launch files, on CPUs if need be."""
    # DeepSpeed would prepare to compile an optimizer that nothing here uses.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    paths = [str(TESTS), *([str(TESTS / "one_gpu")] if ONE_GPU else []), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    if GPUS < 2 or processes > GPUS:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if config in (None, "ddp"):
            environment["ACCELERATE_USE_CPU"] = "true"
    elif processes == 1:
        # A process that sees several GPUs would be taken for data parallelism in threads.
        environment["CUDA_VISIBLE_DEVICES"] = "0"
    if config is None:
        return [sys.executable, "-m", "scripts.several", *arguments], environment
    command = [sys.executable, "-c", LAUNCH, "--config_file", str(launch_file(config))]
    command += ["--mixed_precision", precision, "--num_processes", str(processes), "--main_process_port", "0"]
    return [*command, "several.py", *arguments], environment


def launch(config: str | None, processes: int, arguments: list[str], precision: str = "no") -> None:
    command, environment = launch_command(config, processes, arguments, precision)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr[-3000:]


def case_arguments(folder: Path, processes: int, cases: list[str]) -> list[str]:
    """8 responses in a step: whole on one process, in two micro-batches on each of several, in one on each of eight."""
    accumulation = 1 if processes == 1 else max(1, min(2, 8 // processes))
    arguments = ["fixed_rollouts.py", "--output", str(folder), "--per-device", str(8 // processes // accumulation)]
    return [*arguments, "--accumulation", str(accumulation), "--cases", *cases]


def teacher_arguments(folder: Path, config: str | None, processes: int) -> list[str]:
    cases = TEACHERS[config]
    return ["teachers.py", "--output", str(folder), "--per-device", str(8 // processes), "--cases", *cases]


def read_cases(folder: Path, config: str | None, processes: int, cases: list[str]) -> dict[str, torch.Tensor]:
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
def one_folder(tmp_path_factory):
    """All that one process does: the folder of its results."""
    folder = tmp_path_factory.mktemp("one")
    arguments = case_arguments(folder, 1, ONE)
    launch(None, 1, [*arguments, "+", *teacher_arguments(folder / "teachers", None, 1)])
    return folder


@pytest.fixture(scope="module")
def one(one_folder):
    return read_cases(one_folder, None, 1, ONE)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """All that two processes do under a launch file, in one launch: the folder of their results."""

    @functools.cache
    def folder_of(config: str) -> Path:
        folder = tmp_path_factory.mktemp(config)
        arguments = case_arguments(folder, 2, CASES[config])
        if config in TEACHERS:
            arguments += ["+", *teacher_arguments(folder / "teachers", config, 2)]
        if config == "ddp":
            arguments += ["+", "resumable.py", "--output", str(folder / "early"), "--placement", "resident"]
            arguments += ["--evaluate-first"]
        if config in ("zero3", "fsdp2"):
            kill_one_process(folder / "killed", config)
            steps = ["resumable.py", "--output"]
            # Resuming comes first, in processes that have done nothing yet.
            resumed, whole = [*steps, str(folder / "killed"), "--resume"], [*steps, str(folder / "whole")]
            arguments = [*resumed, "+", *whole, "+", *arguments]
        launch(config, 2, arguments)
        return folder

    return folder_of


def differences(result: dict, case: str, one: dict) -> dict[str, float]:
    """How far a case lies from the same on one process: loss, gradient norm, and the gradient itself, all relative."""
    method, _, model = case.split("/")
    whole = f"{method}/resident/{model}"
    assert torch.equal(result[f"{case}/masks"], one[f"{whole}/masks"])
    assert result[f"{case}/masks"].any()
    found = {}
    for name in ("loss", "grad_norm", "gap_kept", "retention_ratio", "selected_tokens", "eval_loss", "eval_reward"):
        ours, theirs = result[f"{case}/{name}"], one[f"{whole}/{name}"]
        # A student's gap to itself is nothing but rounding.
        if name != "gap_kept" or method != "opsa":
            assert ours.shape == theirs.shape
            found[name] = float(((ours - theirs).abs() / theirs.abs()).sum())
    # A plain step of size one takes the gradient off the weights.
    ours, theirs = result[f"{case}/gradient"], one[f"{whole}/gradient"]
    found["gradient"] = float((ours - theirs).norm() / theirs.norm())
    return found


@arrangements(*CASES)
def test_two_processes_equal_one(two, one, config):
    """Masks, loss and gradient, also of methods that normalise or draw over the whole batch or score the student."""
    result = read_cases(two(config), config, 2, CASES[config])
    for case in CASES[config]:
        for name, difference in differences(result, case, one).items():
            assert difference < TOLERANCE, f"{case} {name}: {difference:.1e}"
        student, teacher = result[f"{case}/local_shares"].tolist()
        assert student < 0.6 if config in ("zero3", "fsdp2") else student == 1.0
        # DeepSpeed keeps what a head gathers that takes the model's own forward, until the next forward.
        assert teacher < (1.5 if case.endswith("own") else 0.6) if "/sharded/" in case else teacher == 1.0, case
    if config in ("zero3", "fsdp2"):
        # One process had less to score than the other, and went along for the sake of the collectives.
        assert result["crop/sharded/tied/extra_forwards"].any()


@arrangements("ddp", "zero2", "zero3", "fsdp2")
def test_teachers_of_two_processes_are_those_of_one(two, one_folder, config):
    """Of teachers by name each process has rows for one alone, and goes along with the other where it is sharded."""
    one, result = (load_file(folder / "teachers" / "result.safetensors") for folder in (one_folder, two(config)))
    apart = {}
    for case in TEACHERS[config]:
        assert result[f"{case}/processes"] == 2
        source, adapter = case.split("+")[0].replace("sharded", "named"), "+adapter" * case.endswith("+adapter")
        for name in ("loss", "gap", "weights", *(["average"] if source == "average" else [])):
            theirs = one[f"{source}{adapter}/{name}"]
            apart[case, name] = float((result[f"{case}/{name}"] - theirs).norm() / theirs.norm())
    assert max(apart.values()) < 1e-4, apart


@pytest.mark.slow
@pytest.mark.parametrize("config", ["zero2", "zero3_8gpu", "fsdp2"])
def test_nothing_depends_on_the_number_of_processes(tmp_path, one, config):
    """Prints the largest differences from one process on 2, 4 and 8."""
    cases = RESIDENT if config == "zero2" else RESIDENT + SHARDED
    for processes in (2, 4, 8):
        launch(config, processes, case_arguments(tmp_path / str(processes), processes, cases))
        result = read_cases(tmp_path / str(processes), config, processes, cases)
        found = [differences(result, case, one) for case in cases]
        worst = {name: max(each[name] for each in found) for name in found[0]}
        print(f"{config}, {processes} processes:", ", ".join(f"{name} {value:.1e}" for name, value in worst.items()))
        assert max(worst.values()) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "zero2", "zero3", "fsdp2"])
def test_mixed_precision_stays_close(tmp_path, one, config):
    """In bf16, as the launch files have it, against one process in fp32; bf16 on one process is off by 2 % itself."""
    cases = ["opd/resident/tied", "crop/resident/tied"]
    launch(config, 2, [*case_arguments(tmp_path, 2, cases), "--bf16"], precision="bf16")
    result = read_cases(tmp_path, config, 2, cases)
    for case in cases:
        found = differences(result, case, one)
        # The weights are, log-probabilities must not be.
        assert not result[f"{case}/rounded"]
        print(config, case, {name: f"{value:.1e}" for name, value in found.items()})
        assert found["gradient"] < 0.05 and found["loss"] < 0.03


def test_evaluating_before_training_on_several_processes_is_refused(two):
    """Transformers would train the model that it prepared for evaluation, each process by itself."""
    refused = json.loads((two("ddp") / "early" / "result.json").read_text())["refused"]
    assert refused.startswith("`evaluate` ran before `train` on 2 processes")


def kill_one_process(folder: Path, config: str) -> None:
    """Kill process 1 after the first checkpoint, while 0 waits for it; the others end long before they give up."""
    folder.mkdir()
    command, environment = launch_command(config, 2, ["resumable.py", "--output", str(folder), "--stall"])
    with open(folder / "log.txt", "w") as log:
        launcher = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + HANG
        while not (folder / "pid").exists():
            assert launcher.poll() is None and time.monotonic() < deadline, (folder / "log.txt").read_text()[-3000:]
            time.sleep(0.1)
        others = psutil.Process(launcher.pid).children(recursive=True)
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
        assert launcher.wait(timeout=HANG) != 0
        _, alive = psutil.wait_procs(others, timeout=HANG)
        assert not alive
    finally:
        launcher.kill()
    checkpoints = [path.name for path in (folder / "run").glob("checkpoint-*")]
    assert checkpoints == ["checkpoint-2"]


def read_steps(folder: Path) -> dict:
    """Prompts, weights and the rest of four steps, whole or resumed."""
    result = json.loads((folder / "result.json").read_text())
    assert result["processes"] == 2
    result["weights"] = load_file(folder / "result.safetensors")["weights"]
    saved = AutoModelForCausalLM.from_pretrained(folder / "run").named_parameters()
    saved = torch.cat([weight.detach().double().flatten() for _, weight in sorted(saved)])
    assert torch.equal(saved, result["weights"])
    return result


@arrangements("zero3", "fsdp2")
def test_a_killed_process_ends_the_others_and_the_run_goes_on_from_its_checkpoint(two, config):
    folder = two(config)
    # Which process, and of what it died.
    assert "error: process 1 was ended by SIGKILL" in (folder / "killed" / "log.txt").read_text()

    resumed, whole = read_steps(folder / "killed"), read_steps(folder / "whole")
    for name in ("prompts", "completions", "selected_tokens", "backend"):
        assert resumed[name] == whole[name], name
    # Some sums on a GPU are taken in an order that changes from run to run.
    same = {"rtol": 0, "atol": 0 if GPUS < 2 else 1e-5}
    assert resumed["loss"] == pytest.approx(whole["loss"], rel=same["rtol"], abs=same["atol"])
    torch.testing.assert_close(resumed["weights"], whole["weights"], **same)
    refuses_what_it_cannot_go_on_from(folder / "killed", config)


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
    for other in (1, 2) if config == "zero3" else ():
        args = asked_for(deepspeed_plugin=SimpleNamespace(zero_stage=other), max_steps=4)
        with pytest.raises(ValueError, match=f"was written under ZeRO-3, and this run launches ZeRO-{other}"):
            checkpoint_to_resume(str(checkpoint), args)


@pytest.mark.slow
def test_a_real_launch_that_would_run_something_else_is_refused(tmp_path):
    """DeepSpeed beside `use_cpu`: the launcher says nothing, and plain data parallelism would run."""
    command, environment = launch_command("zero2", 2, case_arguments(tmp_path, 2, ["crop/resident/tied"]))
    environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode != 0
    assert (
        "ValueError: DeepSpeed was asked for, but with `use_cpu` plain data-parallel training would run" in done.stderr
    )
