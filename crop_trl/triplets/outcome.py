"""From all that is known of a problem's candidates to its record: status, flags, and what a person may want to see."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .record import FLAGS
from .source import Problem
from .validation import Candidate, best_first, distinct_counterfactuals

STATUSES = ("strict_pass", "repaired_pass", "needs_review", "pending_repair", "excluded_input")


@dataclass
class Round:
    """
    What one round brought.

    Args:
        candidates (`list[Candidate]`): Those that had every field.
        flaws (`Counter`): `"generator:not_json"`, `"critic:duplicate_number"`, ... to how often.
        selected (`int`, *optional*): The number that the critic says it selected; kept to be compared, never used.
        critic_asked (`bool`): Whether there was something to judge.
        failed (`str`, *optional*): Why a request got no answer. It ends the record for this run; a rerun goes on here.
        models (`dict`): Kind of request to the model that says it served it.
    """

    candidates: list[Candidate] = field(default_factory=list)
    flaws: Counter = field(default_factory=Counter)
    selected: int | None = None
    critic_asked: bool = False
    failed: str | None = None
    models: dict[str, str | None] = field(default_factory=dict)

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
    return _record(problem, "excluded_input", None, [], {"excluded_reason": problem.excluded})


def build_record(problem: Problem, rounds: list[Round], threshold: float, templates: str) -> dict[str, Any]:
    """
    The record of a problem that went through generation.

    Args:
        problem ([`Problem`]): The problem.
        rounds (`list[Round]`): Its rounds, at least one.
        threshold (`float`): Smallest accepted confidence.
        templates (`str`): Version of the templates.

    Returns:
        The record; the best passing candidate is its triplet and the other passing ones are `alternates`, or, when none
        passes, the best-ranked complete one is its triplet with status `needs_review`.
    """
    complete = best_first(c for r in rounds for c in r.candidates if c.incomplete is None)
    passing = distinct_counterfactuals([candidate for candidate in complete if candidate.passes(threshold)])
    chosen = passing[0] if passing else complete[0] if complete else None
    if passing:
        status = "strict_pass" if passing[0].round == 1 else "repaired_pass"
    else:
        status = "needs_review" if chosen else "pending_repair"
    extra = {"rounds": [r.summary(threshold) for r in rounds], "templates": templates}
    return _record(problem, status, chosen, passing[1:], extra)


def _record(
    problem: Problem, status: str, chosen: Candidate | None, alternates: list[Candidate], extra: Mapping[str, Any]
) -> dict[str, Any]:
    complete = chosen is not None
    return {
        "id": problem.id,
        "original_problem": problem.text,
        "paraphrase_problem": chosen.fields["paraphrase_problem"] if chosen else None,
        "counterfactual_problem": chosen.fields["counterfactual_problem"] if chosen else None,
        "answer": problem.answer,
        **({name: text for name, text in chosen.fields.items() if not name.endswith("_problem")} if chosen else {}),
        "status": status,
        **dict(zip(FLAGS, (complete, complete, status in ("strict_pass", "repaired_pass")), strict=True)),
        "critic": chosen.evaluation if chosen else None,
        "alternates": [_alternate(candidate) for candidate in alternates],
        **({"round": chosen.round, "candidate_number": chosen.number} if chosen else {}),
        "violations": chosen.violations if chosen else [],
        "warnings": chosen.warnings if chosen else [],
        **extra,
    }


def _alternate(candidate: Candidate) -> dict[str, Any]:
    return {
        **candidate.fields,
        "critic": candidate.evaluation,
        "round": candidate.round,
        "candidate_number": candidate.number,
        "warnings": candidate.warnings,
    }
