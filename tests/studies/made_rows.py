"""Rows of made-up runs, and how a table of them is read."""

import json

DEFAULTS = {"method": "crop", "seed": 42, "retention_ratio": 0.2, "learning_rate": 1e-6, "num_counterfactuals": 1}


def row(method: str, seed: int, after: float | None, world: str = "w", evaluation: dict | None = None, **settings):
    settings |= {"method": method, "seed": seed}
    measured = {"accuracy_before": 0.4, "accuracy_after": after, "passes": 3, "kept_share": 0.2, "length_after": 50.0}
    measured |= {
        "problems_after": None if after is None else [1.0] * round(20 * after) + [0.0] * round(20 - 20 * after)
    }
    run = f"{world}/{json.dumps(settings)}"
    found = {**DEFAULTS, **settings, **measured, "run": run, "world": world, "settings": json.dumps(settings)}
    return found | ({"evaluation": json.dumps(evaluation)} if evaluation else {})


def table(text: str, heading: str = "## ") -> list[list[str]]:
    """The lines of the first table after a heading, without marks, the header first."""
    lines = text.partition(heading)[2].replace("*", "").split("\n## ")[0].split("\n### ")[0].splitlines()
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [line for line in found if not set("".join(line)) <= set("-: ")]


def cells(text: str, first: str, heading: str = "## ") -> list[str]:
    """The cells of the line of a table that begins with a cell."""
    return next(line[1:] for line in table(text, heading) if line[0] == first)


RANDOM = {0: 0.50, 1: 0.60, 2: 0.70}
CROP = {0: 0.65, 1: 0.70, 2: 0.75, 3: 0.90}
OPD = {0: 0.50, 1: 0.65, 2: 0.70}


def rows(**more):
    runs = {"random": RANDOM, "crop": CROP, "opd": OPD}
    return [row(method, seed, value, **more) for method, values in runs.items() for seed, value in values.items()]
