"""Compare training texts with benchmark problems.

python examples/audit_contamination.py --train triplets.jsonl --benchmark MATH-500=math500.jsonl --output audit
python examples/audit_contamination.py ... --verdicts verdicts.csv     # after judging audit/candidates.html
"""

import argparse
import sys
import time
from pathlib import Path

from crop_trl.audit.compare import audit, check_limits, read_benchmark, read_train
from crop_trl.audit.report import apply_verdicts, read_verdicts, summary_markdown, write_report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs="+", required=True, metavar="FILE", help="rows with `problem`, or triplets")
    parser.add_argument("--benchmark", nargs="+", action="extend", required=True, metavar="NAME=FILE")
    parser.add_argument("--output", required=True, metavar="DIR")
    parser.add_argument("--verdicts", metavar="FILE", help="a CSV with a person's verdicts")
    parser.add_argument(
        "--min_similarity",
        type=float,
        default=0.3,
        help="least similarity of a candidate; the ten strongest of a benchmark are listed in any case",
    )
    parser.add_argument("--per_problem", type=int, default=5, help="most candidate texts for one benchmark problem")
    args = parser.parse_args()
    try:
        check_limits(args.min_similarity, args.per_problem)
        if Path(args.output).exists() and not Path(args.output).is_dir():
            raise ValueError(f"--output {args.output!r} is a file: name a folder.")
        names = [item.partition("=")[0] for item in args.benchmark if "=" in item]
        wrong = [item for item in args.benchmark if not item.partition("=")[0] or not item.partition("=")[2]]
        if wrong:
            raise ValueError(f"--benchmark {wrong[0]!r} is not NAME=FILE, for example MATH-500=math500.jsonl.")
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"--benchmark names {twice[0]!r} twice; give each file a name of its own.")
        verdicts = read_verdicts(args.verdicts) if args.verdicts else None
        benchmarks = {name: read_benchmark(file) for name, _, file in (item.partition("=") for item in args.benchmark)}
        train = read_train(args.train)
        started = time.monotonic()
        result = audit(train, benchmarks, args.min_similarity, args.per_problem)
        result.seconds = time.monotonic() - started
        if verdicts is not None:
            apply_verdicts(result, verdicts)
        write_report(result, args.output, judged=verdicts is not None)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("Interrupted; nothing was written, run the same command again.")
    print(summary_markdown(result, judged=verdicts is not None))
    print(f"Candidates to judge: {args.output}/candidates.html (the same in candidates.csv)")


if __name__ == "__main__":
    main()
