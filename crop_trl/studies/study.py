"""The runs of some grids and the rows that there are, in one folder: what is left, what it takes, what came of it."""

import json
import math
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..evaluation.run import Plan, told_apart
from ..planning.shape import shape_of
from ..training.results import RunResult
from . import rows
from .grid import read_grid, train_arguments
from .naming import KEPT, LOCK, OF_STUDENT, SETTINGS, NamedRun, OtherRunError, is_finished, joined
from .running import Task, last_lines

LOG = "log.txt"
CROP_TRL = (sys.executable, "-m", "crop_trl.commands")
_UNTRAINED = "method=base"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


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
        own = set()
        for command in grid.commands():
            before, arguments = train_arguments(command)
            run = name(arguments)
            if run.key in own:
                raise ValueError(
                    f"{str(grid.path)!r} has {run.key} twice; take out a value that is there twice, or a parameter "
                    "that changes no run, such as `num_processes`."
                )
            own.add(run.key)
            if run.key in found:
                found[run.key].run.check_same(run.own_settings, f"{run.key} of {str(grid.path)!r}")
            found.setdefault(run.key, PlannedRun(run, before, arguments))
    return found


def chosen_runs(runs: Mapping[str, PlannedRun], wanted: Iterable[str]) -> dict[str, PlannedRun]:
    """
    Those with some settings, each `NAME=VALUE`; of two values of one setting either will do. Raises `ValueError` where
    there is none.
    """
    values: dict[str, list[str]] = {}
    for each in wanted:
        values.setdefault(each.partition("=")[0], []).append(_as_text(_as_value(each.partition("=")[2])))
    for name, those in values.items():
        have = {k: _as_text({**each.run.defaults, **each.run.settings}.get(name)) for k, each in runs.items()}
        if not set(those) & set(have.values()):
            raise ValueError(
                f"`--only`: no run has {name}={those[0]}; there is {', '.join(dict.fromkeys(have.values()))}."
            )
        runs = {key: each for key, each in runs.items() if have[key] in those}
    return dict(runs)


def _as_value(text: str) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    return text


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


class Study:
    """Runs that are asked for and rows that there are, of a folder and of other studies' tables."""

    def __init__(self, output, runs, others, defaults, discard_models=False):
        self.output, self.runs, self.defaults, self.discard_models = output, runs, defaults, discard_models
        self.others, self.table = others, output / rows.TABLE
        self.failed: list[str] = []
        self.students: dict[str, NamedRun] = {}  # whose rows come with what they are measured on
        self.read()

    def read(self) -> None:
        """Take in what there is; once more when nobody else writes, or what came in between would be lost."""
        self.rows: dict[str, rows.Row] = {}
        self._known = {key: (planned.run, "this one") for key, planned in self.runs.items()}
        for file in (*self.others, *([self.table] if self.table.is_file() else [])):
            for row in rows.stored_rows(file):
                self._add(row, file)
        finished = rows.finished_in(self.output)
        for key in dict.fromkeys([*self.runs, *finished]):
            with self._failing(key, OtherRunError):
                if key in self.runs:
                    self.runs[key].run.check_folder(self.output / key)
                if key in finished:
                    self._collect(key)

    @property
    def left(self) -> list[str]:
        """Runs that have no row and did not fail."""
        return [key for key in self.runs if key not in self.rows and key not in self.failed]

    def tasks(self, options: Iterable[str] = ()) -> list[Task]:
        """What is left to run, with some more options for each."""
        found = []
        for key in self.left:
            command = [*self.runs[key].command(self.output, CROP_TRL), *options]
            found.append(Task(key, command, self.output / key / LOG, self.output / key / LOCK))
        return found

    @property
    def asked(self) -> dict[str, rows.Row]:
        """Rows of the runs that are named, with the untrained students of their worlds; all rows where none is."""
        worlds = {planned.run.world for planned in self.runs.values()}

        def is_asked(key: str, row: rows.Row) -> bool:
            return not worlds or key in self.runs or row["method"] == "base" and row["world"] in worlds

        return {key: row for key, row in self.rows.items() if is_asked(key, row)}

    def _untrained(self) -> dict[str, NamedRun]:
        """Each student of a world that has no row of it untrained: tables of benchmarks begin with these."""
        worlds, measured = {}, []
        for row in self.asked.values():
            settings = {**self.defaults, **json.loads(row["settings"])}
            student = {name: settings.get(name) for name in OF_STUDENT}
            students = worlds.setdefault(row["world"], [])
            students += [student] * (student not in students)
            measured += [(row["world"], student)] * (row["method"] == "base")
        runs = []
        for world, students in worlds.items():
            apart = [name for name in OF_STUDENT if any(each[name] != students[0][name] for each in students)]
            for student in (each for each in students if (world, each) not in measured):
                name = joined(_UNTRAINED, {name: student[name] for name in apart})
                runs.append(NamedRun(world, name, {**student, "method": "base"}, self.defaults))
        return {run.key: run for run in runs}

    def evaluations(self, options, benchmarks, plan_of) -> list[Task]:
        """
        `crop-trl evaluate` with these options for each finished run whose model is here and that lacks one of these
        benchmarks. Raises `ValueError` where one that lacks none was asked otherwise than `plan_of` the options says.
        """
        self.students = self._untrained()
        students = {k: {"method": "base", "settings": json.dumps(run.settings)} for k, run in self.students.items()}
        found, gone = [], 0
        for key, row in {**self.asked, **students}.items():
            folder = self.output / key
            settings = {**self.defaults, **json.loads(row["settings"])}
            trained = row["method"] != "base"
            model = folder if trained else settings["model_name_or_path"]
            words = ["evaluate", "--model", str(model), "--label", row["method"]]
            words += ["--output", str(folder / rows.EVALUATION)]
            done = json.loads(row.get("evaluation") or "{}")
            if trained and folder.is_dir():  # how problems are put to a model lies beside it
                words += ["--training_run", str(folder)]
            else:
                drawn = (part["drawn"] for part in done.values() if trained and part.get("drawn"))
                words += _how_asked(next(drawn, settings))
            if not trained and settings.get("model_revision") not in (None, "main"):
                words += ["--model_revision", settings["model_revision"]]
            words += options
            sizes = {name: (part["samples"], part["problems"]) for name, part in done.items()}
            if all(sizes.get(each.name) == (each.samples, len(each.examples)) for each in benchmarks):
                _check_same(key, done, plan_of(words[1:]))
                continue
            if trained and not _weights_in(folder):
                gone += 1
                continue
            found.append(Task(key, [*CROP_TRL, *words], folder / "evaluation.txt"))
        if gone:
            print(f"{gone} finished runs have no weights here and are not measured.")
        return found

    def ended(self, task: Task, status: int | OSError) -> None:
        """Save the row of a run that finished or was evaluated, show what went wrong."""
        with self._failing(task.name):
            if isinstance(status, OSError):
                raise status
            if status == 0 and task.name in self.students:
                run = self.students[task.name]
                run.claim(self.output / run.key)
                RunResult("base", None, None, seed={**self.defaults, **run.settings}["seed"]).write(
                    self.output / run.key
                )
            finished, is_new = is_finished(self.output / task.name), task.name not in self.rows
            if status or not finished:
                how = f"failed with status {status}"
                how = f"was ended by signal {-status} ({signal.strsignal(-status)})" if status < 0 else how
                how = f"{how} after its result" if finished and is_new else how if status else "ended without a result"
                said = f"{task.name} {how}. The end of {task.log}:"
                tqdm.write("\n".join([said, *(f"    {line}" for line in last_lines(task.log))]))
            if finished and (is_new or status == 0):
                self._collect(task.name)
                self.save()
            else:
                self.failed.append(task.name)

    def _collect(self, key: str) -> None:
        folder = self.output / key
        self._add(rows.row_of(folder, key, self.defaults), folder / SETTINGS)

    def _add(self, row: rows.Row, file: str | Path) -> None:
        """Take a row in. Raises [`OtherRunError`] where what is known under its name is another run."""
        key, settings = row["run"], json.loads(row["settings"])
        name = key.partition("/")[2]
        if name == _UNTRAINED:
            settings = {name: value for name, value in settings.items() if name in ("method", *OF_STUDENT)}
        run = NamedRun(row["world"], name, settings, self.defaults)
        known, where = self._known.setdefault(key, (run, repr(str(file))))
        known.check_same(settings, f"{key} of {str(file)!r}", where)
        self.rows[key] = rows.merged(self.rows.get(key, {}), row)

    @contextmanager
    def _failing(self, key: str, *passing: type[Exception]) -> Iterator[None]:
        """Say what is wrong with one run, and leave the others as they are."""
        try:
            yield
        except passing:
            raise
        except (OSError, ValueError) as error:
            if key not in self.failed:
                self.failed.append(key)
                tqdm.write(f"{key} failed: {error}")

    def save(self) -> None:
        """Write the table."""
        rows.write_rows(self.table, self.rows)

    def discard(self) -> None:
        """Delete the checkpoints of runs that have a row, and models that are not to stay."""
        # Those of runs that were not asked for are not ours to delete.
        for folder in (self.output / key for key in self.runs if key in self.rows):
            for path in [*folder.glob("checkpoint-*"), *(_weights_in(folder) if self.discard_models else ())]:
                path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path, ignore_errors=True)

    def outlook(self, jobs: int) -> str:
        """How much there is to do, and what it takes by the runs that are finished."""
        left = len(self.left)
        lines = [f"Runs: {len(self.runs.keys() & self.rows)} finished, {left} to go, {jobs} at a time."]
        measured = [row["seconds"] for key, row in self.rows.items() if key in self.runs and row.get("seconds")]
        if left and measured:
            seconds = sum(measured) / len(measured)
            more = timedelta(seconds=round(seconds * math.ceil(left / jobs)))
            lines.append(f"About {more} more, at {seconds:.0f} seconds a run.")
        elif left:
            lines.append("The first run that finishes tells how long the others take.")
        if left and (size := self._disk(jobs)):
            lines.append(f"They take {_gigabytes(size)} of disk at most; {_gigabytes(_free(self.output))} are free.")
        return " ".join(lines)

    def _disk(self, jobs: int) -> float:
        """Bytes of what is left, as far as students are known: all weights, and the checkpoints of those that run."""
        staying, passing = 0, []
        for key in self.left:
            settings = {**self.defaults, **self.runs[key].run.settings}
            # In float32; a checkpoint has both moments of AdamW too, and under DeepSpeed two copies in 16 bits.
            weights = 4 * _parameters(settings["model_name_or_path"] or "") * (not settings["use_peft"])
            passing.append(4 * weights * _checkpoints(settings) + weights * self.discard_models)
            staying += weights * (not self.discard_models)
        return staying + sum(sorted(passing)[-jobs:])


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.0f} GB" if size > 1e10 else f"{size / 1e9:.2g} GB"


def _how_asked(settings: Mapping[str, Any]) -> list[str]:
    """Options of `crop-trl evaluate` that put problems to a model as a run with these settings does."""
    options = settings["chat_template_kwargs"] or {}
    options = options if isinstance(options, str) else json.dumps(options)
    form = "--conversational" if settings["conversational"] else "--no-conversational"
    return ["--prompt_template", settings["prompt_template"], "--chat_template_kwargs", options, form]


def _check_same(key: str, evaluation: Mapping[str, Any], plan: Plan) -> None:
    """Raise `ValueError` where what a row has was asked otherwise than is planned."""
    for benchmark in plan.stores():
        wanted = told_apart(plan.settings(benchmark))
        drawn = evaluation[benchmark.name].get("drawn") or wanted
        for name in wanted:
            if drawn.get(name) != wanted[name]:
                raise ValueError(
                    f"{key} was evaluated on {benchmark.name!r} with {name} {drawn.get(name)!r}, not {wanted[name]!r}; "
                    "ask as before, or delete its evaluation and the tables that have its row."
                )


def _weights_in(folder: Path) -> list[Path]:
    return [path for pattern in _WEIGHTS for path in folder.glob(pattern)]


def _checkpoints(settings: Mapping[str, Any]) -> int:
    """How many a run has at once at most; 0 where that is not known."""
    steps, every, limit = (settings[name] for name in ("max_steps", "save_steps", "save_total_limit"))
    if settings["save_strategy"] != "steps" or steps < 1 or every <= 0:
        return 0
    saved = int(steps // (every if every >= 1 else math.ceil(every * steps)))
    # One is deleted after the next is written.
    return min(saved, max(limit, KEPT) + 1) if limit else saved


@cache
def _parameters(model: str) -> int:
    try:
        return shape_of(model, offline=True).parameters
    except ValueError:
        return 0


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.absolute().parent
    return shutil.disk_usage(folder).free
