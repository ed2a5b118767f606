"""The runs of some grids and the rows that there are, in one folder: what is left, what it takes, what came of it."""

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..planning.shape import shape_of
from . import rows
from .grid import read_grid, train_arguments
from .naming import NamedRun, is_finished
from .running import Ended, Task, last_lines

LOG = "log.txt"
CROP_TRL = (sys.executable, "-m", "crop_trl.commands")
_WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class PlannedRun:
    """A run with what stands before `crop-trl train` in its command and what follows."""

    run: NamedRun
    before: list[str]
    arguments: list[str]

    def command(self, output: Path, program: Iterable[str] = ("crop-trl",)) -> list[str]:
        """What starts it, on a port that is free."""
        words = [*self.before, *program, "train", *self.arguments, "--runs_dir", str(output)]
        ported = any(word.startswith(("--main_process_port", "--main-process-port")) for word in words)
        return words if ported else [*words, "--main_process_port", "0"]


def runs_of(grids: Iterable[Path], name: Callable[[list[str]], NamedRun]) -> dict[str, PlannedRun]:
    """Every run of some sweep files once, by its folder; `name` reads the arguments of `crop-trl train`."""
    found: dict[str, PlannedRun] = {}
    for grid in map(read_grid, grids):
        for command in grid.commands():
            before, arguments = train_arguments(command)
            run = name(arguments)
            if run.key in found:
                found[run.key].run.check_same(run.settings, f"{run.key} of {str(grid.path)!r}")
            found.setdefault(run.key, PlannedRun(run, before, arguments))
    return found


class Study:
    """
    Args:
        output (`Path`): Folder of all runs and their table.
        runs (`dict[str, PlannedRun]`): Those that are asked for, see [`runs_of`].
        others (`Iterable` of paths): Tables of other studies.
        defaults (`dict`): Settings that nobody sets.
        discard_models (`bool`): Whether weights and checkpoints go once a run's row is saved.
    """

    def __init__(self, output, runs, others, defaults, discard_models=False):
        self.output, self.runs, self.defaults, self.discard_models = output, runs, defaults, discard_models
        self.failed: list[str] = []
        self.table = output / rows.TABLE
        self.rows = rows.stored_rows([*others, *([self.table] if self.table.is_file() else [])])
        for key, planned in runs.items():
            if key in self.rows:
                planned.run.check_same(json.loads(self.rows[key]["settings"]), f"The row {key!r}")
            planned.run.check_folder(output / key)
        for key in rows.finished_in(output):
            self._collect(key)

    @property
    def left(self) -> list[str]:
        """Runs without a row."""
        return [key for key in self.runs if key not in self.rows]

    def tasks(self) -> list[Task]:
        """What is left to run."""
        return [Task(k, self.runs[k].command(self.output, CROP_TRL), self.output / k / LOG) for k in self.left]

    def _collect(self, key: str, **measured: Any) -> None:
        # What only the runner knows of it stays from a stored row.
        fresh = rows.row_of(self.output / key, key, self.defaults)
        self.rows[key] = {**self.rows.get(key, {}), **fresh, **measured}

    def save(self) -> None:
        """Write the table, then let go of models that are not to stay."""
        rows.write_rows(self.table, self.rows)
        for key in self.rows if self.discard_models else ():
            folder = self.output / key
            for path in [path for pattern in ("checkpoint-*", *_WEIGHTS) for path in folder.glob(pattern)]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def ended(self, end: Ended) -> None:
        """Save the row of a run that finished, show why another did not."""
        key, log = end.task.name, end.task.log
        if end.status == 0 and is_finished(self.output / key):
            self._collect(key, seconds=round(end.seconds, 1), disk_bytes=_size(self.output / key))
            self.save()
        else:
            self.failed.append(key)
            said = f"{key} failed with status {end.status}. The end of {log}:"
            tqdm.write("\n".join([said, *(f"    {line}" for line in last_lines(log))]))

    def outlook(self, jobs: int) -> str:
        """How much there is to do, and what it takes by the runs that are finished."""
        left = len(self.left)
        lines = [f"{len(self.runs)} runs: {len(self.runs) - left} finished, {left} to go, {jobs} at a time."]
        measured = [self.rows[key] for key in self.runs if self.rows.get(key, {}).get("seconds")]
        if left and measured:
            seconds = sum(row["seconds"] for row in measured) / len(measured)
            more = timedelta(seconds=round(seconds * math.ceil(left / jobs)))
            lines.append(f"About {more} more, at {seconds:.0f} seconds a run.")
        elif left:
            lines.append("The first run that finishes tells how long the others take.")
        if left and (each := self._disk(measured)) is not None:
            kept = min(left, jobs) if self.discard_models else left
            lines.append(f"They take {kept * each / 1e9:.2g} GB of disk; {_free(self.output) / 1e9:.0f} GB are free.")
        return " ".join(lines)

    def _disk(self, measured: list[rows.Row]) -> float | None:
        """Bytes of a run: measured, or by the numbers of weights of the students."""
        if measured:
            return max(row["disk_bytes"] for row in measured)
        found = []
        for planned in self.runs.values():
            settings = {**self.defaults, **planned.run.settings}
            if settings["use_peft"]:
                return None
            saved = settings["max_steps"] // settings["save_steps"] if settings["save_strategy"] == "steps" else 0
            saved = min(saved, settings["save_total_limit"] or saved)
            try:
                # Weights in float32, in a checkpoint with both moments of AdamW.
                found.append(shape_of(settings["model_name_or_path"]).parameters * (4 + 12 * saved))
            except (ValueError, TypeError):
                return None
        return max(found, default=None)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.absolute().parent
    return shutil.disk_usage(folder).free
