"""The files of an output directory, each replaced in one step so that a reader never sees half of one."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..files import read_jsonl, read_object, write_jsonl, write_text
from .candidates import PASSED, STATUSES
from .prompts import Templates
from .record import FLAGS, PROBLEM_FIELDS
from .settings import TripletSettings
from .source import ProblemSet, folded

_NEEDED = {"id", "original_problem", "status", *FLAGS}
_REMEDY = "move it away (answers and records do not depend on it)"


class OutputDirectory:
    """Where a run writes; `clean` takes secrets out of a text before it is written."""

    def __init__(self, path: str | Path, clean: Callable[[str], str] = lambda text: text):
        self.path = Path(path)
        self._clean = clean
        self.ledger = self.path / "ledger.jsonl"
        self.triplets = self.path / "triplets.jsonl"  # records with a complete triplet, for training
        self.incomplete = self.path / "incomplete.jsonl"  # the others
        # Settings, templates and counts of the run that wrote the records, and how it ended; under `begun` the same of
        # a later run that has not ended.
        self.run = self.path / "run.json"
        self.reviews = self.path / "reviews.json"  # verdicts of people: record id -> hash of the texts -> verdict
        self.report_json = self.path / "report.json"
        self.report_markdown = self.path / "report.md"
        self.review_page = self.path / "review.html"

    def clear_leftovers(self) -> None:
        """Remove what a process that was killed while writing has left; for the holder of the ledger alone."""
        for leftover in self.path.glob(".*.partial"):
            leftover.unlink(missing_ok=True)

    def save_settings(self, settings: TripletSettings, templates: Templates, problem_set: ProblemSet) -> None:
        """Write down what a run is about to do, beside what the records that are there now come from."""
        facts = {
            "started": now(),
            "settings": asdict(settings),
            "endpoint": settings.endpoint,
            "templates": {"version": templates.version, "texts": dict(templates.texts)},
            "input": {"problems": len(problem_set.problems), "duplicates": problem_set.duplicates},
        }
        earlier = self.load_run() if self.run.exists() else {}
        self.write_json(self.run, earlier | {"begun": facts} if "ended" in earlier else facts)

    def save_end(self, **facts: Any) -> None:
        """Write down how a run ended."""
        run = self.load_run()
        self.write_json(self.run, run.get("begun", run) | {"ended": now()} | facts)

    def load_run(self) -> dict[str, Any]:
        """What [`save_settings`] and [`save_end`] wrote. Raises `ValueError` where there was no run."""
        try:
            return read_object(self.run, _REMEDY)
        except (FileNotFoundError, NotADirectoryError):
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
        """All records of a run, complete ones first."""
        self.load_run()
        return self.stored_records()

    def stored_records(self) -> list[dict[str, Any]]:
        """What [`save_records`] wrote, complete ones first; nothing where there was no run."""
        records: dict[str, dict[str, Any]] = {}
        for path in (self.triplets, self.incomplete):
            for record in read_jsonl(path) if path.exists() else ():
                if not _NEEDED <= record.keys():
                    raise ValueError(f"{path} holds something other than this program's records; move it away.")
                # A process killed between the two files leaves a record in both: the complete one is the later one.
                records.setdefault(record["id"], record)
        return list(records.values())

    def load_reviews(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Record id to hash of its texts (see [`text_hash`]) to the last verdict on them."""
        return read_object(self.reviews, _REMEDY) if self.reviews.exists() else {}

    def write_json(self, path: Path, value: Any) -> None:
        """Write JSON for people and programs, without secrets."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(path, self._clean(json.dumps(value, indent=1, ensure_ascii=False)) + "\n")


def merge_records(
    records: Sequence[dict[str, Any]], stored: Iterable[dict[str, Any]], problem_set: ProblemSet
) -> tuple[list[dict[str, Any]], Counter]:
    """What a run finished, and what earlier runs stored that it did not replace, by reason: `elsewhere` (not in this
    input), `unfinished` (this run did not get there), `failed`.

    A stored record goes only for one of the same id, or where this run was told to leave out duplicates and it is one.
    It also stays when the new one lacks an answer that failed to come, unless that one got further."""
    merged = {record["id"]: record for record in records}
    texts = {problem.id: problem.text for problem in problem_set.problems}
    duplicated = {folded(text) for text in texts.values()} if problem_set.duplicates["left_out"] else set()
    kept: Counter = Counter()
    others = []
    for record in stored:
        identifier = record["id"]
        if identifier not in texts:
            if folded(record["original_problem"]) not in duplicated:
                others.append(record)
                kept["elsewhere"] += 1
        elif identifier not in merged:
            merged[identifier] = record
            kept["unfinished"] += 1
        elif record["original_problem"] == texts[identifier] and _progress(record) > _progress(merged[identifier]):
            merged[identifier] = record
            kept["failed"] += 1
    return [merged[identifier] for identifier in texts if identifier in merged] + others, kept


def _progress(record: Mapping[str, Any]) -> int:
    """0 where every answer came; below, records that lack one by how far they got."""
    rounds = record.get("rounds") or [{"failed": None}]
    return 0 if rounds[-1]["failed"] is None else -STATUSES.index(record["status"])


def find_replaced(stored: Iterable[Mapping[str, Any]], problem_set: ProblemSet) -> list[str]:
    """Ids under which the input has another text than the stored record; for most of them, a `ValueError`."""
    texts = {problem.id: folded(problem.text) for problem in problem_set.problems}
    shared = [record for record in stored if record["id"] in texts]
    other = [record["id"] for record in shared if folded(record["original_problem"]) != texts[record["id"]]]
    if 2 * len(other) > len(shared):
        raise ValueError(
            f"`output` holds records of other problems under the ids of this `input` ({len(other):,} of "
            f"{len(shared):,}, {other[0]!r} first); give another `output`, or ids of their own."
        )
    return other


def apply_verdict(record: Mapping[str, Any], verdicts: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
    """A record with a person's verdict on the texts that it has now, and no other.

    A rejection makes it unfit for training. An acceptance changes nothing: people check the critic, they do not replace
    it."""
    record = {name: value for name, value in record.items() if name != "human_review"}
    record |= {"usable_for_training": record["triplet_complete"], "validation_passed": record["status"] in PASSED}
    verdict = (verdicts or {}).get(text_hash(record))
    if verdict:
        record["human_review"] = {name: verdict[name] for name in ("verdict", "note", "time")}
        if verdict["verdict"] == "reject":
            record |= {"usable_for_training": False, "validation_passed": False}
    return record


def text_hash(record: Mapping[str, Any]) -> str:
    """Tells whether a verdict and a record speak of the same three texts."""
    texts = json.dumps([record[name] for name in PROBLEM_FIELDS])
    return hashlib.sha256(texts.encode()).hexdigest()[:16]


def now() -> str:
    """The time, as the files have it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
