"""The example in which a student teaches itself, as its page has it, in two steps."""

import json
import runpy
from pathlib import Path

import pytest

from crop_trl.commands import train
from crop_trl.methods import METHODS

ROOT = Path(__file__).parents[2]
EXAMPLE = "examples/self_distillation.py"


@pytest.mark.parametrize(
    "options",
    [
        ["--teacher_source", "student"],
        ["--teacher_source", "average", "--teacher_decay", "0.5"],
        ["--teacher_source", "initial", "--use_peft", "true", "--lora_target_modules", "all-linear"],
        ["--teachers", '{"old": {"source": "initial"}}'],
    ],
    ids=lambda options: options[1][:8],
)
def test_two_steps(tmp_path, monkeypatch, options):
    monkeypatch.chdir(ROOT)
    lines = (ROOT / "examples/tiny_math/data/train.jsonl").read_text().splitlines(True)[:8]
    (tmp_path / "records.jsonl").write_text("".join(lines))
    monkeypatch.setattr("sys.argv", [EXAMPLE, str(tmp_path / "records.jsonl"), str(tmp_path / "hints.jsonl")])
    runpy.run_path(EXAMPLE, run_name="__main__")
    given = ["--use_cpu", "true", "--disable_tqdm", "true", "--max_steps", "2", "--prompts_per_step", "2"]
    given += ["--per_device_train_batch_size", "8", "--reward", "none", "--heatmap", "false"]
    given += ["--selector", f"{EXAMPLE}:self_distillation", "--dataset_name", str(tmp_path / "hints.jsonl")]
    before = dict(METHODS)
    try:
        # The teacher that the file names gives way.
        train.main(
            ["--config", "examples/configs/tiny_math.yaml", *given, "--output_dir", str(tmp_path / "out"), *options]
        )
    finally:
        METHODS.clear()
        METHODS.update(before)
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert result["steps"] == 2 and result["passes"] == 1
    assert "student" in (tmp_path / "out/README.md").read_text()
