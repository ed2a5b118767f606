"""A user's own method: registered in a few lines, trained like any other."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HELD_OUT = ROOT / "examples/tiny_math/data/heldout.jsonl"


def test_a_users_method_trains(tmp_path):
    few = tmp_path / "heldout.jsonl"
    few.write_text("".join(HELD_OUT.read_text().splitlines(keepends=True)[:4]))
    command = [sys.executable, "examples/custom_selector.py", "--config", "examples/configs/tiny_math.yaml"]
    command += ["--use_cpu", "true", "--max_steps", "2", "--prompts_per_step", "4"]
    command += ["--per_device_train_batch_size", "8"]
    command += ["--eval_dataset_name", str(few), "--per_device_eval_batch_size", "16"]
    done = subprocess.run(
        [*command, "--output_dir", str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "out" / "result.json").read_text())["method"] == "teacher-surprise"
    assert "(teacher-surprise)" in done.stdout


def test_it_takes_under_twenty_lines():
    lines = (ROOT / "examples" / "custom_selector.py").read_text().split('"""', 2)[2].splitlines()
    assert len([line for line in lines if line.strip()]) < 20
