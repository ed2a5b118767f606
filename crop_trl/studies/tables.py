"""Markdown tables of a study's rows: means over seeds, differences to one method seed by seed, and the paper's."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ..analysis.budget_curves import StudentAccuracy
from ..analysis.budget_tables import budget_markdown
from ..evaluation.metrics import compare, runs_interval
from ..evaluation.run import averaged
from ..evaluation.tables import between, bold_maxima, has_budget, main_table, shared_benchmarks
from ..methods import METHODS
from ..text import markdown_table
from .naming import OF_STUDENT, is_of_untrained, is_unknown, short
from .rows import Row

# A method's own name comes first in a table; the seed is what means are taken over.
_OWN = ("method", "seed")
# What another setting says already, unless two files have one name.
_TOLD_BY = {"selector": "method", "selector_sha256": "selector"}
_TOLD_BY |= {"dataset_sha256": "dataset_name", "eval_dataset_sha256": "eval_dataset_name"}
# The paper's ablation of selectors, in its order.
_ABLATION = ("cf-opd", "pc-opd", "random", "crop-bottom", "crop-student", "crop")
HELD_OUT = "the held-out problems of training"


@dataclass
class Group:
    """Runs that differ in their seed alone; `settings` are those in which a world's runs differ, `bound` those of them
    in which what it is compared with has to agree."""

    method: str
    settings: dict[str, Any]
    bound: set[str] = field(default_factory=set)
    rows: dict[int, Row] = field(default_factory=dict)  # by seed
    results: dict[int, dict[str, Any]] = field(default_factory=dict)  # by seed, on each benchmark that is compared

    @property
    def label(self) -> str:
        """Its name where all settings stand in one cell."""
        settings = {name: value for name, value in self.settings.items() if value is not None}
        return ", ".join([self.method, *(f"{name} {_setting(value)}" for name, value in settings.items())])

    @property
    def accuracy(self) -> dict[int, float]:
        """What is compared, by seed: the mean over benchmarks."""
        return {seed: fmean(each["mean"] for each in found.values()) for seed, found in self.results.items()}

    def accuracy_beside(self, seed: int) -> float | None:
        """Beside another group's run: the untrained student is the same whatever the seed."""
        found = self.accuracy
        return found.get(seed, next(iter(found.values()), None) if self.method == "base" else None)

    def column(self, name: str) -> list[float]:
        """Of the runs that have it."""
        return [row[name] for row in self.rows.values() if row.get(name) is not None]

    def shares(self, seeds: Iterable[int]) -> dict[str, dict[Any, list[float]]]:
        """Right answers by benchmark and problem, those of all seeds as samples of one student; none where not said."""
        found = {}
        results = [self.results[seed] for seed in seeds if seed in self.results] or list(self.results.values())
        for name in results[0]:
            each = [result[name].get("shares") or {} for result in results]
            found[name] = {id: [e[id] for e in each] for id in each[0] if all(id in e for e in each)}
        return found


def results_of(row: Row) -> dict[str, dict[str, Any]]:
    """What a run's student came to on benchmarks, of which the held-out problems of training are one."""
    found = json.loads(row.get("evaluation") or "{}")
    mean = row.get("accuracy_before" if row["method"] == "base" else "accuracy_after")
    if mean is not None:
        # Of other held-out problems than another run's, if their names say so.
        data = str(sorted(s for s in json.loads(row["settings"]).items() if s[0].startswith("eval_dataset_")))
        found[HELD_OUT] = {
            "mean": mean,
            "shares": {(data, i): s for i, s in enumerate(row.get("problems_after") or ())},
        }
    return found


def compared_in(rows: Iterable[Row], average: str = "clean") -> list[str]:
    """The benchmarks of Avg. where all trained runs of a world were evaluated or nothing else was measured, else
    held-out."""
    found = [(row["method"], results_of(row)) for row in rows]
    held_out = [each.pop(HELD_OUT, None) for _, each in found]
    evaluated = [{"benchmarks": each} for _, each in found if each]
    if not evaluated or any(held_out) and any(method != "base" and not each for method, each in found):
        return [HELD_OUT]
    return averaged(shared_benchmarks(evaluated), average) or [HELD_OUT]


def groups_of(rows: Sequence[Row], defaults: Mapping[str, Any], compared: Sequence[str] = (HELD_OUT,)) -> list[Group]:
    """Rows of one world by settings, the best first. What keeps every token has one run a seed, whatever its ratio."""
    settings = [{**defaults, **json.loads(row["settings"])} for row in rows]
    names = sorted({name for each in settings for name in each} - set(_OWN))
    varied = []
    for name in names:
        counted = [own | {"method": row["method"]} for row, own in zip(rows, settings) if _means_something(name, row)]
        counted = [own for own in counted if not is_unknown(name, own.get(name))]
        told = [own.get(_TOLD_BY.get(name)) for own in counted]
        values = (json.dumps(own.get(name), sort_keys=True) for own in counted)
        varied += [name] * (len(set(zip(told, values))) > len(set(told)))
    bound = {name for name in varied if is_of_untrained(name, list(compared) == [HELD_OUT])}
    found: dict[str, Group] = {}
    for row, own in zip(rows, settings):
        # To a method that keeps every token the ratio means nothing.
        ignored = ["retention_ratio"] * (not has_budget(row["method"]))
        shown = {n: short(n, own.get(n)) if _means_something(n, row) and n not in ignored else None for n in varied}
        new = Group(row["method"], shown, bound if row["method"] == "base" else set())
        group = found.setdefault(json.dumps([row["method"], shown], sort_keys=True), new)
        if row["seed"] not in group.results:
            group.rows[row["seed"]], results = row, results_of(row)
            if results.keys() >= set(compared):
                group.results[row["seed"]] = {name: results[name] for name in compared}
    return sorted(found.values(), key=lambda group: -fmean(group.accuracy.values()) if group.results else 1)


def _means_something(name: str, row: Row) -> bool:
    """Whether a setting changes what a row has: to the untrained student most do not."""
    return row["method"] != "base" or is_of_untrained(name, row.get("accuracy_before") is not None)


def nearest(group: Group, others: Iterable[Group]) -> list[Group]:
    """Of some groups those at the same budget whose other settings agree best with those of another; of the untrained
    student those that are this one's."""

    def agreement(other: Group) -> int:
        return sum(value == other.settings[name] for name, value in group.settings.items())

    ratio = group.settings.get("retention_ratio")
    candidates = [o for o in others if ratio is None or o.settings["retention_ratio"] in (ratio, None)]
    candidates = [o for o in candidates if all(o.settings[n] == group.settings[n] for n in group.bound | o.bound)]
    best = max(map(agreement, candidates), default=None)
    return [other for other in candidates if agreement(other) == best]


def study_markdown(
    rows: Iterable[Row], defaults: Mapping[str, Any], against: str | None = None, average: str = "clean"
) -> str:
    """A table for each world, with `against` the differences to that method, and the paper's that can be made."""
    worlds: dict[str, list[Row]] = {}
    for row in rows:
        worlds.setdefault(row["world"], []).append(row)
    order = {method: place for place, method in enumerate(["base", *METHODS])}  # the paper's
    parts = []
    evaluated: dict[str, list[dict[str, Any]]] = {}  # by what a world's runs share
    unknown = 0
    for world, own in sorted(worlds.items()):
        own, left, more = _alike(own, defaults)
        unknown += more
        compared = compared_in(own, average)
        measure = f"Accuracy is {'that on' if compared == [HELD_OUT] else 'Avg. of'} {', '.join(compared)}.\n"
        groups = groups_of(own, defaults, compared)
        parts += [f"## {world}", "", _means(groups, compared != [HELD_OUT]), *left]
        if against is not None:
            parts += [f"### {world}: differences to {against}", "", _differences(groups, against), measure]
        if budgets := _budgets(groups):
            parts += [budgets.replace("## ", f"### {world}: "), measure]
        parts += _ablations(world, groups, compared)
        groups.sort(key=lambda group: (order.get(group.method, len(order)), group.label))
        results = []
        for group in groups:
            each = [(json.loads(row.get("evaluation") or "{}"), row) for row in group.rows.values()]
            measured = [{"setting": world, "benchmarks": found, "training": row} for found, row in each if found]
            fewer = f" ({len(measured)} of {len(each)})" * (len(measured) < len(each))
            results += [{**one, "label": group.label + fewer} for one in measured]
        if results:
            shared = {name: _conditions(results[0]["benchmarks"][name]) for name in shared_benchmarks(results)}
            # The paper's two settings differ in how students are asked.
            alike = {n: {k: v for k, v in each.items() if k not in OF_STUDENT} for n, each in shared.items()}
            evaluated.setdefault(json.dumps(alike, sort_keys=True), []).extend(results)
    for results in evaluated.values():
        names = ", ".join(dict.fromkeys(each["setting"] for each in results))
        parts += [f"## Benchmarks (%): {names}", "", main_table(results, average)]
    if unknown:
        parts.append(f"How {unknown} runs were evaluated is not known; they are taken to be like the others.\n")
    return "\n".join(parts)


def _conditions(part: Mapping[str, Any]) -> dict[str, Any]:
    """What two results of a benchmark have to agree in, as far as it is known; tables tell the student."""
    drawn = {name: value for name, value in (part.get("drawn") or {}).items() if name != "model_revision"}
    return {"number of problems": part["problems"], "samples": part["samples"], **drawn}


def _alike(rows: Sequence[Row], defaults: Mapping[str, Any]) -> tuple[list[Row], list[str], int]:
    """Rows of one world without the benchmarks on which they were evaluated differently, a line for each of these, and
    of how many rows it is not known."""
    settings = [{**defaults, **json.loads(row["settings"])} for row in rows]
    # In a study of prompts evaluations differ as the runs do, which the table tells.
    varied = {name for name in OF_STUDENT if len({json.dumps(each.get(name)) for each in settings}) > 1}
    found = {row["run"]: json.loads(row.get("evaluation") or "{}") for row in rows}
    lines = []
    for name in dict.fromkeys(name for each in found.values() for name in each):
        conditions = [(run, _conditions(each[name])) for run, each in found.items() if name in each]
        for setting in dict.fromkeys(setting for _, each in conditions for setting in each if setting not in varied):
            values = {}
            for run, each in conditions:
                if setting in each:
                    values.setdefault(json.dumps(each[setting], sort_keys=True), run)
            if len(values) > 1:
                (one, first), (other, second) = list(values.items())[:2]
                lines.append(
                    f"Left out: {name}. {first} was evaluated with `{setting}` {one}, {second} with {other}; evaluate "
                    "them alike.\n"
                )
                for each in found.values():
                    each.pop(name, None)
                break
    unknown = sum(not all(part.get("drawn") for part in each.values()) for each in found.values())
    return [{**row, "evaluation": json.dumps(found[row["run"]])} for row in rows], lines, unknown


def _means(groups: Sequence[Group], evaluated: bool) -> str:
    evaluation = "; Avg. is that of benchmarks, sampled as `crop-trl evaluate` does" * evaluated
    header = ["Method", *groups[0].settings, "Seeds", *["Avg. (%)"] * evaluated, "Before (%)", "After (%)"]
    header += ["Length before", "after", "Kept (%)", "Gap on kept", "Passes", "Seconds a step"]
    lines = []
    for group in groups:
        measured, runs = len(group.results), len(group.rows)
        seeds = runs if measured == runs else f"{measured} of {runs}"
        before, after, kept = (group.column(name) for name in ("accuracy_before", "accuracy_after", "kept_share"))
        phases = (group.column(f"seconds_{phase}") for phase in ("rollout", "scoring", "update"))
        seconds = [fmean(phase) for phase in phases if phase]
        gaps = (_number(group.column(f"gap_kept_{when}"), 2) for when in ("first", "last"))
        lines.append(
            [
                *(group.method, *map(_setting, group.settings.values()), seeds),
                *[_points(list(group.accuracy.values()), (0, 1))] * evaluated,
                *(_points(before), _points(after, (0, 1))),
                *(_number(group.column(f"length_{when}"), 0) for when in ("before", "after")),
                *(_points(kept), " to ".join(dict.fromkeys(gaps))),
                *(_number(group.column("passes"), 0), _number([sum(seconds)] if seconds else [], 1)),
            ]
        )
    return markdown_table(header, lines, right=True, padded=True) + (
        "\nMeans over seeds, in brackets the 95 % interval of the mean by Student's t. Before and after training is "
        f"accuracy on its held-out problems, sampled as in training{evaluation}. Lengths are in tokens. The gap is "
        "that between student and teacher on kept tokens, in nats, in the first logged steps and the last. A pass is "
        "one reading of a response for its scores.\n"
    )


def _ahead(group: Group, other: Group) -> dict[int, float]:
    """The difference of two groups on each seed that both have; equal ones are equal."""
    beside = {seed: (own, other.accuracy_beside(seed)) for seed, own in group.accuracy.items()}
    return {seed: round(own - its, 12) for seed, (own, its) in beside.items() if its is not None}


def check_against(against: str, methods: Iterable[str]) -> None:
    """Raise `ImportError` or `ValueError` where differences to a method cannot be made."""
    _corrected([1.0])
    if against not in methods:
        known = ", ".join(sorted(methods))
        raise ValueError(f"`--against` {against!r} is the method of none of these runs; choose among {known}.")


def _corrected(p_values: Sequence[float]) -> Sequence[float]:
    """By Holm's method. Raises `ImportError` without statsmodels."""
    try:
        from statsmodels.stats.multitest import multipletests
    except ImportError:
        raise ImportError("`--against` needs the package statsmodels; install crop-trl[studies].") from None
    return multipletests(p_values, method="holm")[1] if p_values else ()


def _differences(groups: Sequence[Group], against: str) -> str:
    """What each group is ahead of its reference, and why others have none."""
    from scipy import stats

    references = [group for group in groups if group.method == against and group.results]
    if not references:
        measured = dict.fromkeys(group.method for group in groups if group.results)
        return f"No run of `{against}` was measured; measured were {', '.join(measured) or 'none'}.\n"
    lines, tests, left = [], [], []
    for group in (group for group in groups if group.method != against):
        near = nearest(group, references)
        ahead = _ahead(group, near[0]) if len(near) == 1 else {}
        if not ahead:
            of = "of its student and data" if "base" in (group.method, against) else "at its budget"
            why = "not measured" if not group.results else f"no `{against}` {of}" if not near else ""
            why = why or ("no seed in common" if len(near) == 1 else f"{len(near)} groups of `{against}` fit")
            left.append(f"{group.label} ({why})")
            continue
        each, ours, theirs = list(ahead.values()), group.shares(ahead), near[0].shares(ahead)
        alike = all(ours[name] and ours[name].keys() == theirs[name].keys() for name in ours)
        over = compare(ours, theirs) if alike else None
        settings = map(_setting, group.settings.values())
        lines.append([group.method, *settings, len(each), _points(each, (-1, 1), "+"), "-", "-"])
        lines[-1].append(between((over.low, over.high), "+") if over else "-")
        if len(set(each)) > 1:
            tests.append((lines[-1], float(stats.ttest_1samp(each, 0).pvalue)))
    for (line, p), holm in zip(tests, _corrected([p for _, p in tests])):
        line[-3:-1] = f"{p:.3g}", f"{holm:.3g}"
    header = ["Method", *groups[0].settings, "Seeds", "Difference (points)", "p", "p, Holm", "Over problems"]
    caption = (
        f"\nEach beside the runs of `{against}` at its budget whose other settings agree best, paired by seed: 95 % "
        "intervals, and p of the paired t-test as it is and corrected by Holm's method (number of tests: "
        f"{len(tests)}). Over problems: the 95 % interval that these seeds would have with other problems.\n"
    )
    text = markdown_table(header, lines, right=True, padded=True) + caption if lines else ""
    return text + (f"\nNot compared: {'; '.join(left)}.\n" if left else "")


def _budgets(groups: Sequence[Group]) -> str | None:
    """The tables over the budget where nothing else varies and CROP was run at several."""
    ratios = {group.settings.get("retention_ratio") for group in groups if group.method == "crop" and group.results}
    if len(ratios) < 2 or set(groups[0].settings) != {"retention_ratio"}:
        return None
    runs = [
        (g.method, g.settings["retention_ratio"], value, seed) for g in groups for seed, value in g.accuracy.items()
    ]
    return budget_markdown(StudentAccuracy(*run) for run in runs)


def _ablations(world: str, groups: Sequence[Group], compared: Sequence[str]) -> list[str]:
    """The paper's ablation of selectors, beside each group of CROP whose controls were run and evaluated."""
    parts = []
    for crop in (group for group in groups if group.method == "crop" and compared != [HELD_OUT]):
        alike = {group.method: group for group in groups if group.settings == crop.settings and group.results}
        rows = [alike[method] for method in _ABLATION if method in alike]
        if len(rows) < 3 or crop not in rows:
            continue  # CROP-student alone has the tables over the budget
        means = [[fmean(each[name]["mean"] for each in group.results.values()) for name in compared] for group in rows]
        ahead = [_points(list(_ahead(group, crop).values()), None, "+", 2) for group in rows]
        texts = bold_maxima([[*own, fmean(own)] for own in means])
        table = [[group.method, *own, over] for group, own, over in zip(rows, texts, ahead)]
        parts += [f"### {world}: selectors beside {crop.label} (%)", ""]
        parts.append(markdown_table(["Method", *compared, "Avg.", "Minus crop"], table, right=True, padded=True))
    return parts


def _points(values: Sequence[float], within: tuple[float, float] | None = None, sign: str = "", digits: int = 1) -> str:
    """A mean in per cent, with its interval if it may lie `within`."""
    if not values:
        return "-"
    interval = runs_interval(values, within) if within else None
    return f"{100 * fmean(values):{sign}.{digits}f}" + (f" ({between(interval, sign)})" if interval else "")


def _number(values: Sequence[float], digits: int) -> str:
    return f"{fmean(values):.{digits}f}" if values else "-"


def _setting(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
