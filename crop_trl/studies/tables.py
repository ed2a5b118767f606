"""Markdown tables of a study's rows: means over seeds, and differences to one method, seed by seed."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..analysis.budget_curves import StudentAccuracy
from ..analysis.budget_tables import budget_markdown
from ..evaluation.metrics import compare, runs_interval
from ..evaluation.tables import main_table
from ..methods import METHODS
from ..text import markdown_table
from .rows import Row

# A method's own names come first in a table; the seed is what means are taken over.
_OWN = ("method", "selector", "seed")


@dataclass
class Group:
    """Runs that differ in their seed alone; `settings` are those in which a world's runs differ."""

    method: str
    settings: dict[str, Any]
    rows: list[Row]

    @property
    def label(self) -> str:
        """Its name where all settings stand in one cell."""
        settings = {name: value for name, value in self.settings.items() if value is not None}
        return ", ".join([self.method, *(f"{name} {_setting(value)}" for name, value in settings.items())])

    @property
    def after(self) -> dict[int, float]:
        """Accuracy after training by seed."""
        return {row["seed"]: row["accuracy_after"] for row in self.rows if row["accuracy_after"] is not None}

    def mean(self, name: str) -> float | None:
        """Of a column, over the runs that have it."""
        values = [row[name] for row in self.rows if row.get(name) is not None]
        return statistics.fmean(values) if values else None


@dataclass(frozen=True)
class Difference:
    """A group minus another on the seeds that both have."""

    group: Group
    seeds: int
    mean: float
    interval: tuple[float, float] | None  # 95 %, Student's t; None with one seed
    p: float | None  # paired t-test
    over_problems: tuple[float, float] | None  # 95 %, of the mean over these seeds, problems being what varies
    corrected: float | None  # by Holm's method over all differences of a table


def _keeps_all(method: str) -> bool:
    return method in METHODS and METHODS[method].score is None


def groups_of(rows: Sequence[Row], defaults: Mapping[str, Any]) -> list[Group]:
    """Rows of one world by settings, the best method first."""
    settings = [{**defaults, **json.loads(row["settings"])} for row in rows]
    names = sorted({name for each in settings for name in each} - set(_OWN))
    varied = [n for n in names if len({json.dumps(each.get(n), sort_keys=True) for each in settings}) > 1]
    found: dict[str, Group] = {}
    for row, own in zip(rows, settings):
        # To a method that keeps every token the ratio means nothing, to the untrained student nothing does.
        ignored = varied if row["method"] == "base" else ["retention_ratio"] * _keeps_all(row["method"])
        shown = {name: None if name in ignored else own.get(name) for name in varied}
        key = json.dumps([row["method"], shown], sort_keys=True)
        found.setdefault(key, Group(row["method"], shown, [])).rows.append(row)
    return sorted(
        found.values(), key=lambda group: -(group.mean("accuracy_after") or group.mean("accuracy_before") or 0)
    )


def reference_for(group: Group, groups: Iterable[Group], against: str) -> Group | None:
    """The one group of a method at the same budget whose other settings agree best with those of another."""

    def same_budget(other: Group) -> bool:
        ratios = [each.settings.get("retention_ratio") for each in (group, other)]
        return None in ratios or ratios[0] == ratios[1]

    def agreement(other: Group) -> int:
        return sum(value == other.settings[name] for name, value in group.settings.items())

    candidates = [other for other in groups if other.method == against and other is not group and same_budget(other)]
    best = max(map(agreement, candidates), default=None)
    nearest = [other for other in candidates if agreement(other) == best]
    return nearest[0] if len(nearest) == 1 else None


def differences(groups: Sequence[Group], against: str) -> list[Difference]:
    """What each group is ahead of its reference. Raises `ImportError` without statsmodels."""
    from scipy import stats

    try:
        from statsmodels.stats.multitest import multipletests
    except ImportError:
        raise ImportError("`--against` needs the package statsmodels; install crop-trl[studies].") from None
    found = []
    for group in groups:
        reference = reference_for(group, groups, against)
        seeds = sorted(set(group.after) & set(reference.after)) if reference and group.method != against else []
        if seeds:
            pairs = [(group.after[seed], reference.after[seed]) for seed in seeds]
            each = [ours - theirs for ours, theirs in pairs]
            p = None
            if len(set(each)) > 1:
                p = float(stats.ttest_rel(*zip(*pairs)).pvalue)
            difference = statistics.fmean(each), runs_interval(each)
            found.append((group, len(seeds), *difference, p, _over_problems(group, reference, seeds)))
    tested = [entry[4] for entry in found if entry[4] is not None]
    corrected = iter(multipletests(tested, method="holm")[1].tolist() if tested else ())
    return [Difference(*entry, None if entry[4] is None else next(corrected)) for entry in found]


def _over_problems(group: Group, reference: Group, seeds: Iterable[int]) -> tuple[float, float] | None:
    """Interval of a difference on the same problems, whose answers under all seeds are taken for samples of one."""
    sides = [[row.get("problems_after") for row in side.rows if row["seed"] in seeds] for side in (group, reference)]
    if any(shares is None for side in sides for shares in side) or len({len(s) for side in sides for s in side}) != 1:
        return None
    ours, theirs = ({"": {str(i): shares for i, shares in enumerate(zip(*side))}} for side in sides)
    compared = compare(ours, theirs)
    return compared.low, compared.high


def _points(value: float | None, interval: tuple[float, float] | None = None, sign: str = "") -> str:
    if value is None:
        return "-"
    between = _between(interval, sign)
    return f"{100 * value:{sign}.1f}" + (f" ({between})" if between else "")


def _between(interval: tuple[float, float] | None, sign: str = "") -> str:
    return f"{100 * interval[0]:{sign}.1f} to {100 * interval[1]:{sign}.1f}" if interval else ""


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _setting(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def study_markdown(
    rows: Iterable[Row], defaults: Mapping[str, Any], against: str | None = None, average: str = "clean"
) -> str:
    """A table for each world, with `against` the differences to that method, and the paper's that can be made."""
    worlds: dict[str, list[Row]] = {}
    for row in rows:
        worlds.setdefault(row["world"], []).append(row)
    parts, evaluated = [], []
    for world, own in worlds.items():
        groups = groups_of(own, defaults)
        parts += [f"## {world}", "", _means(groups)]
        if against is not None:
            parts += [f"### {world}: differences to {against}", "", _differences(groups, against)]
        parts += _budgets(world, groups)
        evaluated += [_results(world, group, row) for group in groups for row in group.rows if row.get("evaluation")]
    if evaluated:
        parts += ["## Benchmarks (%)", "", main_table(evaluated, average)]
    return "\n".join(parts)


def _results(world: str, group: Group, row: Row) -> dict[str, Any]:
    """What the paper's main table reads of an evaluation."""
    training = {"method": row["method"]}
    return {"label": group.label, "setting": world, "benchmarks": json.loads(row["evaluation"]), "training": training}


def _budgets(world: str, groups: Sequence[Group]) -> list[str]:
    """The tables over the budget where nothing else varies and CROP was run at several."""
    ratios = {group.settings.get("retention_ratio") for group in groups if group.method == "crop"}
    if len(ratios) < 2 or set(groups[0].settings) != {"retention_ratio"}:
        return []
    # Benchmarks where all were evaluated, else the held-out problems of training.
    rows = [(group, row) for group in groups for row in group.rows]
    name = "average" if all(row.get("average") is not None for _, row in rows) else "accuracy_after"
    runs = [
        StudentAccuracy(group.method, group.settings["retention_ratio"], row[name], row["seed"])
        for group, row in rows
        if row[name] is not None
    ]
    return [budget_markdown(runs).replace("## ", f"### {world}: ")]


def _means(groups: Sequence[Group]) -> str:
    names = list(groups[0].settings)
    header = ["Method", *names, "Seeds", "Before (%)", "After (%)", "Length before", "after", "Kept (%)", "Gap on kept"]
    header += ["Passes", "Seconds a step"]
    lines = []
    for group in groups:
        after = list(group.after.values())
        seconds = [group.mean(f"seconds_{phase}") for phase in ("rollout", "scoring", "update")]
        gaps = [_number(group.mean(f"gap_kept_{when}"), 2) for when in ("first", "last")]
        lines.append(
            [
                *(group.method, *(_setting(value) for value in group.settings.values()), len(group.rows)),
                _points(group.mean("accuracy_before")),
                _points(statistics.fmean(after) if after else None, runs_interval(after)),
                *(_number(group.mean(f"length_{when}"), 0) for when in ("before", "after")),
                *(_points(group.mean("kept_share")), " to ".join(gaps)),
                *(_number(group.mean("passes"), 0), _number(sum(s or 0 for s in seconds) or None, 1)),
            ]
        )
    return markdown_table(header, lines, right=True, padded=True) + (
        "\nMeans over seeds, in brackets the 95 % interval of the mean by Student's t. Accuracy is that on the "
        "held-out problems of training. Lengths are in tokens. The gap is that between student and teacher on kept "
        "tokens, in nats, in the first logged steps and the last. A pass is one reading of a response for its scores.\n"
    )


def _differences(groups: Sequence[Group], against: str) -> str:
    found = differences(groups, against)
    if not found:
        return f"No method has a seed in common with one group of `{against}`.\n"
    lines = []
    for d in found:
        settings = (_setting(value) for value in d.group.settings.values())
        ps = ("-" if p is None else f"{p:.3g}" for p in (d.p, d.corrected))
        problems = _between(d.over_problems, "+") or "-"
        lines.append([d.group.method, *settings, d.seeds, _points(d.mean, d.interval, "+"), *ps, problems])
    header = ["Method", *groups[0].settings, "Seeds", "Difference (points)", "p", "p, Holm", "Over problems"]
    return markdown_table(header, lines, right=True, padded=True) + (
        "\nPaired by seed: 95 % intervals, and p of the paired t-test as it is and corrected by Holm's method for "
        f"{len(found)} comparisons. Over problems: the 95 % interval that these seeds would have with other problems. "
        f"Each is compared with the runs of `{against}` at its budget whose other settings agree best, and "
        "with none where that is open.\n"
    )
