"""Draw world G: accuracy over learning rates of every method, and over budgets.

    python examples/studies/draw_gsm.py docs/data/study_runs.parquet --output docs/images

Writes gsm_rates.png (validation problems, the runs that choose rates) and gsm_budgets.png (test problems).
"""

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np

from crop_trl.analysis.chart import COLOURS, MARKERS, QUIET, RULE, caption, new_figure, save, tidy
from crop_trl.evaluation.metrics import runs_interval
from crop_trl.studies.rows import stored_rows

RATES = (3e-6, 1e-5, 3e-5)
BUDGETED = ("random", "entropy", "crop", "crop-max, 4")


def name_of(row: dict) -> str:
    """A method, with its number of counterfactuals where that is not one."""
    count = row["num_counterfactuals"]
    return row["method"] if count == 1 else f"{row['method']}, {count:g}"


def draw_rates(rows: list[dict], path: Path) -> None:
    """One line a method, one marker a rate, the best method on top."""
    found = defaultdict(dict)
    for row in rows:
        if row["seed"] == 0 and row["eval_dataset_name"].endswith("validation.jsonl"):
            found[name_of(row)][row["learning_rate"]] = row
    names = sorted(found, key=lambda name: max(row["accuracy_after"] for row in found[name].values()))
    figure = new_figure(7.5, 0.26 * len(names) + 1.6)
    axes = figure.subplots()
    tidy(axes, "Accuracy after 50 steps, by learning rate (%)")
    for y, name in enumerate(names):
        after = {rate: 100 * row["accuracy_after"] for rate, row in found[name].items()}
        axes.plot([min(after.values()), max(after.values())], [y, y], color=RULE, linewidth=1, zorder=1)
        for i, rate in enumerate(rate for rate in RATES if rate in after):
            style = {"color": COLOURS[i], "marker": MARKERS[i], "s": 26, "zorder": 2}
            axes.scatter(after[rate], y, **style, label=None if y else f"{rate:g}")
    before = 100 * np.mean([row["accuracy_before"] for each in found.values() for row in each.values()])
    axes.axvline(before, color=QUIET, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(names)), names)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    errors = [
        row["accuracy_after_high"] - row["accuracy_after_low"] for each in found.values() for row in each.values()
    ]
    text = (
        f"512 validation problems, two samples each, one seed; a standard error is {100 * np.mean(errors) / 3.92:.1f} "
    )
    caption(figure, text + "points. Dotted: before training.")
    save(figure, path)


def draw_budgets(rows: list[dict], path: Path) -> None:
    """One line a method over the share of tokens that is kept; all tokens at the right."""
    found = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["eval_dataset_name"].endswith("test.jsonl"):
            name = name_of(row)
            share = 1.0 if name == "opd" else row["retention_ratio"]
            found[name][share].append(100 * row["accuracy_after"])
    figure = new_figure(6.5, 4)
    axes = figure.subplots()
    tidy(axes, "Accuracy after 50 steps, by budget (%)")
    for i, name in enumerate((*BUDGETED, "opd")):
        shares = sorted(found.get(name, ()))
        if not shares:
            continue
        means = np.array([np.mean(found[name][share]) for share in shares])
        ends = [runs_interval(found[name][share]) or (mean, mean) for share, mean in zip(shares, means)]
        whiskers = np.abs(np.array(ends).T - means)
        x = np.array(shares) * (1 + 0.012 * (i - 2))  # so that whiskers stand side by side
        axes.errorbar(x, means, yerr=whiskers, color=COLOURS[i], marker=MARKERS[i], capsize=2, label=name)
    axes.set_xscale("log")
    axes.set_xticks([0.05, 0.1, 0.2, 0.4, 1], ["5", "10", "20", "40", "all"])
    axes.minorticks_off()
    axes.set_xlabel("tokens kept (%)", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    caption(figure, "512 test problems, two samples each; mean and 95 % over seeds (Student's t).")
    save(figure, path)


def main() -> None:
    """Read the rows, draw both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", help="runs.parquet of the study")
    parser.add_argument("--output", type=Path, default=Path("docs/images"), help="folder of the pictures")
    args = parser.parse_args()
    rows = [row for row in stored_rows(args.rows) if row["world"] == "gsm"]
    draw_rates(rows, args.output / "gsm_rates.png")
    draw_budgets(rows, args.output / "gsm_budgets.png")


if __name__ == "__main__":
    main()
