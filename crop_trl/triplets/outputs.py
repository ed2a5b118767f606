"""The files of an output directory, each replaced in one step so that a reader never sees half of one."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .prompts import Templates
from .record import PROBLEM_FIELDS, read_jsonl, write_jsonl, write_text
from .settings import TripletSettings
from .source import ProblemSet


class OutputDirectory:
    """
    Where a run writes.

    Args:
        path (`str` or `Path`):
            The directory; made when something is first written.
        clean (callable, *optional*):
            Takes secrets out of a text before it is written.

    Attributes:
        ledger (`Path`): Every answer (see [`Ledger`]).
        triplets (`Path`): Records with a complete triplet, for training.
        incomplete (`Path`): The other records: excluded inputs, and problems without a complete candidate.
        run (`Path`): Settings, templates, input counts, how the last run ended.
        reviews (`Path`): Verdicts of people, merged over all reviews.
        report_json, report_markdown, review_page (`Path`): What their names say.
    """

    def __init__(self, path: str | Path, clean: Callable[[str], str] = lambda text: text):
        self.path = Path(path)
        self._clean = clean
        self.ledger = self.path / "ledger.jsonl"
        self.triplets = self.path / "triplets.jsonl"
        self.incomplete = self.path / "incomplete.jsonl"
        self.run = self.path / "run.json"
        self.reviews = self.path / "reviews.json"
        self.report_json = self.path / "report.json"
        self.report_markdown = self.path / "report.md"
        self.review_page = self.path / "review.html"

    def save_settings(self, settings: TripletSettings, templates: Templates, problem_set: ProblemSet) -> None:
        """Write down what a run is about to do."""
        self.write_json(
            self.run,
            {
                "started": _now(),
                "settings": asdict(settings),
                "endpoint": settings.endpoint,
                "templates": {"version": templates.version, "texts": dict(templates.texts)},
                "input": {"problems": len(problem_set.problems), "duplicates": problem_set.duplicates},
            },
        )

    def save_end(
        self, unfinished: int, stopped: str | None, error: Exception | None, retries: Mapping[str, int]
    ) -> None:
        """Write down how a run ended."""
        ended = {
            "ended": _now(),
            "unfinished": unfinished,
            "stopped": stopped,
            "error": str(error) if error else None,
            "retries": dict(retries),
        }
        self.write_json(self.run, self.load_run() | ended)

    def load_run(self) -> dict[str, Any]:
        """
        What [`save_settings`] and [`save_end`] wrote.

        Raises:
            `ValueError`: there was no run in this directory.
        """
        try:
            return json.loads(self.run.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(
                f"`output` {str(self.path)!r} holds no run; generate triplets there first, or name another directory."
            ) from None

    def save_records(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write records, with the verdicts of people applied, to the file that each belongs in."""
        reviews = self.load_reviews()
        records = [apply_verdict(record, reviews.get(record["id"])) for record in records]
        write_jsonl(self.triplets, (record for record in records if record["triplet_complete"]))
        write_jsonl(self.incomplete, (record for record in records if not record["triplet_complete"]))

    def load_records(self) -> list[dict[str, Any]]:
        """All records, complete ones first."""
        self.load_run()
        return self.stored_records()

    def stored_records(self) -> list[dict[str, Any]]:
        """What [`save_records`] wrote, complete ones first; nothing where there was no run."""
        return [record for path in (self.triplets, self.incomplete) if path.exists() for record in read_jsonl(path)]

    def load_reviews(self) -> dict[str, dict[str, Any]]:
        """Record id to the last verdict on it."""
        return json.loads(self.reviews.read_text(encoding="utf-8")) if self.reviews.exists() else {}

    def write_json(self, path: Path, value: Any) -> None:
        """Write JSON for people and programs, without secrets."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(path, self._clean(json.dumps(value, indent=1, ensure_ascii=False)) + "\n")


def apply_verdict(record: Mapping[str, Any], verdict: Mapping[str, Any] | None) -> dict[str, Any]:
    """
    A record with a person's verdict on it.

    A rejection makes it unfit for training. An acceptance changes nothing: people check the critic, they do not replace
    it. A verdict on other texts than the record has now (the problem was asked anew) is left aside.
    """
    record = dict(record)
    if verdict and verdict["text_hash"] == text_hash(record):
        record["human_review"] = {name: verdict[name] for name in ("verdict", "note", "time")}
        if verdict["verdict"] == "reject":
            record |= {"usable_for_training": False, "validation_passed": False}
    return record


def text_hash(record: Mapping[str, Any]) -> str:
    """Tells whether a verdict and a record speak of the same three texts."""
    texts = json.dumps([record[name] for name in PROBLEM_FIELDS])
    return hashlib.sha256(texts.encode()).hexdigest()[:16]


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
