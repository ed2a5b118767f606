"""The rows of a study: one a finished run, in a Parquet that carries the study from one machine to the next."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow
import pyarrow.parquet

from ..evaluation.run import averaged, stored_settings, told_apart
from ..files import read_object, read_rows, replacing
from ..training.results import FILE, STATISTICS, RunResult
from .naming import SETTINGS, settings_in

TABLE = "runs.parquet"
EVALUATION = "evaluation"
_FIRST = ("world", "method", "retention_ratio", "num_counterfactuals", "learning_rate", "seed")
_FIRST += ("accuracy_before", "accuracy_after", "commit")
# What is asked of a row, once the texts among them that hold JSON are read.
_KINDS = {"run": str, "world": str, "method": str, "seed": int, "settings": dict, "evaluation": dict | None}
_KINDS |= {"problems_after": list | None}
_KINDS |= dict.fromkeys(("accuracy_before", "accuracy_after", "passes", "seconds", *STATISTICS), float | int | None)
# No two trainings agree in all of these.
_OF_A_TRAINING = ("accuracy_before", "accuracy_after", "seconds")
_AGAIN = "delete it and evaluate again"
Row = dict[str, Any]


def row_of(folder: Path, key: str, defaults: Mapping[str, Any]) -> Row:
    """The row of a finished run, named `key`; `defaults` fill its settings up. Raises `ValueError`."""
    settings = settings_in(folder)
    result = RunResult.read(folder / FILE)
    with _sentence(repr(str(folder / FILE)), "delete it and train again"):
        row = {"run": key, **{name: defaults.get(name) for name in _FIRST}, **settings, **vars(result)}
        row |= {"world": key.partition("/")[0], "settings": json.dumps(settings, sort_keys=True)}
        row |= row.pop("statistics")
        for when in ("before", "after"):
            row[f"accuracy_{when}_low"], row[f"accuracy_{when}_high"] = row.pop(f"interval_{when}") or (None, None)
        row = _checked(row)
    evaluation = folder / EVALUATION / "results.json"
    if not evaluation.is_file():
        return row
    results = read_object(evaluation, _AGAIN)
    with _sentence(repr(str(evaluation)), _AGAIN):
        parts = {}
        for name, found in results["benchmarks"].items():
            parts[name] = {kind: found[kind] for kind in ("mean", "pass", "samples", "problems")}
            # The share of right answers to each problem.
            parts[name]["shares"] = {id: fmean(verdicts) for id, verdicts in found["verdicts"].items()}
            if drawn := stored_settings(evaluation.parent, name):
                parts[name]["drawn"] = told_apart(drawn)
        return merged({}, row | {"evaluation": json.dumps(parts)})


def merged(older: Row, newer: Row) -> Row:
    """The newer row of a run, with what the same student was evaluated on before."""
    same = all(older.get(name) == newer.get(name) for name in _OF_A_TRAINING)
    parts = {}
    for row in (older, newer) if same else (newer,):
        parts |= _parsed(row.get("evaluation")) or {}
    if not parts:
        return newer
    shown = {f"{name}_{kind}": part[kind] for name, part in parts.items() for kind in ("mean", "pass")}
    average = fmean(parts[name]["mean"] for name in averaged(list(parts)))
    return {**newer, "average": average, "evaluation": json.dumps(parts), **shown}


def stored_rows(file: str | Path) -> list[Row]:
    """The rows of a Parquet file. Raises `ValueError`."""
    if not Path(file).is_file() or Path(file).suffix != ".parquet":
        what = "Parquet file" if Path(file).is_file() else "file"
        raise ValueError(f"{str(file)!r} is no {what}; give the {TABLE} of a study.")
    rows = read_rows(file)
    with _sentence(f"{str(file)!r} is no table of a study: a row", f"give the {TABLE} of one"):
        return [_checked(row) for row in rows]


def _checked(row: Row) -> Row:
    """A row with None for NaN. Raises `KeyError` for the first value that has a wrong type."""
    row = {name: None if value != value else value for name, value in row.items()}
    read = row | {name: _parsed(row.get(name)) for name in ("settings", "evaluation")}
    for name, kind in _KINDS.items():
        if not isinstance(read.get(name), kind):
            raise KeyError(name)
    return row


@contextmanager
def _sentence(what: str, remedy: str) -> Iterator[None]:
    """Raise `ValueError` for a row that cannot be made of what there is."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{what} has no right `{error.args[0]}`; {remedy}.") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{what} has no right values ({error}); {remedy}.") from None


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
    except (pyarrow.ArrowException, OverflowError):
        return pyarrow.array([None if value is None else str(value) for value in values])
