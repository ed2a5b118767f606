"""What the paper's runs cost: the GPU hours that the grids and docs/studies.md tell, from what was measured."""

import itertools
import json
import re
from pathlib import Path
from statistics import fmean

import pytest
import yaml
from paper import BENCHMARKS, LENGTHS

from crop_trl.commands import study
from crop_trl.methods import METHODS
from crop_trl.planning.shape import QWEN3

ROOT = Path(__file__).parents[2]
# In this order: a run that two grids name is counted with the first.
GRIDS = ("table1_a", "table1_b", "ablations_a_selectors", "ablations_a_budgets", "ablations_a_entropy")
STUDENTS, TEACHERS = {"a": "1.7B", "b": "4B"}, {"a": "4B", "b": "8B"}
# Of docs/scaling.md: rollout and update of `zero3` over those of `zero2`, on two GPUs.
ZERO3 = (5.0 / 4.5, 4.2 / 2.2)
# Responses of a step on each of eight GPUs over those of the measured step on one.
SHARE = 144 * 4 / 8 / 64


def size(shape: str) -> int:
    return QWEN3[shape].parameters


@pytest.fixture(scope="module")
def measured() -> dict:
    """Seconds on one H200 for 64 responses of 1,500 tokens, without `compile_layers`: rollout, pass, update."""
    rows = json.loads((ROOT / "benchmarks/baselines/H200.json").read_text())
    sides = rows["crop_over_opd"]["parts"]
    rollouts = [*sides["crop"]["seconds/rollout"], *sides["opd"]["seconds/rollout"]]
    teacher = rows["rescoring"]["ours"] / 3
    return {"rollout": fmean(rollouts), "pass": teacher, "update": rows["sparse_update"]["ours"]}


def test_what_is_measured_is_what_the_settings_do(measured):
    rows = json.loads((ROOT / "benchmarks/baselines/H200.json").read_text())
    assert [rows["rescoring"][name] for name in ("responses", "shape", "longest")] == [64, "4B", 4096]
    assert [rows["sparse_update"][name] for name in ("responses", "shape", "longest")] == [64, "1.7B", 4096]
    for name in ("a", "b"):
        settings = yaml.safe_load((ROOT / f"examples/configs/setting_{name}.yaml").read_text())
        assert "compile_layers" not in settings and settings["gradient_checkpointing"]
        assert (settings["prompts_per_step"], settings["num_generations"], settings["max_steps"]) == (144, 4, 115)
    assert {name: round(value, 1) for name, value in measured.items()} == {"rollout": 17.0, "pass": 2.4, "update": 5.7}


def training_hours(method: str, setting: str, measured: dict) -> float:
    """GPU hours of one run."""
    student, teacher = size(STUDENTS[setting]), size(TEACHERS[setting])
    slower = ZERO3 if setting == "b" else (1, 1)
    needs = METHODS[method].needs
    passes = sum(teacher if need.startswith("teacher/") else student for need in needs) / size("4B")
    own = student / size("1.7B")
    seconds = measured["rollout"] * own * slower[0] + measured["pass"] * passes + measured["update"] * own * slower[1]
    return 115 * seconds * SHARE * 8 / 3600


def evaluation_hours(setting: str, measured: dict) -> float:
    """GPU hours of one student: the paper's lengths, at the speed of the rollout of 64 responses."""
    answers = [problems * samples for problems, samples in BENCHMARKS.values()]
    tokens = fmean(sum(map(float.__mul__, row, map(float, answers))) for row in LENGTHS[setting.upper()])
    return tokens / (64 * 1500 / measured["rollout"] / (size(STUDENTS[setting]) / size("1.7B"))) / 3600


def runs_of(grid: str) -> list[tuple]:
    parameters = yaml.safe_load((ROOT / f"examples/studies/{grid}.yaml").read_text())["parameters"]
    values = [parameters.get(name, {}).get("values", [0.2]) for name in ("method", "retention_ratio")]
    return [(STUDENTS["b" if grid.endswith("_b") else "a"], *run) for run in itertools.product(*values)]


def test_the_disk_that_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    page = " ".join((ROOT / "docs/studies.md").read_text().split())
    told = {grid: rf"\[{grid}\.yaml\][^|]*\|[^|]*\| {{}} \|" for grid in GRIDS}
    told[" ".join(grid for grid in GRIDS if grid != "table1_b")] = "all of setting A together takes {} GB"
    told[" ".join(GRIDS)] = r"all, in one command \| 43 \| {} \|"
    for grids, pattern in told.items():
        files = [f"examples/studies/{grid}.yaml" for grid in grids.split()]
        study.main([*files, "--output", str(tmp_path / "out"), "--dry_run"])
        size = re.search(r"They take (\d+) GB of disk", capsys.readouterr().out)[1]
        assert re.search(pattern.replace("{}", size), page), f"{grids}: {size}"


def test_the_hours_that_are_told(measured):
    page = (ROOT / "docs/studies.md").read_text()
    seen, wrong, total, evaluations = set(), [], 0.0, 0.0
    for grid in GRIDS:
        setting = "b" if grid.endswith("_b") else "a"
        new = [run for run in runs_of(grid) if run not in seen]
        seen.update(new)
        hours = sum(training_hours(method, setting, measured) for _, method, _ in new)
        # Those of Table 1 measure the untrained student too.
        evaluated = (len(new) + grid.startswith("table1")) * evaluation_hours(setting, measured)
        total, evaluations = total + hours, evaluations + evaluated
        text = " ".join((ROOT / f"examples/studies/{grid}.yaml").read_text().replace("\n#", "").split())
        told = f"{hours:.0f} GPU hours to train and {evaluated:.0f} to evaluate"
        row = re.search(rf"\[{grid}\.yaml\].*\| *(\d+) *\| *(\d+) \|", page)
        if told not in text or not row or [*map(int, row.groups())] != [round(hours), round(evaluated)]:
            wrong.append(f"{grid}: {told}")
    assert not wrong, "\n".join(wrong)
    assert len(seen) == 43
    told = f"{total:.0f} GPU hours to train and {evaluations:.0f} to evaluate, {(total + evaluations) / 8:.0f} hours of"
    assert told in " ".join(page.split()), told
    each = {f"{setting} {m}": training_hours(m, setting, measured) for setting in "ab" for m in ("opd", "crop")}
    assert {name: round(hours, 1) for name, hours in each.items()} == {
        "a opd": 7.2,
        "a crop": 8.6,
        "b opd": 21.4,
        "b crop": 24.2,
    }


def test_what_compiled_layers_save_is_told(measured):
    rows = json.loads((ROOT / "benchmarks/baselines/H200.json").read_text())
    compiled = {"pass": rows["rescoring_compiled"]["ours"] / 3, "update": rows["sparse_update_compiled"]["ours"]}
    saved = {}
    for method, passes in (("opd", 1), ("crop", 3)):
        plain, faster = (
            parts["rollout"] + passes * parts["pass"] + parts["update"] for parts in (measured, measured | compiled)
        )
        saved[method] = round(100 * (1 - faster / plain))
    told = f"a step of A is {saved['opd']} % (`opd`) to {saved['crop']} % (`crop`) shorter"
    assert told in " ".join((ROOT / "docs/studies.md").read_text().split()), told
