"""The files of an output directory, each replaced in one step so that a reader never sees half of one."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..files import read_jsonl, write_jsonl, write_text
from .outcome import STATUSES
from .prompts import Templates
from .record import FLAGS, PROBLEM_FIELDS
from .settings import TripletSettings
from .source import ProblemSet

_NEEDED = {"id", "original_problem", "status", *FLAGS}


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
        run (`Path`): Settings, templates and input counts of the run that wrote the records, and how it ended; under
            `begun` the same of a later run that has not ended.
        reviews (`Path`): Verdicts of people, over all reviews: record id to hash of the texts to verdict.
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

    def clear_leftovers(self) -> None:
        """Remove what a process that was killed while writing has left; for the holder of the ledger alone."""
        for path in (self.triplets, self.incomplete, self.run, self.reviews):
            for leftover in self.path.glob(f".{path.name}.*.tmp"):
                leftover.unlink(missing_ok=True)

    def save_settings(self, settings: TripletSettings, templates: Templates, problem_set: ProblemSet) -> None:
        """
        Write down what a run is about to do, beside what the records that are there now come from.

        Args:
            settings ([`~crop_trl.triplets.settings.TripletSettings`]): Of the run.
            templates ([`~crop_trl.triplets.prompts.Templates`]): Its instructions.
            problem_set ([`~crop_trl.triplets.source.ProblemSet`]): Its input.
        """
        facts = {
            "started": _now(),
            "settings": asdict(settings),
            "endpoint": settings.endpoint,
            "templates": {"version": templates.version, "texts": dict(templates.texts)},
            "input": {"problems": len(problem_set.problems), "duplicates": problem_set.duplicates},
        }
        earlier = self.load_run() if self.run.exists() else {}
        self.write_json(self.run, earlier | {"begun": facts} if "ended" in earlier else facts)

    def save_end(
        self, unfinished: int, kept: int, stopped: str | None, error: Exception | None, retries: Mapping[str, int]
    ) -> None:
        """
        Write down how a run ended.

        Args:
            unfinished (`int`): Problems of its input without a record.
            kept (`int`): Records that stay as an earlier run left them.
            stopped (`str`, *optional*): Why it ended early.
            error (`Exception`, *optional*): What made it end early.
            retries (`Mapping`): Repeated requests by cause.
        """
        run = self.load_run()
        ended = {
            "ended": _now(),
            "unfinished": unfinished,
            "kept": kept,
            "stopped": stopped,
            "error": str(error) if error else None,
            "retries": dict(retries),
        }
        self.write_json(self.run, run.get("begun", run) | ended)

    def load_run(self) -> dict[str, Any]:
        """
        What [`save_settings`] and [`save_end`] wrote.

        Raises:
            `ValueError`: there was no run in this directory, or its file is damaged.
        """
        try:
            return _read_object(self.run)
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
        """All records, complete ones first."""
        self.load_run()
        return self.stored_records()

    def stored_records(self) -> list[dict[str, Any]]:
        """
        What [`save_records`] wrote, complete ones first; nothing where there was no run.

        Raises:
            `ValueError`: one of the two files holds something else.
        """
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
        return _read_object(self.reviews) if self.reviews.exists() else {}

    def write_json(self, path: Path, value: Any) -> None:
        """Write JSON for people and programs, without secrets."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(path, self._clean(json.dumps(value, indent=1, ensure_ascii=False)) + "\n")


def merge_records(
    records: Sequence[dict[str, Any]], stored: Iterable[dict[str, Any]], problem_set: ProblemSet
) -> tuple[list[dict[str, Any]], Counter]:
    """
    What a run finished, and what earlier runs stored that it did not replace.

    A stored record goes only for one of the same id, or where this run was told to leave out duplicates and it is one.
    It also stays when the new one lacks an answer that failed to come, unless that one got further.

    Args:
        records (sequence of dicts): Records that the run finished.
        stored (iterable of dicts): Records from [`OutputDirectory.stored_records`].
        problem_set ([`ProblemSet`]): The run's input.

    Returns:
        All records, those of the input first and in its order; and how many stored ones stayed, by reason:
        `elsewhere` (not in this input), `unfinished` (this run did not get there), `failed`.
    """
    merged = {record["id"]: record for record in records}
    texts = {problem.id: problem.text for problem in problem_set.problems}
    duplicated = {_folded(text) for text in texts.values()} if problem_set.duplicates["left_out"] else set()
    kept: Counter = Counter()
    others = []
    for record in stored:
        identifier = record["id"]
        if identifier not in texts:
            if _folded(record["original_problem"]) not in duplicated:
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
    """
    Ids under which the input has another text than the stored record.

    Raises:
        `ValueError`: for most of the ids that both have; then it is not the same problems.
    """
    texts = {problem.id: _folded(problem.text) for problem in problem_set.problems}
    shared = [record for record in stored if record["id"] in texts]
    other = [record["id"] for record in shared if _folded(record["original_problem"]) != texts[record["id"]]]
    if 2 * len(other) > len(shared):
        raise ValueError(
            f"`output` holds records of other problems under the ids of this `input` ({len(other):,} of "
            f"{len(shared):,}, {other[0]!r} first); give another `output`, or ids of their own."
        )
    return other


def apply_verdict(record: Mapping[str, Any], verdicts: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
    """
    A record with a person's verdict on it.

    A rejection makes it unfit for training. An acceptance changes nothing: people check the critic, they do not replace
    it. Verdicts on other texts than the record has now (the problem was asked anew) are left aside.
    """
    record = dict(record)
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


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _folded(text: str) -> str:
    return " ".join(text.split())


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged; move it away (answers and records do not depend on it).")
    return value
