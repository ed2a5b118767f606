"""The grids of world G that follow its learning rates (docs/study.md): each method at the rate that it was given.

    python examples/studies/gsm_grids.py runs/gsm/runs.parquet --output runs/gsm/grids
    crop-trl study runs/gsm/grids/main_*.yaml --output runs/gsm --gpus 0,1 --jobs 36 --sample_together

The rate of a method is the smallest whose accuracy on the validation problems is within a standard error of its best.
"""

import argparse
from pathlib import Path

import pandas as pd
import yaml

RATES = (3e-6, 1e-5, 3e-5)
FIRST = {"opd": (1,), "random": (1,), "crop": (1,), "crop-max": (4,)}
# Of each part: its methods with their numbers of counterfactuals (all that have rates: None), and what varies.
PARTS = {
    "main_a": (FIRST, {"seed": [1, 2, 3]}),
    "main_b": (None, {"seed": [1, 2, 3]}),
    "main_c": (FIRST, {"seed": [4, 5]}),
    "budgets": (
        {"random": (1,), "crop": (1,), "crop-max": (4,), "entropy": (1,)},
        {"retention_ratio": [0.05, 0.1, 0.4], "seed": [1, 2, 3]},
    ),
}


def chosen_rates(runs: pd.DataFrame) -> dict[tuple[str, int], float]:
    """The rate of each method and number of counterfactuals that ran at all `RATES` on the validation problems."""
    tried = runs[
        (runs.world == "gsm") & (runs.seed == 0) & runs.eval_dataset_name.str.endswith("validation.jsonl").fillna(False)
    ]
    chosen = {}
    for variant, rows in tried.groupby(["method", "num_counterfactuals"]):
        rows = rows.sort_values("learning_rate")
        if list(rows.learning_rate) != list(RATES):
            print(f"{variant}: {', '.join(f'{rate:g}' for rate in rows.learning_rate)} alone; left out")
            continue
        best = rows.loc[rows.accuracy_after.idxmax()]
        error = (best.accuracy_after_high - best.accuracy_after_low) / (2 * 1.96)
        near = rows[rows.accuracy_after > best.accuracy_after - error]
        chosen[variant] = float(near.learning_rate.min())
        accuracies = ", ".join(f"{100 * value:.1f}" for value in rows.accuracy_after)
        print(f"{variant}: {accuracies} at {', '.join(f'{rate:g}' for rate in RATES)}, so {chosen[variant]:g}")
    return chosen


def main() -> None:
    """Read the rows, write the grids."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="runs.parquet of the study that tried the rates")
    parser.add_argument("--output", type=Path, required=True, help="folder of the grids")
    args = parser.parse_args()
    chosen = chosen_rates(pd.read_parquet(args.rows).reset_index(drop=True))
    args.output.mkdir(parents=True, exist_ok=True)
    for part, (methods, varied) in PARTS.items():
        groups: dict[tuple[float, int], list[str]] = {}
        for (method, count), rate in chosen.items():
            if methods is None or count in methods.get(method, ()):
                groups.setdefault((rate, count), []).append(method)
        for (rate, count), names in groups.items():
            grid = yaml.safe_load(Path(__file__).with_name("gsm_main.yaml").read_text())
            fixed = {"learning_rate": {"value": rate}} | (
                {"num_counterfactuals": {"value": count}} if count > 1 else {}
            )
            varying = {name: {"values": values} for name, values in varied.items()}
            kept = {name: grid["parameters"][name] for name in ("eval_dataset_name", "heatmap")}
            grid["parameters"] = fixed | varying | {"method": {"values": names}} | kept
            (args.output / f"{part}_{rate:g}_{count}.yaml").write_text(yaml.safe_dump(grid, sort_keys=False))


if __name__ == "__main__":
    main()
