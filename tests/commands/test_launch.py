"""`crop-trl` starts commands and accelerate's launcher; what fails is said once, in a sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from crop_trl.commands import COMMANDS
from crop_trl.commands.launch import FOLDER, is_launched, launch_file, split_options

ROOT = Path(__file__).parents[2]
CONFIG = ["--config", "examples/configs/tiny_math.yaml"]
LAUNCHES = pytest.mark.parametrize(
    "options",
    [
        pytest.param(["cpu"], marks=pytest.mark.slow),
        ["zero2", "--num_processes", "2", "--main_process_port", "0"],
    ],
)


def crop_trl(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    kept = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "RANK", "ACCELERATE_USE_CPU")}
    return subprocess.run(
        [sys.executable, "-m", "crop_trl.commands", *arguments],
        **{"cwd": ROOT, "env": {**kept, **environment}, "capture_output": True, "text": True},
    )


def test_help_lists_the_commands_without_loading_them():
    code = "import sys; from crop_trl.commands.__main__ import main; main(['--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(f"  {name} " in done.stdout for name in COMMANDS) and done.stdout.endswith("False\n")
    modules = {path.stem for path in (ROOT / "crop_trl/commands").glob("*.py")}
    assert modules >= {name.replace("-", "_") for name in COMMANDS}


def test_a_mistyped_command():
    done = crop_trl("trian")
    assert done.returncode == 1 and done.stderr == "error: 'trian' is no command of crop-trl; did you mean train?\n"


def test_options_of_a_launch(tmp_path, monkeypatch):
    own = ["--max_steps", "2", "--teacher_server_urls", "a", "b"]
    options = ["--accelerate_config", "zero2", "--num_processes", "4", "--main-process-port=0"]
    expected = ["--config_file", str(FOLDER / "zero2.yaml"), "--num_processes", "4", "--main_process_port", "0"]
    assert split_options([*own[:2], *options, *own[2:]]) == (expected, own)
    mine = tmp_path / "mine.yaml"
    mine.write_text("num_processes: 1")
    assert launch_file(str(mine)) == mine and launch_file("cpu").samefile(ROOT / "accelerate_configs" / "cpu.yaml")
    with pytest.raises(ValueError, match="Argument --num_processes/--num-processes: expected one argument; `crop-trl"):
        split_options(["--num_processes"])
    with pytest.raises(ValueError, match="`accelerate_config` 'zero4' is no launch file: choose one of cpu, ddp, "):
        split_options(["--accelerate_config", "zero4"])
    for name in ("LOCAL_RANK", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    # As a trainer in a notebook leaves it.
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert not is_launched()
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert is_launched()


@pytest.mark.multiprocess
@LAUNCHES
def test_a_refusal_under_a_launch_is_one_sentence(options):
    done = crop_trl("train", "--accelerate_config", *options, *CONFIG, "--method", "crpo")
    assert done.returncode == 1 and "Traceback" not in done.stderr and "Error" not in done.stderr, done.stderr
    assert done.stderr.count("error: ") == 1 and "error: Unknown method 'crpo': choose one of base," in done.stderr


@pytest.mark.slow
@pytest.mark.multiprocess
@LAUNCHES
def test_a_process_that_is_killed_is_named(tmp_path, options):
    """Only one of them kills itself, as soon as it reads its settings; `test_distributed.py` kills one that trains."""
    file = tmp_path / "mine.py"
    file.write_text("import os, time\nif os.environ.get('RANK') == '0':\n    time.sleep(600)\nos.kill(os.getpid(), 9)")
    done = crop_trl("train", "--accelerate_config", *options, *CONFIG, "--selector", f"{file}:score")
    rank = len(options) > 1
    assert done.returncode == 1 and f"error: process {int(rank)} was ended by SIGKILL" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
