"""Compare training texts with benchmark problems.

    crop-trl audit --train triplets.jsonl --benchmark MATH-500=math500.jsonl --output audit
    crop-trl audit ... --verdicts verdicts.csv     # after judging audit/candidates.html

Without `--benchmark` the paper's four are taken from the hub and kept in `benchmarks/` of the output folder, for
`crop-trl evaluate` and for machines without a connection. Without `--train` that is all that is done.
"""

import argparse
import time
from pathlib import Path

from ..audit.compare import audit, read_benchmark, read_train
from ..audit.report import apply_verdicts, read_verdicts, write_report
from ..evaluation.benchmarks import NAMED, local_copy
from .errors import told
from .options import OptionParser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OptionParser("audit", __doc__)
    parser.add_argument("--train", nargs="+", metavar="FILE", help="rows with `problem`, or triplets")
    parser.add_argument(
        "--benchmark",
        nargs="+",
        action="extend",
        metavar="NAME[=FILE]",
        help=f"problems from a file, or one of {', '.join(NAMED)} from the hub; by default all of these",
    )
    parser.add_argument("--output", required=True, metavar="DIR")
    parser.add_argument("--verdicts", metavar="FILE", help="a CSV with a person's verdicts")
    parser.add_argument(
        "--min_similarity",
        type=float,
        default=0.3,
        help="least similarity of a candidate; half of it for what stands out within its problem, none for the ten "
        "strongest problems of a benchmark",
    )
    return parser.parse_args(argv)


def check_options(args: argparse.Namespace) -> dict[str, str]:
    """The benchmarks' files by name, empty for those of the hub. Raises `ValueError` for an option that is wrong."""
    if not 0 <= args.min_similarity <= 1:
        raise ValueError(f"`min_similarity` is {args.min_similarity}: choose a number in [0, 1].")
    files: dict[str, str] = {}
    for item in args.benchmark or NAMED:
        name, _, file = item.partition("=")
        if not name or not file and item not in NAMED:
            example = "for example MATH-500=math500.jsonl"
            raise ValueError(f"--benchmark {item!r} is not NAME=FILE, {example}, nor one of {', '.join(NAMED)}.")
        if name in files:
            raise ValueError(f"--benchmark names {name!r} twice; give each file a name of its own.")
        files[name] = file
    if not args.train and (args.verdicts or all(files.values())):
        raise ValueError("--train is not set; give files of training problems or triplets.")
    return files


def main(argv: list[str] | None = None) -> None:
    """Read, compare, write; the summary is printed."""
    with told(interrupted="Interrupted; no report was written, run the same command again."):
        args = parse(argv)
        files = check_options(args)
        verdicts = read_verdicts(args.verdicts) if args.verdicts else None
        own = {name: read_benchmark(name, file) for name, file in files.items() if file}
        train = read_train(args.train or ())
        copies = {name: local_copy(name, Path(args.output, "benchmarks")) for name in files if not files[name]}
        for name, file in copies.items():
            print(f"{name}: {file}")
        if not args.train:
            return
        benchmarks = {name: own.get(name) or read_benchmark(name, copies[name]) for name in files}
        started = time.monotonic()
        result = audit(train, benchmarks, args.min_similarity)
        result.seconds = time.monotonic() - started
        if verdicts is not None:
            apply_verdicts(result, verdicts)
        text = write_report(result, args.output, judged=verdicts is not None)
    print(text)
    print(f"Candidates to judge: {args.output}/candidates.html (the same in candidates.csv)")


if __name__ == "__main__":
    main()
