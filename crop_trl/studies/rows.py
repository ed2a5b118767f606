"""The rows of a study: one a finished run, in a Parquet that carries the study from one machine to the next."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from ..files import read_object, read_rows, replacing
from ..training.results import FILE, RunResult
from .naming import SETTINGS

TABLE = "runs.parquet"
EVALUATION = "evaluation"
_FIRST = ("world", "method", "retention_ratio", "num_counterfactuals", "learning_rate", "seed")
_FIRST += ("accuracy_before", "accuracy_after", "commit")
# What is asked of a row that was stored, once the texts among them that hold JSON are read.
_KINDS = {"run": str, "world": str, "method": str, "seed": int, "settings": dict, "evaluation": dict | None}
_KINDS |= {"accuracy_before": float | None, "accuracy_after": float | None}
_AGAIN = "delete the run's folder"
Row = dict[str, Any]


def row_of(folder: Path, key: str, defaults: Mapping[str, Any]) -> Row:
    """The row of a finished run; `key` names it, `defaults` stand where its settings are silent."""
    settings = read_object(folder / SETTINGS, _AGAIN)
    result = RunResult.read(folder / FILE)
    row = {"run": key, **{name: defaults.get(name) for name in _FIRST}, **settings, **vars(result)}
    row |= {"world": key.partition("/")[0], "settings": json.dumps(settings, sort_keys=True)}
    row |= row.pop("statistics")
    for when in ("before", "after"):
        row[f"accuracy_{when}_low"], row[f"accuracy_{when}_high"] = row.pop(f"interval_{when}") or (None, None)
    evaluation = folder / EVALUATION / "results.json"
    if evaluation.is_file():
        found = read_object(evaluation, "delete it and evaluate again")
        kept = ("mean", "pass", "samples", "problems")
        parts = {name: {k: benchmark[k] for k in kept} for name, benchmark in found["benchmarks"].items()}
        for name, part in parts.items():  # the share of right answers to each problem
            part["shares"] = {id: sum(v) / len(v) for id, v in found["benchmarks"][name]["verdicts"].items()}
        row |= {"average": found["average"], "evaluation": json.dumps(parts)}
        row |= {f"{name}_{kind}": part[kind] for name, part in parts.items() for kind in kept[:2]}
    return row


def stored_rows(files: Iterable[str | Path]) -> dict[str, Row]:
    """Rows of Parquet files by run, those of later files in place of earlier ones. Raises `ValueError`."""
    found = {}
    for file in files:
        if not Path(file).is_file():
            raise ValueError(f"{str(file)!r} is no file; give the {TABLE} of a study.")
        for row in read_rows(file):
            read = row | {name: _parsed(row.get(name)) for name in ("settings", "evaluation")}
            if wrong := [name for name, kind in _KINDS.items() if not isinstance(read.get(name), kind)]:
                raise ValueError(
                    f"{str(file)!r} is no table of a study: a row has no right `{wrong[0]}`; give the {TABLE} of one."
                )
            found[row["run"]] = row
    return found


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text or "null")
    except (TypeError, ValueError):
        return text


def finished_in(output: Path) -> list[str]:
    """The finished runs whose folders lie in a study's."""
    found = (path.parent for path in output.glob(f"*/*/{FILE}") if (path.parent / SETTINGS).is_file())
    return sorted(folder.relative_to(output).as_posix() for folder in found)


def write_rows(path: Path, rows: Mapping[str, Row]) -> None:
    """Replace the Parquet; a dict, and what is of several types, becomes text."""
    names = dict.fromkeys(["run", *_FIRST, *(name for row in rows.values() for name in row)])
    columns = {name: _column([row.get(name) for row in rows.values()]) for name in names}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        pyarrow.parquet.write_table(pyarrow.table(columns), temporary)


def _column(values: list[Any]) -> pyarrow.Array:
    values = [json.dumps(value) if isinstance(value, dict) else value for value in values]
    try:
        return pyarrow.array(values)
    except pyarrow.ArrowException:
        return pyarrow.array([None if value is None else str(value) for value in values])
