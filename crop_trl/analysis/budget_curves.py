"""Accuracy over the share of tokens that is trained, against methods that train all of them.

The two panels of the paper's figure on budget sensitivity: a curve a method with dense references, and what a method
gains at each budget over the best other selector of that budget and over pure distillation.
"""

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from ..methods import METHODS
from ..training.results import FILE, RunResult
from .chart import COLOURS, INK, MARKERS, QUIET, RULE, new_figure, save, tidy

BASE, OPD = "base", "opd"
HARD_SELECTORS = ("entropy", "tip", "ta-opd")
# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Run:
    """
    One trained student.

    Args:
        method (`str`): Its method; `"base"` is the student before training.
        retention_ratio (`float`, *optional*): Share of tokens trained; `None` for a method that trains all of them.
        accuracy (`float`): In [0, 1].
        seed (`int`, *optional*): Of the training.
    """

    method: str
    retention_ratio: float | None
    accuracy: float
    seed: int | None = None


@dataclass(frozen=True)
class Point:
    """
    The runs of one method at one budget.

    Args:
        accuracy (`float`): Mean, in [0, 1].
        interval (`tuple[float, float]`, *optional*): 95 % interval of the mean over training seeds (Student's t);
            `None` with a single run.
        runs (`int`): How many; of a gain, how many seeds both methods have.
    """

    accuracy: float
    interval: tuple[float, float] | None
    runs: int


@dataclass(frozen=True)
class Gain:
    """
    What the method in question gains at one budget, in accuracy.

    Args:
        retention_ratio (`float`): The budget.
        best (`str`, *optional*): The best other hard selector there; `None` where none was run.
        over_best ([`Point`], *optional*): Gain over it, seed by seed where both have them.
        over_opd ([`Point`], *optional*): Gain over distillation of every token.
    """

    retention_ratio: float
    best: str | None
    over_best: Point | None
    over_opd: Point | None


@dataclass
class BudgetCurves:
    """
    Accuracy over the budget.

    Args:
        method (`str`): The method in question.
        curves (`dict[str, dict[float, Point]]`): Method -> retention ratio -> accuracy.
        dense (`dict[str, Point]`): Methods without a budget, `"base"` among them.
        gains (`list[Gain]`): By budget, in rising order.
    """

    method: str
    curves: dict[str, dict[float, Point]]
    dense: dict[str, Point]
    gains: list[Gain] = field(default_factory=list)

    def to_dict(self) -> dict:
        """For JSON."""
        return {
            "method": self.method,
            "curves": {m: {f"{r:g}": asdict(p) for r, p in curve.items()} for m, curve in self.curves.items()},
            "dense": {m: asdict(p) for m, p in self.dense.items()},
            "gains": [asdict(gain) for gain in self.gains],
        }


def _point(values: Sequence[float]) -> Point:
    values = np.asarray(values, dtype=float)
    mean, n = float(values.mean()), len(values)
    if n < 2:
        return Point(mean, None, n)
    t = _T[n - 2] if n - 2 < len(_T) else 1.96
    half = t * float(values.std(ddof=1)) / math.sqrt(n)
    return Point(mean, (mean - half, mean + half), n)


def _difference(ours: list[Run], theirs: list[Run]) -> Point:
    """Paired over shared seeds where every run of both has one, else the difference of means without an interval."""
    by_seed = [{run.seed: run.accuracy for run in runs} for runs in (ours, theirs)]
    shared = [seed for seed in by_seed[0] if seed in by_seed[1] and seed is not None]
    if shared and len(by_seed[0]) == len(ours) and len(by_seed[1]) == len(theirs):
        return _point([by_seed[0][seed] - by_seed[1][seed] for seed in shared])
    return Point(np.mean([r.accuracy for r in ours]) - np.mean([r.accuracy for r in theirs]), None, len(ours))


def budget_curves(
    runs: Iterable[Run], method: str = "crop", hard_selectors: Sequence[str] = HARD_SELECTORS
) -> BudgetCurves:
    """
    Sort runs into curves and references.

    Args:
        runs (iterable of [`Run`]): See [`read_runs`].
        method (`str`, *optional*, defaults to `"crop"`): The method in question.
        hard_selectors (`Sequence[str]`, *optional*): Among which the best is taken at each budget; by default the
            paper's entropy, TIP and TA-OPD.

    Returns:
        [`BudgetCurves`]

    Raises:
        `ValueError`: no run, or none of the method in question.
    """
    groups: dict[tuple[str, float | None], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.method, run.retention_ratio), []).append(run)
    if not groups:
        raise ValueError("There is no result to draw a curve of; give folders that hold result.json or results.json.")
    curves: dict[str, dict[float, Point]] = {}
    for (name, ratio), group in sorted(
        groups.items(), key=lambda item: (item[0][0] != method, str(item[0][0]), item[0][1] or 0)
    ):
        if ratio is not None:
            curves.setdefault(name, {})[ratio] = _point([run.accuracy for run in group])
    dense = {name: _point([r.accuracy for r in group]) for (name, ratio), group in groups.items() if ratio is None}
    if method not in curves:
        known = ", ".join(curves) or "none"
        raise ValueError(f"`method` {method!r} has no result with a retention ratio; those that have: {known}.")
    gains = []
    for ratio in curves[method]:
        ours = groups[method, ratio]
        rivals = [name for name in hard_selectors if name != method and (name, ratio) in groups]
        best = max(rivals, key=lambda name: curves[name][ratio].accuracy, default=None)
        gains.append(
            Gain(
                ratio,
                best,
                None if best is None else _difference(ours, groups[best, ratio]),
                _difference(ours, groups[OPD, None]) if (OPD, None) in groups else None,
            )
        )
    return BudgetCurves(method, curves, dense, gains)


def read_runs(paths: Iterable[str | Path]) -> list[Run]:
    """
    Read results of several kinds.

    Args:
        paths (iterable of `str` or `Path`): Each one of: a CSV file with the columns `method`, `accuracy` and, as far
            as they apply, `retention_ratio` and `seed`; a `result.json` of a training run; a `results.json` of
            an evaluation with `--training_run`; or a folder, in which all of these JSON files are looked for.

    Returns:
        `list[Run]`

    Raises:
        `ValueError`: a file that is missing, broken, or does not say what it is a result of.
    """
    runs: list[Run] = []
    for path in map(Path, paths):
        if path.is_dir():
            files = sorted([*path.rglob(FILE), *path.rglob("results.json")])
            if not files:
                raise ValueError(f"{str(path)!r} holds no result.json or results.json; train or evaluate first.")
        elif path.exists():
            files = [path]
        else:
            raise ValueError(f"{str(path)!r} does not exist; give a folder of results, a JSON or a CSV file.")
        for file in files:
            try:
                runs += _read_csv(file) if file.suffix == ".csv" else _read_json(file)
            except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
                message = f"{str(file)!r} is no result that can be read ({type(error).__name__}: {error})"
                raise ValueError(f"{message}; write it again with the command it came from.") from error
    # The student before training is the same one in every result of its seed. Of other runs only a seed tells that two
    # of equal accuracy are one.
    once = dict.fromkeys(run for run in runs if run.seed is not None or run.method == BASE)
    return [*once, *(run for run in runs if run not in once)]


def _number(file: Path, name: str, text, kind=float):
    """A number of a result; raises `ValueError` with its file and name."""
    try:
        return kind(text)
    except ValueError as error:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{str(file)!r}: `{name}` must be {what}, got {text!r}.") from error


def _run(file: Path, method: str, ratio, accuracy, seed) -> Run:
    accuracy = _number(file, "accuracy", accuracy)
    if not 0 <= accuracy <= 1:
        raise ValueError(f"{str(file)!r}: `accuracy` must be a share between 0 and 1, got {accuracy:g}.")
    is_dense = method == BASE or (method in METHODS and METHODS[method].score is None)
    if is_dense or ratio in (None, ""):
        if not is_dense and method in METHODS:
            raise ValueError(f"{str(file)!r}: method {method!r} needs its `retention_ratio`; add it.")
        ratio = None
    else:
        ratio = _number(file, "retention_ratio", ratio)
        if not 0 < ratio <= 1:
            raise ValueError(
                f"{str(file)!r}: `retention_ratio` must lie in (0, 1], got {ratio:g}; write a fifth as 0.2."
            )
    seed = None if seed in (None, "") else _number(file, "seed", seed, int)
    return Run(method, ratio, accuracy, seed)


def _read_csv(file: Path) -> list[Run]:
    # Spreadsheets begin a CSV file with a byte order mark, which would become part of the first column's name.
    with open(file, encoding="utf-8-sig", newline="") as stream:
        rows = list(csv.DictReader(stream))
    missing = {"method", "accuracy"} - set(rows[0] if rows else ())
    if missing:
        raise ValueError(f"{str(file)!r} lacks the columns {', '.join(sorted(missing))}; add them.")
    return [_run(file, r["method"], r.get("retention_ratio"), r["accuracy"], r.get("seed")) for r in rows]


def _read_json(file: Path) -> list[Run]:
    result = json.loads(file.read_text(encoding="utf-8"))
    if "benchmarks" in result:
        training = result.get("training") or {}
        method = training.get("method") or result.get("label")
        if method != BASE and "method" not in training:
            raise ValueError(
                f"{str(file)!r} does not say what was trained; evaluate it with `--training_run`, or with "
                "`--label base` if it is the student as it was."
            )
        return [_run(file, method, training.get("retention_ratio"), result["average"], training.get("seed"))]
    trained = RunResult.of(result, file)
    found = []
    if trained.accuracy_before is not None:
        found.append(_run(file, BASE, None, trained.accuracy_before, trained.seed))
    if trained.accuracy_after is not None:
        found.append(_run(file, trained.method, trained.retention_ratio, trained.accuracy_after, trained.seed))
    return found


def save_budget_chart(curves: BudgetCurves, path: str | Path, note: str = "") -> None:
    """
    Draw accuracy over the budget, and the gains beside it.

    Args:
        curves ([`BudgetCurves`]): What to draw.
        path (`str` or `Path`): PNG to write.
        note (`str`, *optional*): A line below: models, data, steps.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
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
    figure.supxlabel(text + (f"\n{note}" if note else ""), fontsize=8, color=QUIET, x=0.01, ha="left")
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
