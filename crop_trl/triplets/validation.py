"""From a model's answer to a judged candidate: reading the JSON, checks without a model, acceptance and ranking.

Nothing in here raises on what a model wrote. A flaw is a name (`not_json`, `cut_off`, `bad_confidence`, ...) that is
counted in the report; one bad item of an answer does not take the good ones with it.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .record import unwrap_problem

Verdict = Literal["accept", "reject"]
AnswerType = Literal[
    "single_integer", "single_rational", "single_real", "finite_set", "expression", "proof", "yes_no", "unknown"
]
Determinacy = Literal["determinate", "underdetermined", "inconsistent", "unknown"]
Confidence = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class _Strict(BaseModel):
    # No coercion: "0.9" for a confidence or 1 for a text says that the model did not follow the form.
    model_config = ConfigDict(strict=True)


class CandidateFields(_Strict):
    """What the generator writes for one candidate."""

    condition_type: str
    original_condition_description: str
    paraphrased_condition_description: str
    counterfactual_condition_description: str
    paraphrase_problem: str
    counterfactual_problem: str
    counterfactual_description: str


class Violation(_Strict):
    """One thing the critic found wrong, and where."""

    criterion: str
    evidence: str


class Evaluation(_Strict):
    """What the critic writes for one candidate."""

    candidate_number: int
    decision: Verdict
    violations: list[Violation]
    paraphrase_status: Verdict
    paraphrase_confidence: Confidence
    paraphrase_reason: str
    counterfactual_status: Verdict
    counterfactual_confidence: Confidence
    counterfactual_reason: str
    original_answer_type: AnswerType
    counterfactual_answer_type: AnswerType
    original_determinacy: Determinacy
    counterfactual_determinacy: Determinacy
    determinacy_evidence: str
    confidence: Confidence


class GeneratorAnswer(_Strict):
    """The generator's whole answer."""

    decision: Literal["candidates", "none"]
    candidates: list[CandidateFields]


class CriticAnswer(_Strict):
    """The critic's whole answer."""

    evaluations: list[Evaluation]
    selected_candidate_number: int | None


CONFIDENCES = ("paraphrase_confidence", "counterfactual_confidence", "confidence")


def request_schema(model: type[BaseModel]) -> dict[str, Any]:
    """
    The JSON schema that goes with a request, in the subset that structured outputs share between endpoints: every
    property required, none besides, no numeric bounds (several engines refuse them; the bounds are checked here).
    """

    def strict(node: Any) -> Any:
        if isinstance(node, list):
            return [strict(item) for item in node]
        if not isinstance(node, dict):
            return node
        node = {
            key: strict(value)
            for key, value in node.items()
            if not (key in ("title", "description", "default", "minimum", "maximum") and not isinstance(value, dict))
        }
        if "properties" in node:
            node |= {"required": list(node["properties"]), "additionalProperties": False}
        return node

    return strict(model.model_json_schema())


# --- reading an answer -----------------------------------------------------------------------------------------------


class _DuplicateKey(ValueError):
    pass


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise _DuplicateKey  # {"decision": "accept", ..., "decision": "reject"}: no reading of it is safe
    return keys


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)
_THINKING = re.compile(r"^.*?</think(?:ing)?>", re.DOTALL)


def parse_json_object(text: str, key: str) -> tuple[dict[str, Any] | None, str | None]:
    """
    The JSON object with `key` in a model's text, with whatever stands round it (thinking, fences, prose) left aside.

    Returns:
        The object and `None`, or `None` and the flaw: `not_json` or `wrong_schema`.
    """
    text = _THINKING.sub("", text, count=1)
    flaw, start = None, text.find("{")
    for _ in range(
        20
    ):  # prose may hold braces of its own ("the set {1, 2}"); a whole page of them is not looked through
        if start < 0:
            break
        try:
            value, end = _DECODER.raw_decode(text, start)
        except _DuplicateKey:
            return None, "wrong_schema"
        except (ValueError, RecursionError):
            flaw, end = "not_json", start + 1
        else:
            if key in value:
                return value, None
            flaw = flaw or "wrong_schema"
        start = text.find("{", end)
    return None, flaw or "not_json"


def answer_flaw(content: str | None, refusal: str | None, finish_reason: str | None) -> str | None:
    """Why an answer cannot be read at all (`refusal`, `content_filter`, `cut_off`, `empty`), or `None`."""
    if refusal:
        return "refusal"
    if finish_reason == "content_filter":
        return "content_filter"
    if finish_reason == "length":
        return "cut_off"
    if not content or not content.strip():
        return "empty"
    return None


def read_candidates(content: str, limit: int) -> tuple[list[dict[str, str]], Counter]:
    """
    The generator's candidates that have every field, at most `limit` of them, and the flaws found on the way.

    A flaw of the whole answer (`not_json`, `wrong_schema`, `no_candidates`) comes with an empty list.
    """
    flaws: Counter = Counter()
    answer, flaw = parse_json_object(content, "candidates")
    if answer is None or not isinstance(answer["candidates"], list):
        flaws[flaw or "wrong_schema"] += 1
        return [], flaws
    if not answer["candidates"]:
        flaws["no_candidates"] += 1
    candidates = []
    for item in answer["candidates"][:limit]:
        try:
            candidates.append(CandidateFields.model_validate(item).model_dump())
        except ValidationError:
            flaws["bad_candidate"] += 1
    if len(answer["candidates"]) > limit:
        flaws["too_many_candidates"] += 1
    return candidates, flaws


def read_evaluations(content: str, count: int) -> tuple[dict[int, dict[str, Any]], int | None, Counter]:
    """
    The critic's evaluations by candidate number, the number it selected, and the flaws found on the way.

    An evaluation counts only if it is complete, in range and the only one of its number: two evaluations of one
    candidate void each other, since nothing says which one is meant.

    Args:
        content (`str`): The critic's answer.
        count (`int`): How many candidates it was given.
    """
    flaws: Counter = Counter()
    answer, flaw = parse_json_object(content, "evaluations")
    if answer is None or not isinstance(answer["evaluations"], list):
        flaws[flaw or "wrong_schema"] += 1
        return {}, None, flaws
    numbers = Counter(
        item["candidate_number"]
        for item in answer["evaluations"]
        if isinstance(item, dict) and type(item.get("candidate_number")) is int
    )
    evaluations = {}
    for item in answer["evaluations"]:
        try:
            evaluation = Evaluation.model_validate(item).model_dump()
        except ValidationError as error:
            places = {name for problem in error.errors(include_url=False) for name in problem["loc"]}
            flaws["bad_confidence" if places & set(CONFIDENCES) else "bad_evaluation"] += 1
            continue
        number = evaluation.pop("candidate_number")
        if not 1 <= number <= count:
            flaws["unknown_number"] += 1
        elif numbers[number] == 1:
            evaluations[number] = evaluation
    flaws["duplicate_number"] += sum(times > 1 for number, times in numbers.items() if 1 <= number <= count)
    flaws["missing_evaluation"] += sum(number not in numbers for number in range(1, count + 1))
    selected = answer.get("selected_candidate_number")
    return evaluations, selected if type(selected) is int else None, +flaws


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
    """What is wrong with a complete candidate for a reason that needs no model; any of them prevents acceptance."""

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
    """Build a [`Candidate`] and run every check that needs no model."""
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
