"""Make, check and report original-paraphrase-counterfactual triplets with an OpenAI-compatible or a local model.

    export OPENAI_API_KEY=...
    crop-trl triplets --input problems.jsonl --output triplets --max-cost 50
    crop-trl triplets --input problems.jsonl --output local --engine vllm --model Qwen/Qwen3-8B --rules numbers

Run the same command again to go on after an interruption. An endpoint needs `pip install crop-trl[openai]`.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ..text import say
from ..triplets.client import EndpointError
from ..triplets.estimate import dry_run
from ..triplets.ledger import LedgerError
from ..triplets.pipeline import generate_triplets
from ..triplets.report import write_report
from ..triplets.review import apply_review, write_review_page
from ..triplets.settings import TripletSettings
from .errors import told
from .options import SettingsParser


@dataclass
class Task:
    """What to do; without any of these, triplets are generated and the report is printed."""

    dry_run: bool = field(default=False, metadata={"help": "Show two requests and an estimate; send nothing."})
    report: bool = field(default=False, metadata={"help": "Print and write the report on an output directory."})
    counts: str | None = field(
        default=None,
        metadata={
            "help": "Config file of a training run: count the rows from the source to its steps, beside the paper's."
        },
    )
    review: int | None = field(default=None, metadata={"help": "Write an HTML page to check so many triplets by hand."})
    seed: int = field(default=42, metadata={"help": "Seed of the sample for `review`."})
    apply_review: str | None = field(default=None, metadata={"help": "JSON file that the review page saved."})


def main(argv: list[str] | None = None) -> int:
    """Do what is asked for. Returns 3 when triplets are left to make."""
    interrupted = "Interrupted. What was answered is kept; run again to go on."
    with told(ValueError, OSError, LedgerError, EndpointError, interrupted=interrupted):
        settings, task = SettingsParser("triplets", (TripletSettings, Task), __doc__).read(argv)
        asked = [name for name, value in vars(task).items() if name != "seed" and value not in (None, False)]
        if len(asked) > 1:
            raise ValueError(f"`{asked[0]}` and `{asked[1]}` are two tasks; give one at a time.")
        if task.dry_run:
            show(dry_run(settings))
        elif task.counts:
            show(counts(settings, task.counts))
        elif task.review is not None:
            show(f"Open {write_review_page(settings.output, task.review, task.seed)} in a browser.")
        elif task.apply_review:
            show(apply_review(settings.output, Path(task.apply_review)))
        elif task.report:
            show(write_report(settings.output))
        else:
            return generate(settings)
    return 0


def counts(settings: TripletSettings, config: str) -> str:
    """The counts beside the paper's, for a training run with this `--config` file."""
    # The training stack takes seconds, which those who make triplets need not wait.
    from ..planning.counts import counts_markdown
    from .train import train_parser

    parser = train_parser()
    return counts_markdown(settings, {**parser.defaults(), **parser.settings(["--config", config])})


def generate(settings: TripletSettings) -> int:
    """Make triplets and show the report. What ended a run early is said even if the report cannot be written."""
    result = generate_triplets(settings)
    try:
        show(write_report(settings.output))
    except OSError as error:
        raise result.error or error from None
    if result.error:
        raise result.error
    if result.stopped:
        left = result.problems - len(result.records)
        say(f"Stopped ({result.stopped}), {left} problems not finished this time; run again to go on.")
        return 3
    return 0


def show(text: str) -> None:
    """Print in any terminal; a reader such as `head` that has seen enough ends the printing and nothing else."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends


if __name__ == "__main__":
    sys.exit(main())
