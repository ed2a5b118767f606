"""What is read out of a model's text, and what is counted as a flaw."""

import json
import time
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from triplets import scripted_answers

from crop_trl.triplets import reading
from crop_trl.triplets.domain import load_domain
from crop_trl.triplets.reading import CONFIDENCES, answer_flaw, parse_json_objects, read_candidates

MATHEMATICS = load_domain("mathematics")
read_evaluations = partial(reading.read_evaluations, form=MATHEMATICS.evaluation)

ORIGINAL = "A box holds 12 red and 30 blue balls. How many balls are there?"
FIELDS = scripted_answers.candidate(ORIGINAL, 1)
EVALUATION = json.loads(scripted_answers.critic("good", [1])[0])["evaluations"][0]


def critic_answer(*evaluations, selected=1):
    return json.dumps({"evaluations": list(evaluations), "selected_candidate_number": selected})


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ('{"candidates": []}', None),
        ('Here you are:\n```json\n{"candidates": []}\n```\nBye {now}', None),
        ('<think>maybe {"candidates": [1]}</think> {"candidates": []}', None),
        ('The set {1, 2}. {"candidates": []}', None),
        ("no json here", "not_json"),
        ('{"candidates": [', "not_json"),
        ('{"candidates": [{"a": 1}, {"b": ', "not_json"),
        ('{"result": {"candidates": []}}', "wrong_schema"),
        ('{"candidates": [], "candidates": [1]}', "wrong_schema"),
        ("[1, 2]", "not_json"),
        ("{" * 100_000, "not_json"),
        ('{"a":' * 100_000, "not_json"),
    ],
)
def test_json_is_found_where_it_is_whole(text, flaw):
    objects, found = parse_json_objects(text, "candidates")
    assert found == flaw
    assert objects == ([] if flaw else [{"candidates": []}])


ANSWER = json.dumps({"decision": "candidates", "candidates": [FIELDS]})
OTHER = ANSWER.replace("In other words", "Put differently")
TAGGED = ANSWER.replace("In other words", "After </think> comes")


@pytest.mark.parametrize(
    ("text", "paraphrase"),
    [
        (r"With $\frac{1}{2}$, {1, 2} and { x } " * 50 + ANSWER, "In other words"),
        ('I weigh {"this": 1} and {"that": ' * 50 + ANSWER, "In other words"),
        ('The form is {"candidates": []}: ' + ANSWER, "In other words"),
        ('The form is {"candidates": [{"condition_type": "..."}]}: ' + ANSWER, "In other words"),
        (ANSWER + ' I kept to the form {"decision": "none", "candidates": []}.', "In other words"),
        (f"A draft: {ANSWER} Better: {OTHER}", "Put differently"),
        (f"<think>A draft: {ANSWER}</think>{OTHER}", "Put differently"),
        (f"A draft: {ANSWER}</think></think>\n{OTHER}\n", "Put differently"),
        (TAGGED, "After </think> comes"),
        (f"<thinking>hm</thinking>```json\n{TAGGED}\n```", "After </think> comes"),
        (f"{ANSWER}</think>\n", "In other words"),  # an answer that was given inside the thinking, and none after it
        (f'{{"candidates": [], "candidates": [1]}} {ANSWER}', "In other words"),
        (f'{{"a": {{"b": 1, "b": 2}}, "c": }} {ANSWER}', "In other words"),
    ],
)
def test_the_answer_is_read_wherever_it_stands(text, paraphrase):
    (found,), _ = read_candidates(text, 3)
    assert found["paraphrase_problem"].startswith(paraphrase)


def test_a_model_that_thought_better_of_it_gave_no_candidate():
    assert read_candidates(f'<think>{ANSWER}</think> {{"decision": "none", "candidates": []}}', 3) == (
        [],
        {"no_candidates": 1},
    )
    assert read_candidates(f"<think>{ANSWER} Or rather</think> I had better not.", 3) == ([], {"not_json": 1})


def test_a_critic_that_changes_its_mind_is_taken_at_its_last_word():
    text = f"{critic_answer(EVALUATION)} Wait: {critic_answer(EVALUATION | {'decision': 'reject'})}"
    assert read_evaluations(text, 1)[0][1]["decision"] == "reject"


@pytest.mark.parametrize("piece", ['{"a":', '{"a": [', '{"candidates": "', '{"a": {"b": 1, ', '{"x": [{"y": 1}, '])
def test_no_text_takes_long_to_read(piece):
    started = time.process_time()
    parse_json_objects(piece * 50_000 + '"candidates"', "candidates")
    # A tenth of a second; quadratic time would take an hour.
    assert time.process_time() - started < 60


@given(st.text() | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_no_text_makes_reading_fail(text):
    for wrapped in (text, f'{{"candidates": {text}}}', f'{{"evaluations": [{text}]}}'):
        read_candidates(wrapped, 3)
        read_evaluations(wrapped, 3)


@pytest.mark.parametrize(
    ("answer", "flaw"),
    [
        ((None, "I will not.", "stop"), "refusal"),
        (("{}", None, "content_filter"), "content_filter"),
        (('{"candidates": [', None, "length"), "cut_off"),
        (('{"candidates": []}' + " \n" * 500, None, "length"), None),  # whole, then spaces until the limit
        (('<think>{"candidates": []}', None, "length"), "cut_off"),
        ((None, None, "length"), "cut_off"),
        ((None, None, "stop"), "empty"),
        ((" \n", None, None), "empty"),
        (("{}", "", "stop"), None),
    ],
)
def test_flaws_of_a_whole_answer(answer, flaw):
    assert answer_flaw(*answer) == flaw


def test_a_bad_candidate_leaves_the_others():
    bad = [{**FIELDS, "condition_type": 3}, {name: FIELDS[name] for name in list(FIELDS)[:3]}, "text"]
    found, flaws = read_candidates(json.dumps({"candidates": [FIELDS, *bad, FIELDS]}), 4)
    assert found == [FIELDS]
    assert flaws == {"bad_candidate": 3, "too_many_candidates": 1}


@pytest.mark.parametrize("name", CONFIDENCES)
@pytest.mark.parametrize("value", [1.01, -0.1, 97, "0.9", None, True, float("nan"), float("inf"), [0.9]])
def test_a_confidence_out_of_form_voids_its_evaluation_only(name, value):
    second = EVALUATION | {"candidate_number": 2}
    found, _, flaws = read_evaluations(critic_answer(EVALUATION | {name: value}, second), 2)
    assert list(found) == [2]
    assert flaws == {"bad_confidence": 1}


def test_whole_numbers_are_confidences():
    found, _, flaws = read_evaluations(critic_answer(EVALUATION | {"confidence": 1, "paraphrase_confidence": 0}), 1)
    assert found[1]["confidence"] == 1.0 and not flaws


def numbered(number, **changes):
    return EVALUATION | {"candidate_number": number} | changes


def test_numbers_that_do_not_fit():
    answer = critic_answer(EVALUATION, numbered(1, decision="reject"), numbered(3), selected="1")
    found, selected, flaws = read_evaluations(answer, 4)
    assert list(found) == [3] and selected is None
    assert flaws == {"duplicate_number": 1, "missing_evaluation": 2}


@pytest.mark.parametrize("numbers", [(0, 1, 2), (1, 2, 3, 4), (1, 2, -1)])
def test_a_number_that_no_candidate_has_voids_the_answer(numbers):
    counted_from_0 = critic_answer(*(numbered(n, decision="reject" if n == 0 else "accept") for n in numbers))
    for text in (counted_from_0, f"{critic_answer(EVALUATION)} Rather: {counted_from_0}"):
        assert read_evaluations(text, 3) == ({}, None, {"unknown_number": 1})


REJECTED = numbered(1, decision="reject", counterfactual_status="reject")


@pytest.mark.parametrize(
    ("text", "decisions", "flaw"),
    [
        (f"{critic_answer(REJECTED)} If it were fixed: {critic_answer(EVALUATION)}", {1: "reject"}, True),
        (f"{critic_answer(REJECTED, numbered(2))} Or: {critic_answer(EVALUATION)}", {1: "reject"}, True),
        # What was rejected in a form that cannot be read is not accepted either.
        (f"{critic_answer(REJECTED | {'confidence': 97})} If fixed: {critic_answer(EVALUATION)}", {}, True),
        (f"{critic_answer(EVALUATION)} Wait: {critic_answer(REJECTED)}", {1: "reject"}, False),
        (f"{critic_answer(numbered(2, decision='reject'))} And: {critic_answer(EVALUATION)}", {1: "accept"}, False),
        (f"<think>{critic_answer(REJECTED)}</think> {critic_answer(EVALUATION)}", {1: "accept"}, False),
    ],
)
def test_a_rejection_does_not_become_an_acceptance(text, decisions, flaw):
    found, _, flaws = read_evaluations(text, 2)
    assert {number: evaluation["decision"] for number, evaluation in found.items()} == decisions
    assert bool(flaws["accepted_after_rejection"]) == flaw


@pytest.mark.parametrize(
    "text", ["<think>{}", "<think>{} so it is.", "<think>a</think> b <thinking>{}", "<think>{}</think>\n"]
)
def test_a_draft_in_thinking_is_no_answer(text):
    assert read_evaluations(text.replace("{}", critic_answer(EVALUATION)), 1) == ({}, None, {"not_json": 1})


def test_a_malformed_twin_still_makes_a_number_ambiguous():
    found, _, flaws = read_evaluations(critic_answer(EVALUATION, EVALUATION | {"confidence": "high"}), 1)
    assert found == {}
    assert flaws == {"duplicate_number": 1, "bad_confidence": 1}


def test_schemas_are_strict_and_bare():
    for schema in MATHEMATICS.schemas.values():
        nodes = [schema, *schema["$defs"].values()]
        assert all(
            node["additionalProperties"] is False and node["required"] == list(node["properties"]) for node in nodes
        )
        text = json.dumps(schema)
        assert "minimum" not in text and '"title"' not in text and '"description"' not in text
    assert {"answer_type" in name for name in schema["$defs"]["Evaluation"]["properties"]} == {True, False}


def test_a_rejection_in_any_form_stays_one():
    """Beside an acceptance, before or after it; what cannot be read but rejects voids the answer."""
    accepted, rejected = (scripted_answers.critic(kind, [1])[0] for kind in ("good", "reject"))

    def changed(**fields) -> str:
        answer = json.loads(rejected)
        answer["evaluations"][0].update(fields)
        return json.dumps(answer)

    forms = [rejected, changed(confidence="0.9"), changed(candidate_number="1"), changed(decision="REJECT")]
    forms += [rejected.rstrip()[:-1] + ",}", rejected[:-5]]
    for form in forms:
        for order in ((accepted, form), (form, accepted)):
            evaluations, _, _ = read_evaluations("\nOn reflection:\n".join(order), 1)
            assert evaluations.get(1, {}).get("decision") != "accept", order
    # What was thought before the answer is no part of it.
    assert read_evaluations(f"<think>{rejected}</think>{accepted}", 1)[0][1]["decision"] == "accept"
