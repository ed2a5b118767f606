"""From a built wheel, with the checkout out of sight and in an empty folder, every command does its work."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from triplets.conftest import servers

ROOT = Path(__file__).parents[2]
TASK = ROOT / "examples" / "tiny_math"
# A process for itself would spend most of its time on imports.
IN_ONE_PROCESS = """
import json, sys
import crop_trl
from crop_trl.commands.__main__ import main
print(crop_trl.__file__)
for words in json.load(sys.stdin):
    print("==", words[0], flush=True)
    print("status", main(words), flush=True)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    source, wheels = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    shutil.copytree(ROOT / "crop_trl", source / "crop_trl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "-w", str(wheels), str(source)], check=True, capture_output=True)
    (built,) = wheels.glob("*.whl")
    return built


@pytest.fixture
def somewhere(tmp_path) -> Path:
    """An empty folder but for copies of the embedded models and some problems."""
    folder = tmp_path / "somewhere"
    shutil.copytree(TASK / "models", folder / "models")
    for name, count in (("train", 64), ("heldout", 4)):
        lines = (TASK / "data" / f"{name}.jsonl").read_text().splitlines()[:count]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    problems = [{"id": "a", "problem": "[plan:good] 1 and 2", "answer": "3"}]
    (folder / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    shutil.copy(ROOT / "examples" / "custom_selector.py", folder / "mine.py")
    settings = (ROOT / "examples" / "configs" / "tiny_math.yaml").read_text()
    settings = settings.replace("examples/tiny_math/data/", "").replace("examples/tiny_math/", "")
    settings = settings.replace("max_completion_length: 152", "max_completion_length: 40")
    (folder / "run.yaml").write_text(settings)
    command = '[crop-trl, train, --accelerate_config, cpu, --config, run.yaml, "${args}"]'
    (folder / "grid.yaml").write_text(f"method: grid\ncommand: {command}\nparameters: {{method: {{values: [base]}}}}\n")
    return folder


def every_command_works(python: str, program: str, folder: Path, installed: Path, environment: dict) -> None:
    def run(command: list[str], text: str = "") -> str:
        done = subprocess.run(command, cwd=folder, env=environment, input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout

    assert "analyze" in run([program, "--help"])
    small = ["--config", "run.yaml", "--prompts_per_step", "4", "--per_device_train_batch_size", "8"]
    options = ["--max_steps", "2", "--save_strategy", "steps", "--save_steps", "2", "--output_dir", "run"]
    said = run([program, "train", "--accelerate_config", "cpu", *small, *options, "--selector", "mine.py:surprise"])
    assert "after 2 steps (mine.py:surprise)." in said
    own = ["--selector", "mine.py:surprise"]
    with servers() as start:
        environment["OPENAI_BASE_URL"] = start()
        commands = [
            ["triplets", "--input", "problems.jsonl", "--output", "made"],
            ["plan", "--student", "1.7B", "--teacher", "4B", "--accelerate_config", "zero2_8gpu"],
            ["study", "grid.yaml", "--output", "studied"],
            ["audit", "--train", "train.jsonl", "--benchmark", "own=problems.jsonl", "--output", "audited"],
            ["replay", *small, "--use_cpu", "true", "--bank", "bank.safetensors", "--bank_prompts", "2", *own],
            ["analyze", "bank.safetensors", *own, "--methods", "crop"],
            ["view", "bank.safetensors", *own, "-o", "page.html"],
            ["evaluate", "--model", "run", "--training_run", "run", "--sampler", "hf", "--samples", "1"]
            + ["--max_tokens", "32", "--benchmark", "held=heldout.jsonl", "--output", "evaluated"],
        ]
        said = run([python, "-c", IN_ONE_PROCESS], json.dumps(commands))
    assert "| mine.py:surprise | " in said  # of the replay's table
    # It was the installed package, and none is imported from a checkout.
    assert Path(said.splitlines()[0]).is_relative_to(installed)
    assert [line for line in said.splitlines() if line.startswith("==")] == [f"== {name}" for name, *_ in commands]

    result = json.loads((folder / "run" / "result.json").read_text())
    assert result["steps"] == 2 and result["accuracy_after"] is not None and len(result["selector_sha256"]) == 64
    for made in (
        *("run/heatmap.png", "run/model.safetensors", "run/prompt_template.json", "audited/candidates.html"),
        *("analysis/categories.png", "made/triplets.jsonl", "made/report.md", "evaluated/results.md"),
        *("studied/runs.parquet", "studied/tiny/method=base,seed=0/result.json", "page.html"),
    ):
        assert (folder / made).stat().st_size > 0, made
    for card in ("run/README.md", "run/checkpoint-2/README.md"):
        assert result["selector_sha256"] in (folder / card).read_text()
    assert "mine.py:surprise" in json.loads((folder / "analysis" / "categories.json").read_text())["methods"]


def surroundings(**changes: str) -> dict:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "PYTHON"))}
    return {**kept, "OPENAI_API_KEY": "key", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **changes}


@pytest.mark.multiprocess
def test_from_a_wheel_every_command_does_its_work(wheel, somewhere, tmp_path):
    target = tmp_path / "target"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    environment = surroundings(PYTHONPATH=str(target))
    every_command_works(sys.executable, str(target / "bin" / "crop-trl"), somewhere, target, environment)


@pytest.mark.slow
def test_in_a_fresh_environment_every_command_does_its_work(wheel, somewhere, tmp_path):
    """Installs everything the package asks for, so it needs a package index and some gigabytes."""
    venv.create(tmp_path / "fresh", with_pip=True)
    python = tmp_path / "fresh" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", f"crop-trl[viz,openai,eval] @ {wheel.as_uri()}"], check=True)
    every_command_works(str(python), str(python.with_name("crop-trl")), somewhere, tmp_path / "fresh", surroundings())
