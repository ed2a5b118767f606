"""Run every training run of a grid, a W&B sweep file, on this machine, and make tables of what they came to.

    crop-trl study examples/studies/tiny.yaml --output runs/tiny --jobs 2
    crop-trl study examples/studies/tiny.yaml --output runs/tiny --table --against random
    crop-trl study examples/studies/tiny.yaml --output runs/one --only method=crop seed=0
    crop-trl study examples/studies/table1_a.yaml --output runs/paper --table --benchmarks AIME24 AMC23 -- --setting A

The same file goes to `wandb sweep`, for many machines. A run that is finished is never repeated, one that was killed
goes on from its last checkpoint. The row of each finished run is in DIR/runs.parquet at once; where that file is taken
to another machine, its runs count as finished there.
"""

import argparse
import math
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from tqdm import tqdm

from ..checks import check_number
from ..files import alone_in, write_text
from ..studies.naming import NamedRun, named_run
from ..studies.running import run_tasks, samplers
from ..studies.study import CROP_TRL, PlannedRun, Study, chosen_runs, runs_of
from ..studies.tables import check_against, study_markdown
from .errors import told
from .launch import split_options
from .options import OptionParser
from .train import read_settings, train_parser

# Options of `crop-trl evaluate` that are a run's own, and what it does beside evaluating one.
_OF_EACH_RUN = ("model", "model_revision", "output", "label", "training_run", "benchmark", "regrade", "compare")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line. Raises `ValueError` for what is wrong in it."""
    parser = OptionParser("study", __doc__)
    parser.add_argument("grid", nargs="*", type=Path, metavar="GRID.yaml", help="W&B sweep files with `method: grid`")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of all runs and the table")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME=VALUE", help="of the grids' runs those with these settings"
    )
    parser.add_argument("--jobs", type=int, help="runs side by side; by default one, or one on each of --gpus")
    parser.add_argument("--gpus", help="numbers such as 0,1: runs are dealt over them; by default each run sees all")
    parser.add_argument("--dry_run", action="store_true", help="print every command, start none")
    parser.add_argument("--table", action="store_true", help="make the tables of what is finished, train nothing")
    parser.add_argument("--rows", nargs="+", default=[], metavar="FILE", help="tables of other studies to go on from")
    parser.add_argument(
        "--sample_together",
        action="store_true",
        help="one process on each GPU samples for all runs there, whose students have one architecture and whose "
        "grid sets `use_cuda_graphs`",
    )
    parser.add_argument(
        "--discard_models", action="store_true", help="delete weights and checkpoints once a run's row is saved"
    )
    tables = parser.add_argument_group("tables")
    tables.add_argument("--against", metavar="METHOD", help="compare all methods with this one, seed by seed")
    tables.add_argument(
        "--benchmarks", nargs="+", default=[], help="what `crop-trl evaluate` measures first; its options follow a --"
    )
    tables.add_argument("--average", choices=("clean", "whole"), default="clean", help="what Avg. counts, as there")
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:end])
    args.evaluate_options = argv[end + 1 :]
    args.gpus = list(dict.fromkeys(name.strip() for name in args.gpus.split(","))) if args.gpus else []
    for name in args.gpus:
        if not re.fullmatch(r"\d+|(GPU|MIG)-.+", name):
            raise ValueError(f"`--gpus` names {name!r}, which is no GPU; give numbers such as 0,1.")
    for each in args.only:
        if "=" not in each:
            raise ValueError(f"`--only` takes settings such as method=crop, got {each!r}.")
    if not args.table and (args.against or args.benchmarks):
        raise ValueError("`--against` and `--benchmarks` are for tables; add `--table` once the runs are finished.")
    if args.evaluate_options and not args.benchmarks:
        raise ValueError("What stands after -- goes to `crop-trl evaluate`; name what it measures by `--benchmarks`.")
    if args.table and args.discard_models:
        raise ValueError("`--discard_models` goes with training, and `--table` may need models; leave one of them out.")
    args.jobs = max(1, len(args.gpus)) if args.jobs is None else args.jobs
    check_number("jobs", args.jobs, 1, whole=True)
    if not args.grid and not args.table:
        raise ValueError("No GRID.yaml is given; name one, or say `--table` for the tables of what is there.")
    return args


def name_run(arguments: list[str]) -> NamedRun:
    """The run that `crop-trl train` makes with some arguments. Raises `ValueError` for what it would refuse."""
    parser = train_parser()
    file, given = parser.layers(split_options(arguments)[1])
    if "output_dir" in given:
        raise ValueError("`output_dir` in a grid would be the folder of all runs; take it out, `--output` names them.")
    return named_run(parser.defaults(), file, given)


def refusal(planned: PlannedRun, options: list[str]) -> str | None:
    """Why `crop-trl train` would not start, or refuse its arguments before it looks at devices, data and models."""
    from ..runs import check_settings

    if planned.before and not shutil.which(planned.before[0]):
        return f"`command` starts {planned.before[0]!r}, and there is no such program here; mend it or leave it out."
    try:
        check_settings(read_settings(split_options([*planned.arguments, *options])[1])[0])
    except (ValueError, OSError) as error:
        return str(error)


def train(study: Study, args: argparse.Namespace) -> None:
    """Run what is left."""
    study.discard()
    print(study.outlook(args.jobs))
    first = True
    with tqdm(total=len(study.runs), initial=len(study.runs) - len(study.left), unit="run", smoothing=0) as bar:

        def ended(task, status):
            nonlocal first
            study.ended(task, status)
            study.discard()
            bar.update()
            check()
            if row := study.rows.get(task.name):
                before, after = (row[f"accuracy_{when}"] for when in ("before", "after"))
                measured = "" if None in (before, after) else f": {before:.1%} before, {after:.1%} after"
                tqdm.write(f"{task.name} is finished{measured}.")
                if first:
                    tqdm.write(study.outlook(args.jobs))
                first = False

        places = math.ceil(min(args.jobs, len(study.left)) / max(1, len(args.gpus))) * args.sample_together
        with samplers(args.output, args.gpus, places) as (options, check):
            run_tasks(study.tasks(options), args.jobs, args.gpus, ended)


@contextmanager
def alone(study: Study, args: argparse.Namespace) -> Iterator[None]:
    """Keep a second study out of the folder, and save the rows that are there by then."""
    with alone_in(args.output / ".lock", f"`output` {str(args.output)!r}"):
        study.read()
        study.save()
        yield


def measure(study: Study, args: argparse.Namespace) -> None:
    """Evaluate what is to be evaluated. Raises `ValueError` or `OSError` for what `crop-trl evaluate` would refuse."""
    from . import evaluate

    def read(words: list[str]) -> argparse.Namespace:
        read = evaluate.parse(words)
        evaluate.check_options(read)
        return read

    given = evaluate.parse(args.evaluate_options)
    for name in _OF_EACH_RUN:
        if getattr(given, name):
            raise ValueError(f"`--{name}` after -- would be that of every run, and a study sets it; take it out.")
    options = ["--benchmark", *args.benchmarks, *args.evaluate_options]
    benchmarks = evaluate.load_benchmarks(read(options))
    tasks = study.evaluations(options, benchmarks, lambda words: evaluate.plan_of(read(words), benchmarks))
    if args.dry_run:
        for task in tasks:
            print(f"# {task.name}\n{shlex.join(['crop-trl', *task.command[len(CROP_TRL) :]])}")
        return
    if tasks and given.sampler == "vllm" and not find_spec("vllm"):
        raise ImportError("`--benchmarks` needs vLLM: install crop-trl[vllm], or end the command with -- --sampler hf.")
    with tqdm(total=len(tasks), unit="model", smoothing=0) as bar:
        run_tasks(tasks, args.jobs, args.gpus, lambda *end: (study.ended(*end), bar.update()))


def tabulate(study: Study, args: argparse.Namespace) -> None:
    """Print the tables, and write them where that is possible."""
    text = study_markdown(study.asked.values(), study.defaults, args.against, args.average)
    print(text)
    if args.dry_run:
        return
    try:
        with alone(study, args):
            write_text(args.output / "tables.md", text)
    except (ValueError, OSError) as error:  # a folder to read only, or of a study that runs and saves its own rows
        print(f"The tables are printed only: {error}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Train, tabulate, or show what would be run. Returns 1 where a run failed."""
    with told(interrupted="Interrupted; the runs that this study had started are stopped. The same command goes on."):
        args = parse(argv)
        defaults = train_parser().defaults()
        runs = chosen_runs(runs_of(args.grid, name_run), args.only)
        study = Study(args.output, runs, args.rows, defaults, args.discard_models)
        options = ["--shared_sampler", "of this study"] if args.sample_together else []
        refused = {} if args.table else {k: why for k in study.left if (why := refusal(study.runs[k], options))}
        if args.dry_run and not args.table:
            for key, planned in study.runs.items():
                state = "finished" if key in study.rows else "to run" if key in study.left else "failed, as said above"
                state = f"would be refused. {refused[key]}" if key in refused else state
                print(f"# {key}: {state}\n{shlex.join(planned.command(args.output))}")
            print(study.outlook(args.jobs))
            return bool(refused or study.failed)
        for key, why in refused.items():
            raise ValueError(f"{key}: {why}")
        if args.table and not study.asked:
            raise ValueError(
                f"`output` {str(args.output)!r} holds no finished run{' of these grids' * bool(args.grid)}; leave out "
                "`--table` to run them first."
            )
        if args.against:
            planned = {run.run.settings.get("method", defaults["method"]) for run in study.runs.values()}
            measured = {row["method"] for row in study.asked.values()} | ({"base"} if args.benchmarks else set())
            check_against(args.against, planned | measured)
        if args.dry_run and args.benchmarks:
            measure(study, args)
            return bool(study.failed)
        if not args.table or args.benchmarks:
            with alone(study, args):
                (measure if args.table else train)(study, args)
        if args.table:
            tabulate(study, args)
    if study.failed:
        again = "Once what is said above is mended, the same command tries them again."
        print(f"{len(study.failed)} failed: {', '.join(study.failed)}. {again}")
    elif not args.table:
        print(f"All runs are finished; their rows are in {study.table}.")
    return bool(study.failed)


if __name__ == "__main__":
    sys.exit(main())
