"""World G's study: rates are chosen by the protocol, grids follow from them, pictures are drawn."""

import runpy
from pathlib import Path

import pandas as pd

from crop_trl.commands.study import name_run
from crop_trl.studies.rows import write_rows
from crop_trl.studies.study import runs_of

ROOT = Path(__file__).parents[2]


def row(method, rate, after, count=1, seed=0, ratio=0.2, data="validation"):
    name = f"gsm/method={method},{data},num_counterfactuals={count},learning_rate={rate},ratio={ratio},seed={seed}"
    found = {"run": name, "world": "gsm", "method": method, "learning_rate": rate, "num_counterfactuals": count}
    found |= {"seed": seed, "retention_ratio": ratio, "eval_dataset_name": f"worlds/gsm/{data}.jsonl", "settings": "{}"}
    return found | {
        "accuracy_before": 0.33,
        "accuracy_after": after,
        "accuracy_after_low": after - 0.0392,  # a standard error of two points
        "accuracy_after_high": after + 0.0392,
    }


def test_rates_grids_and_pictures(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    accuracies = {
        ("opd", 1): (0.35, 0.44, 0.47),  # three points apart: the best
        ("random", 1): (0.35, 0.44, 0.455),  # within a standard error: the smaller
        ("crop", 1): (0.40, 0.41, 0.405),  # all three are
        ("crop-max", 4): (0.45, 0.43, 0.20),
    }
    rows = [
        row(method, rate, after, count)
        for (method, count), each in accuracies.items()
        for rate, after in zip((3e-6, 1e-5, 3e-5), each, strict=True)
    ]
    rows.append(row("entropy", 1e-5, 0.4))  # one rate is not tried yet
    rows.append(row("crop", 3e-5, 0.9, seed=1, data="test"))  # no say in it
    grids = runpy.run_path("examples/studies/gsm_grids.py")
    chosen = grids["chosen_rates"](pd.DataFrame(rows))
    assert chosen == {("opd", 1): 3e-5, ("random", 1): 1e-5, ("crop", 1): 3e-6, ("crop-max", 4): 3e-6}
    write_rows(tmp_path / "runs.parquet", {each["run"]: each for each in rows})
    monkeypatch.setattr("sys.argv", ["x", str(tmp_path / "runs.parquet"), "--output", str(tmp_path)])
    grids["main"]()
    runs = [planned.run.settings for planned in runs_of(sorted(tmp_path.glob("*.yaml")), name_run).values()]
    # Five seeds of four methods, and three budgets by three seeds of the three that have a budget.
    assert len(runs) == 4 * 5 + 3 * 3 * 3
    assert all(float(run["learning_rate"]) == chosen[run["method"], run.get("num_counterfactuals", 1)] for run in runs)
    assert {run["eval_dataset_name"] for run in runs} == {"worlds/gsm/test.jsonl"}
    rows += [row("random", 1e-5, 0.4 + 0.01 * seed, seed=seed, ratio=0.05, data="test") for seed in (1, 2, 3)]
    write_rows(tmp_path / "runs.parquet", {each["run"]: each for each in rows})
    runpy.run_path("examples/studies/draw_gsm.py", run_name="__main__")
    assert (tmp_path / "gsm_rates.png").stat().st_size > 20_000
    assert (tmp_path / "gsm_budgets.png").stat().st_size > 20_000
