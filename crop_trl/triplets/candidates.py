"""What is made of a candidate: checks without a model, acceptance, ranking, and at last the record."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..prompts import unwrap_problem
from ..text import CJK
from .domain import Domain
from .latex import mend
from .reading import CONFIDENCES, VERDICTS
from .record import FLAGS
from .source import Problem, unclean_reason

STATUSES = ("strict_pass", "repaired_pass", "needs_review", "pending_repair", "excluded_input")
PASSED = STATUSES[:2]

# --- checks without a model ------------------------------------------------------------------------------------------


_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def missing_numbers(original: str, paraphrase: str) -> list[str]:
    """Numbers of the original that the paraphrase nowhere repeats, in order of appearance."""
    kept = set(_NUMBER.findall(paraphrase))
    return [number for number in dict.fromkeys(_NUMBER.findall(original)) if number not in kept]


_CJK = re.compile(f"[{CJK}]")


def other_language(original: str, text: str) -> bool:
    """Whether one of two texts is Chinese, Japanese or Korean and the other has nothing of it."""
    counts = sorted(len(_CJK.findall(t)) for t in (original, text))
    return counts[0] == 0 and counts[1] >= 2


def local_violations(
    original: str, paraphrase: str, counterfactual: str, verbatim: Mapping[str, re.Pattern]
) -> list[str]:
    """What is wrong with a complete candidate for a reason that needs no model; any of it prevents acceptance. What the
    patterns of `verbatim` find must be the same in all three texts."""

    def same(a: str, b: str) -> bool:
        return a.split() == b.split()

    def found(pattern: re.Pattern, text: str) -> list[list[str]]:
        return [match[0].split() for match in pattern.finditer(text)]

    violations = []
    if same(paraphrase, counterfactual):
        violations.append("counterfactual_equals_paraphrase")
    elif same(original, counterfactual):
        violations.append("counterfactual_equals_original")
    for name, text in (("paraphrase", paraphrase), ("counterfactual", counterfactual)):
        if "```" in text and "```" not in original:
            violations.append(f"{name}_has_markdown_fence")
        for kind, pattern in verbatim.items():
            if found(pattern, text) != found(pattern, original):
                violations.append(f"{name}_changes_{kind}")
        if other_language(original, text):
            violations.append(f"{name}_is_in_another_language")
    return violations


# --- candidates ------------------------------------------------------------------------------------------------------


@dataclass
class Candidate:
    """One candidate with all that is known of it; rounds and candidates are numbered from 1."""

    round: int
    number: int
    fields: dict[str, str]  # what the generator wrote, the problems without a wrapper and white space around them
    evaluation: dict[str, Any] | None = None  # the critic's
    incomplete: str | None = None  # why a text is missing or unclean
    violations: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # what a person may want to look at; prevents nothing

    @property
    def rank(self) -> tuple:
        """Smaller is better: nothing found here, then overall confidence, then the smaller of the two others, then
        round and number. The confidence of a rejection counts against a candidate; without an evaluation it is 0."""
        overall = parts = 0.0
        if self.evaluation is not None:
            paraphrase, counterfactual, overall = (
                self.evaluation[confidence] * (1 if self.evaluation[verdict] == "accept" else -1)
                for confidence, verdict in zip(CONFIDENCES, VERDICTS, strict=True)
            )
            parts = min(paraphrase, counterfactual)
        return (bool(self.violations), -overall, -parts, self.round, self.number)

    def passes(self, threshold: float) -> bool:
        """Whether the candidate is accepted: nothing found here, and [`rejection_reasons`] is empty."""
        return (
            self.incomplete is None
            and not self.violations
            and self.evaluation is not None
            and not rejection_reasons(self.evaluation, threshold)
        )


def check_candidate(
    original: str,
    fields: Mapping[str, str],
    round: int,
    number: int,
    wrappers: Iterable[str],
    known: set[str],
    domain: Domain,
) -> Candidate:
    """A [`Candidate`] without the wrappers, after every check that needs no model; `known` are the LaTeX commands of
    the original and of the reply."""
    candidate = Candidate(round, number, fields := dict(fields))
    broken = []
    for kind in ("paraphrase", "counterfactual"):
        text = fields[f"{kind}_problem"]
        for wrapper in wrappers:
            text = unwrap_problem(text, wrapper)
        fields[f"{kind}_problem"], mended, doubtful = mend(text, original, known) if domain.latex else (text, [], [])
        if mended:
            candidate.warnings.append(f"{kind}: backslashes mended ({', '.join(sorted(set(mended)))})")
        broken += [f"{kind}_has_broken_latex_command"] if doubtful else []
    texts = (fields["paraphrase_problem"], fields["counterfactual_problem"])
    # Before white space is stripped: str.strip() would take a form feed with it, and what it was part of with that.
    candidate.incomplete = unclean_reason(texts[0]) or unclean_reason(texts[1])
    if candidate.incomplete:
        return candidate
    paraphrase, counterfactual = (text.strip() for text in texts)
    fields |= {"paraphrase_problem": paraphrase, "counterfactual_problem": counterfactual}
    candidate.violations = local_violations(original, paraphrase, counterfactual, domain.verbatim) + broken
    missing = missing_numbers(original, paraphrase)
    if missing:
        candidate.warnings.append(f"paraphrase lacks the numbers {', '.join(missing)}")
    if paraphrase.split() == original.split():
        candidate.warnings.append("paraphrase repeats the original word for word")
    return candidate


REJECTIONS = {
    "not_accepted": "Overall decision is reject",
    "violations": "Violations named",
    "paraphrase_rejected": "Paraphrase rejected",
    "counterfactual_rejected": "Counterfactual rejected",
    "counterfactual_non_determinate": "Counterfactual not determinate",
    "original_non_determinate": "Original problem not determinate",
    "paraphrase_confidence_low": "Paraphrase confidence below {threshold:g}",
    "counterfactual_confidence_low": "Counterfactual confidence below {threshold:g}",
    "overall_confidence_low": "Overall confidence below {threshold:g}",
    "answer_type_mismatch": "Answer-type mismatch",
}


def rejection_reasons(evaluation: Mapping[str, Any], threshold: float) -> list[str]:
    """The criteria of acceptance that an evaluation fails, as keys of `REJECTIONS`; empty means accepted."""
    failed = {
        "not_accepted": evaluation["decision"] != "accept",
        "violations": bool(evaluation["violations"]),
        "paraphrase_rejected": evaluation["paraphrase_status"] != "accept",
        "counterfactual_rejected": evaluation["counterfactual_status"] != "accept",
        "counterfactual_non_determinate": evaluation["counterfactual_determinacy"] != "determinate",
        "original_non_determinate": evaluation["original_determinacy"] != "determinate",
        "paraphrase_confidence_low": evaluation["paraphrase_confidence"] < threshold,
        "counterfactual_confidence_low": evaluation["counterfactual_confidence"] < threshold,
        "overall_confidence_low": evaluation["confidence"] < threshold,
        "answer_type_mismatch": evaluation["original_answer_type"] != evaluation["counterfactual_answer_type"],
    }
    return [name for name, is_failed in failed.items() if is_failed]


# --- records ---------------------------------------------------------------------------------------------------------


@dataclass
class Round:
    """What one round of requests brought."""

    candidates: list[Candidate] = field(default_factory=list)  # those that have every field
    flaws: Counter = field(default_factory=Counter)  # "generator:not_json", "critic:duplicate_number", ... -> how often
    selected: int | None = None  # the number that the critic says it selected; kept to be compared, never used
    critic_asked: bool = False
    failed: str | None = None  # why a request got no answer: a rerun goes on here
    models: dict[str, str | None] = field(default_factory=dict)  # kind of request -> the model that says it served it

    def summary(self, threshold: float) -> dict[str, Any]:
        """The round as a record keeps it."""
        return {
            "candidates": len(self.candidates),
            "evaluated": sum(candidate.evaluation is not None for candidate in self.candidates),
            "passed": sum(candidate.passes(threshold) for candidate in self.candidates),
            "critic_asked": self.critic_asked,
            "critic_selected": self.selected,
            "flaws": dict(self.flaws),
            "failed": self.failed,
            "models": self.models,
        }


def excluded_record(problem: Problem) -> dict[str, Any]:
    """The record of a problem that was screened out."""
    return _record(problem, "excluded_input", None, []) | {"excluded_reason": problem.excluded}


def build_record(problem: Problem, rounds: list[Round], threshold: float, templates: str) -> dict[str, Any]:
    """The record of a problem after its rounds: the best candidate, and the other passing ones as `alternates`."""
    complete = [c for r in rounds for c in r.candidates if c.incomplete is None]
    complete.sort(key=lambda candidate: candidate.rank)  # what the critic says it selected plays no part
    passing: dict[tuple[str, ...], Candidate] = {}
    for candidate in complete:
        if candidate.passes(threshold):  # white space makes no other counterfactual
            passing.setdefault(tuple(candidate.fields["counterfactual_problem"].split()), candidate)
    chosen, *others = [*passing.values()] or complete[:1] or [None]
    if passing:
        status = "strict_pass" if chosen.round == 1 else "repaired_pass"
    else:
        status = "needs_review" if chosen else "pending_repair"
    record = _record(problem, status, chosen, others)
    return record | {"rounds": [r.summary(threshold) for r in rounds], "templates": templates}


def _record(problem: Problem, status: str, chosen: Candidate | None, others: list[Candidate]) -> dict[str, Any]:
    complete = chosen is not None
    record = {
        "id": problem.id,
        "original_problem": problem.text,
        "paraphrase_problem": None,
        "counterfactual_problem": None,
        "answer": problem.answer,
        "status": status,
        **dict(zip(FLAGS, (complete, complete, status in PASSED), strict=True)),
        "critic": None,
        "alternates": [_of_candidate(other) for other in others],
        "violations": [],
        "warnings": [],
    }
    return record | (_of_candidate(chosen) | {"violations": chosen.violations} if chosen else {})


def _of_candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        **candidate.fields,
        "critic": candidate.evaluation,
        "round": candidate.round,
        "candidate_number": candidate.number,
        "warnings": candidate.warnings,
    }
