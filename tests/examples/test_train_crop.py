"""The page to copy: launched by accelerate, it comes to what the command comes to."""

import json
import os
import subprocess
import sys
from pathlib import Path

from crop_trl.commands import train

ROOT = Path(__file__).parents[2]


def test_the_page_does_what_the_command_does(tmp_path, monkeypatch, capsys):
    few = tmp_path / "heldout.jsonl"
    few.write_text("".join((ROOT / "examples/tiny_math/data/heldout.jsonl").read_text().splitlines(keepends=True)[:4]))
    options = ["--config", "examples/configs/tiny_math.yaml", "--max_steps", "2", "--prompts_per_step", "2"]
    options += ["--num_counterfactuals", "2", "--per_device_train_batch_size", "8", "--heatmap", "false"]
    options += ["--max_completion_length", "40"]
    options += ["--eval_dataset_name", str(few)]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
    done = subprocess.run(
        [*launcher, "examples/train_crop.py", *options, "--output_dir", str(tmp_path / "page")],
        **{"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "after 2 steps (crop)." in done.stdout
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    train.main([*options, "--output_dir", str(tmp_path / "command")])
    assert capsys.readouterr().out.count("after 2 steps (crop).") == 1
    page, command = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("page", "command"))
    for result in (page, command):
        # What the clock says may differ.
        del result["seconds"]
        result["statistics"] = {n: v for n, v in result["statistics"].items() if not n.startswith("seconds_")}
    assert page == command and page["accuracy_before"] is not None


def test_it_is_a_page():
    assert len((ROOT / "examples" / "train_crop.py").read_text().splitlines()) < 120
