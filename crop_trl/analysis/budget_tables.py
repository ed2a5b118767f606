"""Accuracy over the budget as Markdown: all methods with what CROP gains, and the paper's two tables of pairs."""

from collections.abc import Iterable

from ..evaluation.tables import between, bold_maxima, percent
from ..text import markdown_table
from .budget_curves import BASE, BudgetCurves, Point, StudentAccuracy, budget_curves

# CROP read from the teacher against the student, and without and with the student's entropy.
PAIRS = ("crop-student", "crop-ent")


def budget_markdown(runs: Iterable[StudentAccuracy], method: str = "crop") -> str:
    """The tables of a sweep over the budget: all methods, then `method` beside each of [`PAIRS`]; in per cent."""
    runs = list(runs)
    curves = budget_curves(runs, method)
    tables = [("Accuracy over the budget (%)", curves)]
    for other in PAIRS:
        if other != method and set(curves.curves.get(other, ())) & set(curves.curves[method]):
            pair = budget_curves([run for run in runs if run.method in (method, other)], method, [other])
            tables.append((f"{method} and {other} over the budget (%)", pair))
    return "\n".join(f"## {title}\n\n{budget_table(of)}" for title, of in tables)


def budget_table(curves: BudgetCurves) -> str:
    """Methods by budgets, the best of a budget in bold, and below them the gains of the method in question."""
    ratios = sorted({ratio for curve in curves.curves.values() for ratio in curve})
    dense = {name: point for name, point in curves.dense.items() if name != BASE}
    columns: list = [*ratios, *([None] if dense else [])]  # None: every token
    points = {name: [curve.get(ratio) for ratio in columns] for name, curve in curves.curves.items()}
    points |= {name: [point if ratio is None else None for ratio in columns] for name, point in dense.items()}
    bold = bold_maxima([[point and point.accuracy for point in row] for row in points.values()])
    rows = [
        [name, *(text + _interval(point) for text, point in zip(texts, row))]
        for (name, row), texts in zip(points.items(), bold)
    ]
    bests = {gain.best for gain in curves.gains if gain.best}
    only = next(iter(bests)) if len(bests) == 1 else None
    gains = {gain.retention_ratio: gain for gain in curves.gains}
    over = [[_gain(g.over_best, "" if only else g.best) if (g := gains.get(r)) else "-" for r in columns]]
    over += [[_gain(g.over_opd) if (g := gains.get(r)) else "-" for r in columns]]
    for name, row in zip((only or "the strongest other selector", "opd"), over):
        if any(cell != "-" for cell in row):
            rows.append([f"{curves.method} over {name}", *row])
    header = ["Method", *("all tokens" if ratio is None else f"{100 * ratio:g} %" for ratio in columns)]
    base = curves.dense.get(BASE)
    before = f"\nBefore training: {percent(base.accuracy)}{_interval(base)}.\n" if base else ""
    return markdown_table(header, rows, right=True, padded=True) + before


def _interval(point: Point | None, sign: str = "") -> str:
    return f" ({between(point.interval, sign)})" if point and point.interval else ""


def _gain(point: Point | None, best: str | None = None) -> str:
    if point is None:
        return "-"
    return f"{100 * point.accuracy:+.2f}{_interval(point, '+')}" + (f", {best}" if best else "")
