"""A person's check: a page with a sample of triplets, and what comes back from it."""

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError, field_validator
from tqdm import tqdm

from ..files import write_text
from ..formulas import with_formulas
from ..text import filled, marked_triplet
from .ledger import Ledger
from .outputs import OutputDirectory, now, text_hash
from .record import PROBLEM_FIELDS
from .report import write_report


class _Verdict(BaseModel):
    id: str
    text_hash: str
    verdict: Literal["accept", "reject", "unsure"]
    note: str | None = None


class _Review(BaseModel):
    """What the review page saves."""

    verdicts: list[_Verdict]

    @field_validator("verdicts")
    @classmethod
    def _one_each(cls, verdicts: list[_Verdict]) -> list[_Verdict]:
        for identifier, times in Counter(verdict.id for verdict in verdicts).items():
            if times > 1:
                raise ValueError(f"two on {identifier}, of which one holds")
        return verdicts


def write_review_page(directory: str, count: int, seed: int = 42) -> Path:
    """Write a self-contained HTML page with a seeded sample of the complete triplets, accepted or not."""
    if count < 1:
        raise ValueError(f"`review` is {count}; give at least 1.")
    output = OutputDirectory(directory)
    complete = [record for record in output.load_records() if record["triplet_complete"]]
    if not complete:
        raise ValueError(f"`output` {directory!r} has no complete triplet to review; generate some first.")
    sample = random.Random(seed).sample(sorted(complete, key=lambda record: record["id"]), min(count, len(complete)))
    items = [_item(record) for record in tqdm(sample, desc="review page", unit="triplet", delay=2)]
    template = Path(__file__).parent / "templates" / "review.html.j2"
    page = filled(template, items=items, seed=seed, total=len(complete), name=output.path.resolve().name)
    write_text(output.review_page, page)
    return output.review_page


def apply_review(directory: str, verdicts: str | Path) -> str:
    """Take over the verdicts that the review page saved, here and for later runs, and return the report."""
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
        output.save_records(records)
    return write_report(directory)


def _item(record: Mapping[str, Any]) -> dict[str, Any]:
    original, paraphrase, counterfactual = (record[name] for name in PROBLEM_FIELDS)
    place, texts = marked_triplet(original, [paraphrase], counterfactual)
    names = ("original", "paraphrase", "counterfactual")
    blocks = dict(zip(names, map(with_formulas, texts)))
    return {"record": record, "text_hash": text_hash(record), "texts": blocks, "nearer": names[place]}


def _read_verdicts(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Record id and hash of its texts to the verdict on them."""
    try:
        found = _Review.model_validate_json(path.read_bytes()).verdicts
    except FileNotFoundError:
        raise ValueError(f"`apply_review` {str(path)!r} does not exist; give the file that the page saved.") from None
    except (OSError, ValidationError) as error:
        first = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else {"msg": error.strerror}
        place = ".".join(map(str, first.get("loc", ())))
        raise ValueError(
            f"`apply_review` {str(path)!r} is not a file that the review page saved ({place or 'file'}: "
            f"{first['msg']}); save it again from the page."
        ) from None
    time = now()
    return {(v.id, v.text_hash): {"verdict": v.verdict, "note": v.note or "", "time": time} for v in found}
