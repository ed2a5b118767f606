"""Rows of a study and the tables made of them, against numbers worked out by hand or by a library."""

import json
import re

import pytest
from scipy import stats

from crop_trl.files import read_rows
from crop_trl.studies.rows import stored_rows, write_rows
from crop_trl.studies.tables import differences, groups_of, study_markdown

DEFAULTS = {"method": "crop", "seed": 42, "retention_ratio": 0.2, "learning_rate": 1e-6, "num_counterfactuals": 1}


def row(method: str, seed: int, after: float | None, world: str = "w", evaluation: dict | None = None, **settings):
    settings |= {"method": method, "seed": seed}
    measured = {"accuracy_before": 0.4, "accuracy_after": after, "passes": 3, "kept_share": 0.2, "length_after": 50.0}
    measured |= {
        "problems_after": None if after is None else [1.0] * round(20 * after) + [0.0] * round(20 - 20 * after)
    }
    run = f"{world}/{json.dumps(settings)}"
    found = {**DEFAULTS, **settings, **measured, "run": run, "world": world, "settings": json.dumps(settings)}
    if evaluation:
        found |= {"evaluation": json.dumps(evaluation), "average": evaluation["AIME24"]["mean"]}
    return found


def cells(text: str, first: str) -> list[str]:
    """The cells of the first line of a table that begins with a cell."""
    return [cell.strip() for cell in re.search(rf"^\| {first} +\|(.*)\|$", text, re.MULTILINE)[1].split("|")]


RANDOM = {0: 0.50, 1: 0.60, 2: 0.70}
CROP = {0: 0.65, 1: 0.70, 2: 0.75, 3: 0.90}
OPD = {0: 0.50, 1: 0.65, 2: 0.70}


def rows(**more):
    runs = {"random": RANDOM, "crop": CROP, "opd": OPD}
    return [row(method, seed, value, **more) for method, values in runs.items() for seed, value in values.items()]


def test_means_and_differences_by_seed():
    groups = groups_of(rows(), DEFAULTS)
    assert [group.method for group in groups] == ["crop", "opd", "random"] and groups[0].settings == {}
    found = {d.group.method: d for d in differences(groups, "random")}
    assert set(found) == {"crop", "opd"} and found["crop"].seeds == 3
    ours, theirs = [CROP[seed] for seed in range(3)], list(RANDOM.values())
    test = stats.ttest_rel(ours, theirs)
    assert found["crop"].mean == pytest.approx(0.10) and found["crop"].p == pytest.approx(test.pvalue)
    assert found["crop"].interval == pytest.approx(tuple(test.confidence_interval(0.95)))
    # The smaller of two p is doubled, the larger stays, unless that would change their order.
    small, large = sorted(found.values(), key=lambda d: d.p)
    assert small.corrected == pytest.approx(2 * small.p) and large.corrected == max(large.p, small.corrected)
    assert found["crop"].over_problems[0] < 0.1 < found["crop"].over_problems[1]
    text = study_markdown(rows(), DEFAULTS, "random")
    low, high = stats.t.interval(0.95, 3, 0.75, stats.sem(list(CROP.values())))
    assert cells(text, "crop")[:3] == ["4", "40.0", f"75.0 ({100 * low:.1f} to {100 * high:.1f})"]
    assert "| crop   |     3 |" in text and "corrected by Holm's method for 2 comparisons" in text
    alone = study_markdown([row("crop", 0, 0.5), row("base", 0, None)], DEFAULTS, "random")
    assert cells(alone, "crop")[:3] == ["1", "40.0", "50.0"] and cells(alone, "base")[2] == "-"
    assert "No method has a seed in common" in alone


def test_each_is_compared_with_the_runs_whose_settings_agree_best():
    def pairs(*found):
        groups = groups_of(found, DEFAULTS)
        return {
            (d.group.method, d.group.settings.get("retention_ratio")): d.mean for d in differences(groups, "random")
        }

    ratios = [row(m, 0, a, retention_ratio=r) for m, a, r in (("crop", 0.5, 0.1), ("crop", 0.6, 0.2))]
    rivals = [row("random", 0, 0.4, retention_ratio=0.1), row("random", 0, 0.3, retention_ratio=0.2)]
    # Of two budgets neither is that of a method that keeps every token.
    assert pairs(*ratios, *rivals, row("opd", 0, 0.9)) == pytest.approx({("crop", 0.1): 0.1, ("crop", 0.2): 0.3})
    assert pairs(row("opd", 0, 0.9), *ratios, rivals[0])[("opd", None)] == pytest.approx(0.5)
    # Each method at a rate of its own.
    rates = [row("crop", 0, 0.5, learning_rate=1e-5), row("random", 0, 0.4, learning_rate=1e-6)]
    assert pairs(*rates) == pytest.approx({("crop", None): 0.1})
    # What a method does not read differs, the rate agrees.
    rates = [row("random", 0, after, learning_rate=rate) for after, rate in ((0.4, 1e-5), (0.3, 1e-6))]
    assert pairs(row("crop", 0, 0.5, learning_rate=1e-6, num_counterfactuals=4), *rates)["crop", None] == pytest.approx(
        0.2
    )
    assert pairs(row("crop", 0, 0.5, learning_rate=3e-6), *rates) == {}
    # Never at another budget.
    assert pairs(row("crop", 0, 0.5, retention_ratio=0.1), row("random", 0, 0.4, retention_ratio=0.2)) == {}


def test_the_papers_tables_where_their_runs_are():
    def benchmarks(mean):
        return {"AIME24": {"mean": mean, "pass": 2 * mean, "samples": 8, "problems": 30}}

    accuracies = {"crop": {0.1: 0.3, 0.2: 0.35}, "crop-student": {0.1: 0.25, 0.2: 0.26}, "tip": {0.2: 0.2}}
    found = [
        row(method, seed, 0.5, world="a", retention_ratio=ratio, evaluation=benchmarks(value))
        for method, ratios in accuracies.items()
        for ratio, value in ratios.items()
        for seed in (0, 1)
    ]
    found += [row("opd", 0, 0.5, world="a", evaluation=benchmarks(0.28))]
    text = study_markdown([*found, row("crop", 0, 0.5, world="b", evaluation=benchmarks(0.4))], DEFAULTS)
    assert "### a: crop and crop-student over the budget (%)" in text and "crop over tip" in text
    main = text.partition("## Benchmarks (%)")[2]
    assert "| a | crop, retention_ratio 0.2 | **35.00** (35.0 to 35.0) |" in main and "| b | crop | **40.00** |" in main
    assert "+7.00 over the strongest other method, opd" in main
    assert "over the budget" not in study_markdown(rows(), DEFAULTS)
    # Budgets at several rates are no curve.
    mixed = [*found, row("crop", 0, 0.5, world="a", learning_rate=1e-5, evaluation=benchmarks(0.4))]
    assert "over the budget" not in study_markdown(mixed, DEFAULTS)


def test_rows_come_back_whatever_they_hold(tmp_path):
    found = {r["run"]: r for r in rows()}
    first, second = list(found)[:2]
    found[first] |= {"odd": 1, "dict": {"a": 1}, "list": [0.0]}
    found[second] |= {"odd": "one", "list": [1.0, 2.0]}
    write_rows(tmp_path / "runs.parquet", found)
    again = stored_rows([tmp_path / "runs.parquet"])
    assert list(again) == list(found) and again[first]["odd"] == "1" and again[second]["odd"] == "one"
    assert again[first]["dict"] == '{"a": 1}' and again[second]["list"] == [1.0, 2.0]
    assert all(again[key][name] == found[key][name] for key in found for name in DEFAULTS)
    assert list(read_rows(tmp_path / "runs.parquet")[0])[:3] == ["run", "world", "method"]
    write_rows(tmp_path / "none.parquet", {})
    assert stored_rows([tmp_path / "none.parquet"]) == {}
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="is no table of a study: it lacks the columns `run` and `settings`."):
        stored_rows([tmp_path / "other.csv"])
