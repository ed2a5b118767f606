"""Rows of the table whose teacher reads more than the student, from the command line, in two steps each."""

import json
import runpy
from pathlib import Path

import pytest

from crop_trl.commands import train

ROOT = Path(__file__).parents[2]
EXAMPLE = "examples/right_and_wrong.py"
OWN = ["--teacher_source", "initial", "--use_peft", "true", "--lora_target_modules", "all-linear"]
WEIGHED = ["--reward", "accuracy", "--reward_weights", "1"]


@pytest.mark.parametrize(
    ("method", "passes", "options"),
    [
        ("opsd", 1, ["--teacher_source", "student"]),
        ("opsd", 1, ["--teacher_source", "average", "--teacher_decay", "0.5"]),
        ("opsd", 1, ["--teachers", '{"old": {"source": "initial"}}']),
        ("pw-opsd", 1, [*OWN, "--distillation_loss", "topk"]),
        ("cal-opd", 4, []),
        ("opsa", 1, ["--teacher_source", "student"]),
        ("rlsd", 2, [*OWN, *WEIGHED]),
        ("rlcsd", 5, [*OWN, *WEIGHED]),
        ("cepo", 5, WEIGHED),
    ],
)
def test_two_steps(tmp_path, monkeypatch, method, passes, options):
    monkeypatch.chdir(ROOT)
    lines = (ROOT / "examples/tiny_math/data/train.jsonl").read_text().splitlines(True)[:8]
    (tmp_path / "records.jsonl").write_text("".join(lines))
    monkeypatch.setattr("sys.argv", [EXAMPLE, str(tmp_path / "records.jsonl"), str(tmp_path / "answers.jsonl")])
    runpy.run_path(EXAMPLE, run_name="__main__")
    given = ["--use_cpu", "true", "--disable_tqdm", "true", "--max_steps", "2", "--prompts_per_step", "2"]
    given += ["--per_device_train_batch_size", "8", "--heatmap", "false", "--max_prompt_length", "400"]
    (tmp_path / "heldout.jsonl").write_text("".join(lines[:2]))
    given += ["--eval_dataset_name", str(tmp_path / "heldout.jsonl")]
    given += ["--method", method, "--dataset_name", str(tmp_path / "answers.jsonl"), *options]
    # Where they are rewarded, responses have to end.
    given += [] if "accuracy" in options else ["--max_completion_length", "40"]
    # The teacher that the file names gives way.
    train.main(["--config", "examples/configs/tiny_math.yaml", *given, "--output_dir", str(tmp_path / "out")])
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert (result["steps"], result["passes"]) == (2, passes)
    assert method in (tmp_path / "out/README.md").read_text()


def test_rewards_without_weight_are_no_advantages(tmp_path, monkeypatch):
    """As the embedded task's configuration has them: watched alone."""
    monkeypatch.chdir(ROOT)
    given = ["--config", "examples/configs/tiny_math.yaml", "--use_cpu", "true", "--output_dir", str(tmp_path)]
    with pytest.raises(SystemExit, match=r"'rlsd' trains by rewards, and none has a weight .*\[0.0\]"):
        train.main([*given, "--method", "rlsd"])
    with pytest.raises(SystemExit, match="Method 'rlcsd' needs the dataset columns prompt, right_prompt, wrong_prompt"):
        train.main([*given, "--method", "rlcsd", "--reward_weights", "1"])
