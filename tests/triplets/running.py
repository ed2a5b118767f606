"""What the tests of the triplet program share: short settings, a run, and what it left."""

import json
import urllib.request
from pathlib import Path

from triplets.scripted_answers import PLANS

from crop_trl.files import read_entries
from crop_trl.triplets.outputs import OutputDirectory
from crop_trl.triplets.pipeline import TripletRun, generate_triplets
from crop_trl.triplets.settings import TripletSettings

KEY = "sk-test-0123456789abcdef"
# What the tests of the report and of the person's check speak of: a little of everything.
REPORTED = [
    *(f"[plan:good] A tank holds {n} litres and loses 3 a day." for n in range(10)),
    *(f"[plan:repaired] Add {n} and 4." for n in range(3)),
    "[plan:low_counterfactual] 5 and 6",
    "[plan:type_mismatch] 6 and 7 <b>&amp;",
    "[plan:underdetermined] 7 and 8",
    "[plan:critic_not_json] 8 and 9",
    "[plan:same_texts] 9 and 10",
    "[plan:control] 10 and 11",
    "excluded \x0c here",
    "[plan:good] A tank holds 0 litres and loses 3 a day.",
]

# Files of the form of the paper's four listings, whose texts belong there.
PAPER_FORM = {
    "generator_system.txt": "You write a paraphrase and a counterfactual. Return JSON only.",
    "generator_user.txt": "Generate up to {candidate_count} candidates.\n\nOriginal problem:\n<<<\n{problem}\n>>>\n\n"
    'Requirements: ...\n\n{feedback}\n\nReturn exactly:\n{\n  "decision": "candidates",\n  "candidates": [ ... ]\n}',
    "critic_system.txt": "You judge them. Return JSON only.",
    "critic_user.txt": "Original problem:\n<<<\n{original}\n>>>\n\nCandidates, numbered from 1:\n{candidates_json}\n\n"
    'Return exactly:\n{\n  "evaluations": [ ... ],\n  "selected_candidate_number": 1\n}\n\n'
    "Allowed answer types: single_integer, single_rational, unknown.",
}

FAST = {"timeout": 60.0, "max_retries": 3, "max_backoff": 0.2}
# Where some requests are never answered.
EVERY_PLAN = FAST | {"timeout": 2.0}


def every_plan() -> list[str]:
    """A problem for every plan."""
    return [f"[plan:{plan}] Add 2 apples and 3 pears." for plan in PLANS]


def write_paper_form(folder: Path) -> None:
    """Write `PAPER_FORM`."""
    folder.mkdir()
    for name, text in PAPER_FORM.items():
        (folder / name).write_text(text)


def flags(options: dict) -> list[str]:
    """Settings as command line options."""
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def served(log: Path) -> list[dict]:
    """The answers that a server logged."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def generate(url: str, source: str, output: str | Path, **changes) -> TripletRun:
    """A run in this process."""
    return generate_triplets(
        TripletSettings(input=[source], output=str(output), base_url=url, **(FAST | changes)), False
    )


def answers_in(ledger: Path) -> list[dict]:
    """The answers in a ledger, while a run may be going on."""
    return [entry for entry in read_entries(ledger) if "key" in entry]


def stats(url: str, page: str = "stats") -> dict:
    """How many requests came to a scripted server, are in flight, and were so at most; `release` lets them go."""
    with urllib.request.urlopen(f"{url.removesuffix('/v1')}/{page}") as answer:
        return json.loads(answer.read() or "null")


def records_by_id(output: str | Path) -> dict[str, dict]:
    """What stands in an output directory."""
    return {record["id"]: record for record in OutputDirectory(output).load_records()}
