"""Make, check and report original-paraphrase-counterfactual triplets with any OpenAI-compatible model.

    export OPENAI_API_KEY=...
    python examples/generate_triplets.py --input problems.jsonl --output triplets --max-cost 50

Run the same command again to go on after an interruption. Needs `pip install -e .[openai]`.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser

from crop_trl.triplets.client import EndpointError
from crop_trl.triplets.estimate import dry_run
from crop_trl.triplets.ledger import LedgerError
from crop_trl.triplets.pipeline import generate_triplets
from crop_trl.triplets.report import write_report
from crop_trl.triplets.review import apply_review, write_review_page
from crop_trl.triplets.settings import TripletSettings


@dataclass
class Task:
    """What to do; without any of these, triplets are generated and the report is printed."""

    dry_run: bool = field(default=False, metadata={"help": "Show two requests and an estimate; send nothing."})
    report: bool = field(default=False, metadata={"help": "Print and write the report on an output directory."})
    review: int | None = field(default=None, metadata={"help": "Write an HTML page to check so many triplets by hand."})
    seed: int = field(default=42, metadata={"help": "Seed of the sample for `review`."})
    apply_review: str | None = field(default=None, metadata={"help": "JSON file that the review page saved."})


def main() -> int:
    parser = HfArgumentParser((TripletSettings, Task), description=__doc__.splitlines()[0])
    try:
        settings, task = parser.parse_args_into_dataclasses()
        if task.dry_run:
            print(dry_run(settings))
        elif task.review is not None:
            print(f"Open {write_review_page(settings.output, task.review, task.seed)} in a browser.")
        elif task.apply_review:
            print(apply_review(settings.output, Path(task.apply_review)))
        elif task.report:
            print(write_report(settings.output))
        else:
            result = generate_triplets(settings)
            print(write_report(settings.output))
            if result.error:
                raise result.error
            if result.stopped:
                left = result.problems - len(result.records)
                print(f"Stopped ({result.stopped}), {left} problems left; run again to go on.", file=sys.stderr)
                return 3
    except (ValueError, OSError, LedgerError, EndpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
