"""Draw what selection gains over random tokens when one premise of the embedded task is changed at a time.

    python examples/studies/draw_premises.py runs/premises/runs.parquet --output runs/premises/premises.png

The rows are those of the grids premises_*.yaml, one file or several. Gains are paired by seed.
"""

import argparse
import re
from collections import defaultdict
from pathlib import Path

import numpy as np

from crop_trl.analysis.chart import COLOURS, MARKERS, QUIET, caption, new_figure, save, tidy
from crop_trl.evaluation.metrics import runs_interval
from crop_trl.studies.rows import stored_rows

DEFAULT = {"fillers": 5, "sharpness": 1.25, "style": 1, "conditions": 4, "rate": 3e-4}
GENERIC = {0: 26, 2: 41, 5: 55, 12: 70, 26: 82}  # fillers -> share of wording, in per cent
# What the grids change, and so what the names of their runs have.
CHANGED = {"method", "seed", "num_counterfactuals", "learning_rate", "max_completion_length"}
CHANGED |= {"model_name_or_path", "teacher_model_name_or_path"}
PREMISES = {  # name -> title, and its values with their labels
    "fillers": ("Generic wording (%)", {n: str(share) for n, share in GENERIC.items()}),
    "sharpness": ("Logits of the teacher (times)", {1: "1", 1.25: "1.25", 1.5: "1.5", 2: "2"}),
    "style": ("Favourites", {0: "the same", 1: "differ"}),
    "conditions": ("Counterfactuals", {n: str(n) for n in (1, 2, 3, 4)}),
    "rate": ("Learning rate", {1e-4: "1e-4", 3e-4: "3e-4", 1e-3: "1e-3"}),
}


def premises_of(row: dict) -> dict[str, float]:
    """Which world a run is of, from the names of its models and its settings."""
    student, teacher = row["model_name_or_path"], row["teacher_model_name_or_path"]
    found = dict(DEFAULT)
    if match := re.search(r"fillers(\d+)", teacher):
        found["fillers"] = int(match[1])
    if match := re.search(r"sharpen([\d.]+)", teacher):
        found["sharpness"] = float(match[1])
    found["style"] = int("same_favourites" not in student)
    return found | {"conditions": row["num_counterfactuals"], "rate": row["learning_rate"]}


def gains(rows: list[dict]) -> dict[tuple[str, float, str], list[float]]:
    """(premise, value, method) -> gain over random tokens by seed, in points of accuracy."""
    after = defaultdict(dict)
    for row in rows:
        if not row["run"].startswith("tiny/") or set(re.findall(r"[/,](\w+)=", row["run"])) - CHANGED:
            continue  # of another study
        world = premises_of(row)
        if row["method"] != "crop":  # reads no counterfactual
            world["conditions"] = DEFAULT["conditions"]
        after[(row["method"], *world.values())][row["seed"]] = row["accuracy_after"]
    found = {}
    for (method, *values), ours in after.items():
        world = dict(zip(DEFAULT, values))
        reference = after.get(("random", *(world | {"conditions": DEFAULT["conditions"]}).values()), {})
        each = [100 * (ours[seed] - reference[seed]) for seed in sorted(set(ours) & set(reference))]
        changed = [name for name in DEFAULT if world[name] != DEFAULT[name]]
        if method != "random" and each and len(changed) < 2:
            found |= {(name, world[name], method): each for name in (changed or DEFAULT)}
    return found


def draw(found: dict[tuple[str, float, str], list[float]], path: Path) -> None:
    """One panel a premise: mean gain and its 95 % interval over seeds."""
    figure = new_figure(13, 3.6)
    panels = figure.subplots(1, len(PREMISES), sharey=True, width_ratios=[len(v) + 1 for _, v in PREMISES.values()])
    for axes, (name, (title, labels)) in zip(panels, PREMISES.items()):
        tidy(axes, title)
        axes.axhline(0, color=QUIET, linewidth=1)
        for i, method in enumerate(("crop", "opd")):
            points = [(x, found[name, v, method]) for x, v in enumerate(labels) if (name, v, method) in found]
            if not points:
                continue
            means = [np.mean(each) for _, each in points]
            intervals = [runs_interval(each) or (mean, mean) for (_, each), mean in zip(points, means)]
            whiskers = [[m - low, high - m] for m, (low, high) in zip(means, intervals)]
            style = {"color": COLOURS[i], "marker": MARKERS[i], "label": method, "linestyle": ":" if i else "-"}
            axes.errorbar([x + 0.08 * i for x, _ in points], means, yerr=np.array(whiskers).T, capsize=2, **style)
        axes.set_xticks(range(len(labels)), labels.values())
        axes.set_xlim(-0.5, len(labels) - 0.5)
        # The default is the same runs in every panel.
        axes.get_xticklabels()[list(labels).index(DEFAULT[name])].set_fontweight("bold")
    panels[0].set_ylabel("gain over random tokens (points)", fontsize=9)
    panels[0].legend(fontsize=8, frameon=False)
    fewest = min((len(each) for each in found.values()), default=0)
    text = (
        "Accuracy after training minus that with as many random tokens (opd: all tokens), paired by seed, on held-out "
    )
    text += (
        f"problems. Whiskers: 95 % over seeds (Student's t), at least {fewest} a point.\nBold: the default, the same "
    )
    caption(figure, text + "runs in every panel; elsewhere one premise differs from it.")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", help="runs.parquet of the study")
    parser.add_argument("--output", type=Path, default=Path("premises.png"))
    args = parser.parse_args()
    found = gains([row for table in args.tables for row in stored_rows(table)])
    for (name, value, method), each in sorted(found.items()):
        low, high = runs_interval(each) or (np.nan, np.nan)
        print(f"{name} {value:g}, {method}: {np.mean(each):+.1f} ({low:+.1f} to {high:+.1f}), {len(each)} seeds")
    draw(found, args.output)


if __name__ == "__main__":
    main()
