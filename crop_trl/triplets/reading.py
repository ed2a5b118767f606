"""Reading a model's answer: the form it must have, and the JSON in whatever text stands round it.

Nothing in here raises on what a model wrote. A flaw is a name (`not_json`, `cut_off`, `bad_confidence`, ...) that is
counted in the report; one bad item of an answer does not take the good ones with it.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

Verdict = Literal["accept", "reject"]
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
    original_answer_type: str  # [`evaluation_form`] narrows both
    counterfactual_answer_type: str
    original_determinacy: Determinacy
    counterfactual_determinacy: Determinacy
    determinacy_evidence: str
    confidence: Confidence


class GeneratorAnswer(_Strict):
    """The generator's whole answer."""

    decision: Literal["candidates", "none"]
    candidates: list[CandidateFields]


CONFIDENCES = ("paraphrase_confidence", "counterfactual_confidence", "confidence")
VERDICTS = ("paraphrase_status", "counterfactual_status", "decision")  # what each is the confidence of
_REJECTION = re.compile(rf'"(?:{"|".join(VERDICTS)})"\s*:\s*"\s*reject', re.IGNORECASE)


def evaluation_form(answer_types: Iterable[str]) -> type[Evaluation]:
    """[`Evaluation`] with these answer types and no others."""
    one = Literal[tuple(answer_types)]
    return create_model("Evaluation", __base__=Evaluation, original_answer_type=one, counterfactual_answer_type=one)


def critic_form(evaluation: type[Evaluation]) -> type[BaseModel]:
    """The form of the critic's whole answer."""
    return create_model(
        "CriticAnswer", __base__=_Strict, evaluations=list[evaluation], selected_candidate_number=int | None
    )


def request_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema that goes with a request, in the subset that structured outputs share between endpoints: every
    property required, none besides, no numeric bounds (several engines refuse them; the bounds are checked here)."""

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
_LENIENT = json.JSONDecoder()
# LaTeX and sets ("\\frac{1}{2}", "{1, 2}") open braces by the hundred, but never like this.
_OPENING = re.compile(r'\{(?=\s*")')
_THINKING = re.compile(r"<(/?)think(?:ing)?>")
MOST_ATTEMPTS = 1_000  # to read an object, before a text counts as unreadable


def parse_json_objects(text: str, key: str) -> tuple[list[dict[str, Any]], str | None]:
    """The JSON objects with `key` in a model's text, in the order they stand there, or none and the flaw (`not_json`,
    `wrong_schema`).

    What stands round them (fences, prose) is left aside, and so is what a model thought before it answered, see
    [`_answered`]."""
    found: list[tuple[int, dict[str, Any]]] = []
    flaw, place, outside = None, 0, []
    last = text.rfind(f'"{key}"')
    for _ in range(MOST_ATTEMPTS):
        opening = _OPENING.search(text, place)
        if not opening or opening.start() >= last:
            break
        start, end = opening.start(), opening.start() + 1
        try:
            value, end = _DECODER.raw_decode(text, start)
        except _DuplicateKey:
            flaw = flaw or "wrong_schema"
            end = _end_of_object(text, start)
        except (ValueError, RecursionError):
            flaw = flaw or "not_json"
        else:
            if key in value:
                found.append((start, value))
            else:
                flaw = flaw or "wrong_schema"
        outside.append((place, start))
        place = end
    outside.append((place, len(text)))
    answered = _answered(text, [tag for part in outside for tag in _THINKING.finditer(text, *part)])
    objects = [value for start, value in found if start in answered]
    return objects, None if objects else flaw or ("wrong_schema" if last < 0 and _is_object(text) else "not_json")


def _answered(text: str, tags: list[re.Match]) -> range:
    """Where the answer stands: after the last closing tag of a model's thinking and before an opening one that nothing
    closes. A closing tag alone, at the very end, had the answer before it. Tags inside JSON are none."""
    closings = [n for n, tag in enumerate(tags) if tag[1]]
    start = tags[closings[-1]].end() if closings else 0
    if closings and not text[start:].strip() and all(tag[1] for tag in tags):
        start = 0
    unclosed = tags[closings[-1] + 1 :] if closings else tags
    return range(start, unclosed[0].start() if unclosed else len(text))


def _end_of_object(text: str, start: int) -> int:
    try:
        return _LENIENT.raw_decode(text, start)[1]
    except (ValueError, RecursionError):  # repeats a key inside, and is broken further on
        return start + 1


def _is_object(text: str) -> bool:
    try:
        return isinstance(_LENIENT.raw_decode(text, text.index("{"))[0], dict)
    except (ValueError, RecursionError):
        return False


def answer_flaw(content: str | None, refusal: str | None, finish_reason: str | None) -> str | None:
    """Why an answer cannot be read at all (`refusal`, `content_filter`, `cut_off`, `empty`), or `None`."""
    if refusal:
        return "refusal"
    if finish_reason == "content_filter":
        return "content_filter"
    if finish_reason == "length" and not (content and _is_whole(content)):
        return "cut_off"
    if not content or not content.strip():
        return "empty"
    return None


def _is_whole(content: str) -> bool:
    """Whether a text begins with a complete JSON object, as when a model fills up with spaces until it is cut off."""
    content = content.lstrip()
    return content.startswith("{") and _is_object(content)


def read_candidates(content: str, limit: int) -> tuple[list[dict[str, str]], Counter]:
    """The generator's candidates that have every field, at most `limit` of them, and the flaws found on the way.

    A flaw of the whole answer (`not_json`, `wrong_schema`, `no_candidates`) comes with an empty list."""

    def read(answer: dict[str, Any]) -> tuple[list[dict[str, str]], Counter]:
        items, flaws, candidates = answer["candidates"], Counter(), []
        if not isinstance(items, list):
            return [], Counter(["wrong_schema"])
        if not items:
            flaws["no_candidates"] += 1
        for item in items[:limit]:
            try:
                candidates.append(CandidateFields.model_validate(item).model_dump())
            except ValidationError:
                flaws["bad_candidate"] += 1
        if len(items) > limit:
            flaws["too_many_candidates"] += 1
        return candidates, flaws

    objects, flaw = parse_json_objects(content, "candidates")
    if flaw:
        return [], Counter([flaw])
    # The last one with something in it: a model shows the form, drafts, then answers.
    readings = [read(value) for value in reversed(objects)]
    return next((reading for reading in readings if reading[0]), readings[0])


def read_evaluations(
    content: str, count: int, form: type[Evaluation]
) -> tuple[dict[int, dict[str, Any]], int | None, Counter]:
    """The critic's evaluations by candidate number, the number it selected, and the flaws found on the way.

    An evaluation counts only if it is complete and the only one of its number: two evaluations of one candidate void
    each other, since nothing says which one is meant. A number that no candidate has voids the answer: the others may
    be shifted. Of several objects the last that holds something counts, but what was rejected in one before stays
    rejected: an acceptance that follows may speak of a candidate as it should have been."""
    objects, flaw = parse_json_objects(content, "evaluations")
    if flaw:
        return {}, None, Counter([flaw])
    said = _REJECTION.findall(_THINKING.split(content)[-1])
    if len(said) > sum(len(_REJECTION.findall(json.dumps(value))) for value in objects):
        # An object that cannot be read rejects something: which candidate, nobody can tell.
        return {}, None, Counter(["unreadable_rejection"])
    readings = [_read_evaluations(value, count, form) for value in objects]
    if any(flaws["unknown_number"] for _, _, flaws, _ in readings):
        return {}, None, Counter(["unknown_number"])
    chosen = max((n for n, reading in enumerate(readings) if reading[0]), default=-1)
    evaluations, selected, flaws, _ = readings[chosen]
    for number, evaluation in [*evaluations.items()]:
        others = [reading for n, reading in enumerate(readings) if n != chosen or number in reading[3]]
        rejections = [found.get(number) for found, _, _, rejected in others if number in rejected]
        if rejections and not _rejects(evaluation):
            flaws["accepted_after_rejection"] += 1
            del evaluations[number]
            evaluations |= {number: rejections[-1]} if rejections[-1] else {}
    return evaluations, selected, flaws


def _read_evaluations(
    answer: dict[str, Any], count: int, form: type[Evaluation]
) -> tuple[dict[int, dict[str, Any]], int | None, Counter, set]:
    """[`read_evaluations`] of one object, and the numbers that it rejects, in whatever form."""
    items, flaws = answer["evaluations"], Counter()
    if not isinstance(items, list):
        return {}, None, Counter(["wrong_schema"]), set()
    numbered = [i for i in items if isinstance(i, dict) and type(i.get("candidate_number")) is int]
    numbers = Counter(item["candidate_number"] for item in numbered)
    evaluations = {}
    for item in items:
        try:
            evaluation = form.model_validate(item).model_dump()
        except ValidationError as error:
            places = {name for problem in error.errors(include_url=False) for name in problem["loc"]}
            flaws["bad_confidence" if places & set(CONFIDENCES) else "bad_evaluation"] += 1
            continue
        number = evaluation.pop("candidate_number")
        if numbers[number] == 1:
            evaluations[number] = evaluation
    asked = range(1, count + 1)
    flaws["unknown_number"] += sum(number not in asked for number in numbers)
    flaws["duplicate_number"] += sum(times > 1 for times in numbers.values())
    flaws["missing_evaluation"] += sum(number not in numbers for number in asked)
    selected = answer.get("selected_candidate_number")
    rejected = {_number(item.get("candidate_number")) for item in items if isinstance(item, dict) and _rejects(item)}
    return evaluations, selected if type(selected) is int else None, +flaws, rejected


def _rejects(evaluation: Mapping[str, Any]) -> bool:
    return any(str(evaluation.get(name)).strip().casefold() == "reject" for name in VERDICTS)


def _number(value: Any) -> int | None:
    """A candidate's number, also one that is written as a text or with a fraction of zero."""
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError):
        return None
