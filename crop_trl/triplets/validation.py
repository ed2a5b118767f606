"""What is made of a candidate: checks without a model, acceptance and ranking."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..prompts import unwrap_problem
from .reading import CONFIDENCES

# --- checks without a model ------------------------------------------------------------------------------------------


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # Unicode category Cc without tab and newline
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")  # JSON can carry one ("\\ud83d"), UTF-8 cannot


def unclean_reason(text: str) -> str | None:
    """`empty`, `control_characters` or `invalid_unicode` for a text that cannot be a problem, else `None`."""
    if not text.strip():
        return "empty"
    if _CONTROL.search(text):
        return "control_characters"
    return "invalid_unicode" if _LONE_SURROGATE.search(text) else None


_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
# "\times" and "\neq" written with one backslash in JSON decode to a tab or a newline and "imes", "eq": no control
# character by the rule above, but a broken command all the same.
_DECODED_ESCAPE = re.compile(
    r"\t(?:imes|heta|ext|frac|au\b|an\b|o\b|riangle|ilde|op\b)|\n(?:eq|abla|otin|mid|eg\b|u\b)\b"
)


def missing_numbers(original: str, paraphrase: str) -> list[str]:
    """Numbers of the original that the paraphrase nowhere repeats, in order of appearance."""
    kept = set(_NUMBER.findall(paraphrase))
    return [number for number in dict.fromkeys(_NUMBER.findall(original)) if number not in kept]


def local_violations(original: str, paraphrase: str, counterfactual: str) -> list[str]:
    """
    What is wrong with a complete candidate for a reason that needs no model; any of them prevents acceptance.

    Args:
        original, paraphrase, counterfactual (`str`): The three bare problems.
    """

    def same(a: str, b: str) -> bool:
        return a.split() == b.split()

    violations = []
    if same(paraphrase, counterfactual):
        violations.append("counterfactual_equals_paraphrase")
    elif same(original, counterfactual):
        violations.append("counterfactual_equals_original")
    for name, text in (("paraphrase", paraphrase), ("counterfactual", counterfactual)):
        if "```" in text and "```" not in original:
            violations.append(f"{name}_has_markdown_fence")
        if _DECODED_ESCAPE.search(text) and not _DECODED_ESCAPE.search(original):
            violations.append(f"{name}_has_broken_latex_command")
    return violations


# --- candidates ------------------------------------------------------------------------------------------------------


@dataclass
class Candidate:
    """
    One candidate with all that is known of it.

    Args:
        round (`int`): The round it was written in, from 1.
        number (`int`): Its place among the generator's candidates of that round, from 1.
        fields (`dict`): What the generator wrote, the two problems freed of a wrapper and of white space around them.
        evaluation (`dict`, *optional*): The critic's evaluation; `None` when it is missing.
        incomplete (`str`, *optional*): Why a text is missing or unclean (see [`unclean_reason`]).
        violations (`list[str]`): From [`local_violations`].
        warnings (`list[str]`): What a person may want to look at; does not prevent acceptance.
    """

    round: int
    number: int
    fields: dict[str, str]
    evaluation: dict[str, Any] | None = None
    incomplete: str | None = None
    violations: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def rank(self) -> tuple:
        """Smaller is better: overall confidence, then the smaller of the two others, then round, then number."""
        if self.evaluation is None:
            return (1, 0.0, 0.0, self.round, self.number)
        paraphrase, counterfactual, overall = (self.evaluation[name] for name in CONFIDENCES)
        return (0, -overall, -min(paraphrase, counterfactual), self.round, self.number)

    def passes(self, threshold: float) -> bool:
        """Whether the candidate is accepted: nothing found here, and [`rejection_reasons`] is empty."""
        return (
            self.incomplete is None
            and not self.violations
            and self.evaluation is not None
            and not rejection_reasons(self.evaluation, threshold)
        )


def check_candidate(original: str, fields: Mapping[str, str], round: int, number: int, wrappers: Iterable[str]):
    """
    Build a [`Candidate`] and run every check that needs no model.

    Args:
        original (`str`): The bare problem.
        fields (mapping): What the generator wrote of the candidate.
        round, number (`int`): Of its request, and of the candidate in it.
        wrappers (iterable of `str`): Answer-format wrappers to take off.
    """
    fields = dict(fields)
    for name in ("paraphrase_problem", "counterfactual_problem"):
        for wrapper in wrappers:
            fields[name] = unwrap_problem(fields[name], wrapper)
    candidate = Candidate(round, number, fields)
    texts = (fields["paraphrase_problem"], fields["counterfactual_problem"])
    # Before white space is stripped: str.strip() would take a form feed with it, and what it was part of with that.
    candidate.incomplete = unclean_reason(texts[0]) or unclean_reason(texts[1])
    if candidate.incomplete:
        return candidate
    paraphrase, counterfactual = (text.strip() for text in texts)
    fields |= {"paraphrase_problem": paraphrase, "counterfactual_problem": counterfactual}
    candidate.violations = local_violations(original, paraphrase, counterfactual)
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


def best_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Candidates in the order of [`Candidate.rank`]. What the critic says it selected plays no part."""
    return sorted(candidates, key=lambda candidate: candidate.rank)


def distinct_counterfactuals(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Without candidates whose counterfactual, white space aside, an earlier one has already."""
    seen: set[tuple[str, ...]] = set()
    kept = []
    for candidate in candidates:
        text = tuple(candidate.fields["counterfactual_problem"].split())
        if text not in seen:
            seen.add(text)
            kept.append(candidate)
    return kept
