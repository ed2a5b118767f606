"""A person's check: a page with a sample of triplets, and what comes back from it."""

import difflib
import json
import random
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from tqdm import tqdm

from ..files import write_text
from .ledger import Ledger
from .outputs import OutputDirectory, text_hash
from .report import write_report

VERDICTS = ("accept", "reject", "unsure")
# Products of two texts' lengths in words; a problem of the usual length is far below the first.
FULL_COMPARISON, LONGEST_COMPARISON = 1_000_000, 25_000_000
# LaTeX commands, numbers and words as wholes, so that a difference marks what a reader would call one thing.
_TOKEN = re.compile(r"\\[A-Za-z]+|\d+(?:[.,]\d+)*|\w+|\s+|.", re.DOTALL)


def write_review_page(directory: str, count: int, seed: int = 42) -> Path:
    """
    Write a self-contained HTML page with a seeded sample of the complete triplets, accepted or not.

    Args:
        directory (`str`): Output directory of a run.
        count (`int`): Size of the sample.
        seed (`int`, *optional*, defaults to 42): The same seed draws the same sample from the same records.

    Returns:
        Path of the page.

    Raises:
        `ValueError`: no run in this directory, no complete triplet, or a count below 1.
    """
    if count < 1:
        raise ValueError(f"`review` is {count}; give at least 1.")
    output = OutputDirectory(directory)
    complete = [record for record in output.load_records() if record["triplet_complete"]]
    if not complete:
        raise ValueError(f"`output` {directory!r} has no complete triplet to review; generate some first.")
    sample = random.Random(seed).sample(sorted(complete, key=lambda record: record["id"]), min(count, len(complete)))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, trim_blocks=True
    )
    bar = tqdm(sample, desc="review page", unit="triplet", delay=2)
    page = environment.get_template("review.html.j2").render(
        items=[_item(record) for record in bar], seed=seed, total=len(complete), name=output.path.resolve().name
    )
    write_text(output.review_page, page)
    return output.review_page


def apply_review(directory: str, verdicts: str | Path) -> str:
    """
    Take over the verdicts that the review page saved: rejected triplets lose `validation_passed`.

    Verdicts are kept in the directory and hold for later runs too, as long as the texts stay the same.

    Args:
        directory (`str`): Output directory of a run.
        verdicts (`str` or `Path`): The JSON file.

    Returns:
        The report, with how people and critic agree.

    Raises:
        `ValueError`: the file is not what the page saves, or speaks of records that are not there.
        `LedgerError`: a run is going on in the directory.
    """
    output = OutputDirectory(directory)
    output.load_run()
    given = _read_verdicts(Path(verdicts))
    with Ledger(output.ledger):  # keeps a run from writing the same files meanwhile
        records = output.load_records()
        unknown = sorted({identifier for identifier, _ in given} - {record["id"] for record in records})
        if unknown:
            raise ValueError(
                f"`apply_review` {str(verdicts)!r} speaks of {len(unknown)} records that `output` {directory!r} does "
                f"not have ({unknown[0]} first); apply it to the directory whose page it comes from."
            )
        reviews = output.load_reviews()
        for (identifier, texts), verdict in given.items():
            reviews.setdefault(identifier, {})[texts] = verdict
        output.write_json(output.reviews, reviews)
        # Flags are set from the status again, so that a changed mind (reject, later accept) takes effect.
        output.save_records([_without_verdict(record) for record in records])
    return write_report(directory)


def mark_differences(text: str, against: Mapping[str, str]) -> list[tuple[str, str]]:
    """
    Cut a text into pieces by how its words differ from other texts.

    Args:
        text (`str`): The text to show.
        against (`Mapping[str, str]`): Mark to the text whose absent words get it; the last mark wins.

    Returns:
        Pairs of mark (empty: the same everywhere) and piece; the pieces joined are the text.
    """
    words = _TOKEN.findall(text)
    marks = [""] * len(words)
    for mark, other in against.items():
        for start, end in _differing(_TOKEN.findall(other), words):
            marks[start:end] = [mark] * (end - start)
    pairs = groupby(zip(marks, words, strict=True), key=lambda pair: pair[0])
    return [(mark, "".join(word for _, word in group)) for mark, group in pairs]


def _differing(other: Sequence[str], words: Sequence[str]) -> list[tuple[int, int]]:
    """
    Where `words` differ from `other`: start and end of each stretch.

    The time of a full comparison grows with the product of the lengths. Beyond `FULL_COMPARISON` words that are
    frequent tell nothing, and beyond `LONGEST_COMPARISON` all between the first and the last difference counts as one.
    """
    shorter = min(len(other), len(words))
    start = next((n for n in range(shorter) if other[n] != words[n]), shorter)
    tail = next((n for n in range(shorter - start) if other[-1 - n] != words[-1 - n]), shorter - start)
    other, words = other[start : len(other) - tail], words[start : len(words) - tail]
    product = len(other) * len(words)
    if product > LONGEST_COMPARISON:
        return [(start, start + len(words))]
    matcher = difflib.SequenceMatcher(None, other, words, autojunk=product > FULL_COMPARISON)
    return [(start + a, start + b) for operation, _, _, a, b in matcher.get_opcodes() if operation != "equal"]


def _item(record: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: record[f"{name}_problem"] for name in ("original", "paraphrase", "counterfactual")}

    changed = _TOKEN.findall(texts["counterfactual"])

    def distance(name: str) -> int:
        return sum(end - start for start, end in _differing(_TOKEN.findall(texts[name]), changed))

    # A counterfactual is worded after one of the two others; against that one only the changed condition stands out.
    nearer = min(("original", "paraphrase"), key=distance)
    against: dict[str, dict[str, str]] = {
        "original": {},
        "paraphrase": {"reworded": texts["original"]},
        "counterfactual": {"changed": texts[nearer]},
    }
    against[nearer]["changed"] = texts["counterfactual"]
    marked = {name: mark_differences(text, against[name]) for name, text in texts.items()}
    return {"record": record, "text_hash": text_hash(record), "texts": marked, "nearer": nearer}


def _read_verdicts(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Record id and hash of its texts to the verdict on them."""
    problem = f"`apply_review` {str(path)!r} is not a file that the review page saved; "
    try:
        items = json.loads(path.read_text(encoding="utf-8"))["verdicts"]
    except FileNotFoundError:
        raise ValueError(f"`apply_review` {str(path)!r} does not exist; give the file that the page saved.") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{problem}save it again from the page.") from None
    if not isinstance(items, list):
        raise ValueError(f"{problem}`verdicts` must be a list.")
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    verdicts: dict[tuple[str, str], dict[str, Any]] = {}
    seen: set[str] = set()
    for item in items:
        if not isinstance(item, dict) or not all(isinstance(item.get(name), str) for name in ("id", "text_hash")):
            raise ValueError(f"{problem}each verdict needs `id` and `text_hash`.")
        if item.get("verdict") not in VERDICTS:
            raise ValueError(f"{problem}the verdict on {item['id']} must be one of {', '.join(VERDICTS)}.")
        note = item.get("note") or ""
        if not isinstance(note, str):
            raise ValueError(f"{problem}the note on {item['id']} must be a text.")
        if item["id"] in seen:
            raise ValueError(f"{problem}it has two verdicts on {item['id']}; leave the one that holds.")
        seen.add(item["id"])
        verdicts[item["id"], item["text_hash"]] = {"verdict": item["verdict"], "note": note, "time": now}
    return verdicts


def _without_verdict(record: Mapping[str, Any]) -> dict[str, Any]:
    record = {name: value for name, value in record.items() if name != "human_review"}
    passed = record["status"] in ("strict_pass", "repaired_pass")
    return record | {"usable_for_training": record["triplet_complete"], "validation_passed": passed}
