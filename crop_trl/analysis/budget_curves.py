"""Accuracy over the share of tokens that is kept: the two panels of the paper's figure on budget sensitivity."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..evaluation.metrics import runs_interval
from ..evaluation.tables import HARD_SELECTORS, has_budget
from ..files import read_object
from ..training.results import FILE, RunResult
from .chart import COLOURS, INK, MARKERS, QUIET, RULE, caption, new_figure, save, tidy

BASE, OPD = "base", "opd"


@dataclass(frozen=True)
class StudentAccuracy:
    """What one student came to; of method `base`: before training."""

    method: str
    retention_ratio: float | None  # None for a method that keeps every token
    accuracy: float  # in [0, 1]
    seed: int | None = None  # of the training


@dataclass(frozen=True)
class Point:
    """The mean accuracy of one method at one budget, or a mean gain."""

    accuracy: float
    interval: tuple[float, float] | None  # 95 % of the mean over training seeds (Student's t); None with a single run
    runs: int  # of a gain: how many seeds both methods have


@dataclass(frozen=True)
class Gain:
    """What the method in question gains at one budget, in accuracy, seed by seed where both sides have them."""

    retention_ratio: float
    best: str | None  # the best other hard selector there, if one was run
    over_best: Point | None
    over_opd: Point | None


@dataclass
class BudgetCurves:
    """Accuracy over the budget, for the method in question and others."""

    method: str
    curves: dict[str, dict[float, Point]]  # method -> retention ratio -> accuracy
    dense: dict[str, Point]  # methods without a budget, "base" among them
    gains: list[Gain] = field(default_factory=list)  # by budget, in rising order


def _point(values: Sequence[float], lowest: float = 0.0) -> Point:
    return Point(float(np.mean(values)), runs_interval(values, (lowest, 1.0)), len(values))


def _difference(ours: list[StudentAccuracy], theirs: list[StudentAccuracy]) -> Point:
    """Paired over shared seeds where every run of both has one, else the difference of means without an interval."""
    by_seed = [{run.seed: run.accuracy for run in runs} for runs in (ours, theirs)]
    shared = [seed for seed in by_seed[0] if seed in by_seed[1] and seed is not None]
    if shared and len(by_seed[0]) == len(ours) and len(by_seed[1]) == len(theirs):
        return _point([by_seed[0][seed] - by_seed[1][seed] for seed in shared], -1.0)
    return Point(np.mean([r.accuracy for r in ours]) - np.mean([r.accuracy for r in theirs]), None, len(ours))


def budget_curves(
    runs: Iterable[StudentAccuracy], method: str = "crop", hard_selectors: Sequence[str] = HARD_SELECTORS
) -> BudgetCurves:
    """Sort runs into curves and references. Raises `ValueError` when there is no run, or none of `method`."""
    groups: dict[tuple[str, float | None], list[StudentAccuracy]] = {}
    for run in runs:
        groups.setdefault((run.method, run.retention_ratio), []).append(run)
    if not groups:
        raise ValueError("There is no result to draw a curve of; give folders that hold result.json or results.json.")
    points = {key: _point([run.accuracy for run in group]) for key, group in groups.items()}
    dense = {name: point for (name, ratio), point in points.items() if ratio is None}
    curves: dict[str, dict[float, Point]] = {}
    budgets = [key for key in points if key[1] is not None]
    for name, ratio in sorted(budgets, key=lambda key: (key[0] != method, *key)):
        curves.setdefault(name, {})[ratio] = points[name, ratio]
    if method not in curves:
        known = ", ".join(curves) or "none"
        raise ValueError(f"`method` {method!r} has no result with a retention ratio; those that have: {known}.")
    gains = []
    for ratio in curves[method]:
        ours = groups[method, ratio]
        rivals = [name for name in hard_selectors if name != method and (name, ratio) in groups]
        best = max(rivals, key=lambda name: curves[name][ratio].accuracy, default=None)
        over_best = None if best is None else _difference(ours, groups[best, ratio])
        over_opd = _difference(ours, groups[OPD, None]) if (OPD, None) in groups else None
        gains.append(Gain(ratio, best, over_best, over_opd))
    return BudgetCurves(method, curves, dense, gains)


def read_runs(paths: Iterable[str | Path]) -> list[StudentAccuracy]:
    """Read `result.json` of training and `results.json` of evaluations, or folders; refuses two that disagree."""
    runs: list[StudentAccuracy] = []
    seeds: dict[tuple, tuple[float, Path]] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"{str(path)!r} does not exist; give a folder of results, or a JSON file.")
        # Where students were evaluated, their accuracy in training is another.
        files = (sorted(path.rglob("results.json")) or sorted(path.rglob(FILE))) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{str(path)!r} holds no result.json or results.json; train or evaluate first.")
        for file in files:
            for run in _students(file):
                key = (run.method, run.retention_ratio, run.seed)
                accuracy, first = seeds.setdefault(key, (run.accuracy, file))
                # Sampled again, the student before training comes to another accuracy.
                if run.seed is not None and run.method != BASE and run.accuracy != accuracy:
                    what = f"{accuracy:g} and {run.accuracy:g} for method {run.method!r} with seed {run.seed}"
                    raise ValueError(f"{str(first)!r} and {str(file)!r} have {what}; give one result for each.")
                runs.append(run)
    # The student before training is the same one in every result of its seed. Of other runs only a seed tells that two
    # of equal accuracy are one.
    once = dict.fromkeys(run for run in runs if run.seed is not None or run.method == BASE)
    return [*once, *(run for run in runs if run not in once)]


def _students(file: Path) -> list[StudentAccuracy]:
    content = read_object(file, "write it again with the program it came from")
    if "benchmarks" not in content:
        run = RunResult.of(content, file)
        ratio = run.retention_ratio if has_budget(run.method) else None
        before = StudentAccuracy(BASE, None, run.accuracy_before, run.seed)
        after = StudentAccuracy(run.method, ratio, run.accuracy_after, run.seed)
        return [student for student in (before, after) if student.accuracy is not None]
    training = content.get("training") or {}
    method = training.get("method") or content.get("label")
    if method != BASE and "method" not in training:
        what = "evaluate it with `--training_run`, or `--label base` if nothing was"
        raise ValueError(f"{str(file)!r} does not say what was trained; {what}.")
    ratio = training.get("retention_ratio") if has_budget(method) else None
    return [StudentAccuracy(method, ratio, content["average"], training.get("seed"))]


def save_budget_chart(curves: BudgetCurves, path: str | Path) -> None:
    """Draw accuracy over the budget, and the gains beside it, to a PNG."""
    figure = new_figure(11, 4.8)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_curves(left, curves)
    _draw_gains(right, curves)
    text = (
        "Left: grey broken lines do not depend on the budget (every token trained, or none); the axis does not begin "
        "at 0; methods of one budget stand side by side.\nWhiskers and bands: 95 % over training seeds (Student's t), "
        "where there are several; of two or three seeds they are very wide, or by chance very narrow.\nRight: above 0, "
        f"{curves.method} is better; the name is the best of the other selectors there, chosen on these very numbers. "
        "A whisker that crosses 0 leaves the sign\nopen. Gains are taken over the seeds that both methods ran (over "
        "all runs where there is none), so they may differ from the distance of the points on the left;\nno whisker: "
        "fewer than two such seeds."
    )
    caption(figure, text)
    save(figure, path)


def _whiskers(points: Sequence[Point]) -> np.ndarray:
    """Distances in points of accuracy, `[2, n]`; NaN where there is no interval."""
    bounds = [(p.accuracy - p.interval[0], p.interval[1] - p.accuracy) if p.interval else (np.nan,) * 2 for p in points]
    return 100 * np.array(bounds).T


def _draw_curves(axes, curves: BudgetCurves) -> None:
    dashes = ((0, (6, 2)), (0, (2, 2)), (0, (6, 2, 1, 2)), (0, (1, 1)))
    for index, (name, point) in enumerate(curves.dense.items()):
        style = {"color": QUIET, "linestyle": dashes[index % len(dashes)], "linewidth": 1.3}
        axes.axhline(100 * point.accuracy, label=f"{name} ({'untrained' if name == BASE else 'all tokens'})", **style)
        if point.interval:
            axes.axhspan(*(100 * bound for bound in point.interval), color=RULE, alpha=0.35, linewidth=0)
    ratios = sorted({ratio for curve in curves.curves.values() for ratio in curve})
    # Methods of one budget stand beside each other, or their whiskers would hide each other.
    step = 0.012 * 100 * max(ratios)
    for index, (name, curve) in enumerate(curves.curves.items()):
        shift = (index - (len(curves.curves) - 1) / 2) * step
        axes.errorbar(
            [100 * ratio + shift for ratio in curve],
            [100 * p.accuracy for p in curve.values()],
            yerr=_whiskers(list(curve.values())),
            label=name,
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=6 if name == curves.method else 5,
            linewidth=2.4 if name == curves.method else 1.2,
            elinewidth=1,
            capsize=2.5,
            zorder=3 if name == curves.method else 2,
        )
    axes.set_xticks([100 * ratio for ratio in ratios], [f"{100 * ratio:g} %" for ratio in ratios])
    axes.set_xlim(100 * min(ratios) - 6 * step, 100 * max(ratios) + 6 * step)
    axes.set_xlabel("retention ratio: share of each response that is trained", fontsize=9, color=QUIET)
    axes.set_ylabel("accuracy (%)", fontsize=9, color=QUIET)
    axes.grid(axis="y", color=RULE, linewidth=0.5)
    axes.legend(fontsize=8.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    tidy(axes, "Accuracy after training on a share of the tokens")


def _draw_gains(axes, curves: BudgetCurves) -> None:
    places = np.arange(len(curves.gains))
    for shift, name, colour, label in (
        # Greys: the colours of the left panel stand for methods.
        (-0.18, "over_best", "#4d4d4d", "over the best other selector"),
        (0.18, "over_opd", "#b5b5b5", "over opd (all tokens)"),
    ):
        known = [(place, point) for place, gain in zip(places, curves.gains) if (point := getattr(gain, name))]
        if not known:
            continue
        at, points = np.array([place for place, _ in known]) + shift, [point for _, point in known]
        values = [100 * p.accuracy for p in points]
        axes.bar(at, values, 0.34, color=colour, label=label)
        axes.errorbar(at, values, yerr=_whiskers(points), fmt="none", ecolor=INK, elinewidth=1, capsize=2.5)
        for x, point, value in zip(at, points, values):
            ends = [value, 0] + ([100 * bound for bound in point.interval] if point.interval else [])
            above = value >= 0
            axes.annotate(
                f"{value:+.1f}".replace("-", "\u2212"),
                (x, max(ends) if above else min(ends)),
                (0, 4 if above else -4),
                textcoords="offset points",
                ha="center",
                va="bottom" if above else "top",
                fontsize=8.5,
            )
    names = [f"{100 * g.retention_ratio:g} %\n({g.best or 'no other'})" for g in curves.gains]
    axes.set_xticks(places, names)
    axes.set_xlim(-0.6, len(places) - 0.4)
    axes.axhline(0, color=INK, linewidth=1)
    # Room for the legend above the bars.
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.08 * (high - low), high + 0.3 * (high - low))
    axes.set_xlabel("retention ratio (best other selector there)", fontsize=9, color=QUIET)
    axes.set_ylabel("points of accuracy", fontsize=9, color=QUIET)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8.5, frameon=False, loc="upper right")
    tidy(axes, f"What {curves.method} gains at the same budget")
