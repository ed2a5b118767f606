import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from triplets import scripted_server

from crop_trl.triplets.outcome import Round, build_record
from crop_trl.triplets.record import DEFAULT_PROMPT_TEMPLATE, reason_to_drop, wrap_problem
from crop_trl.triplets.source import KNOWN_WRAPPERS, Problem
from crop_trl.triplets.validation import (
    CONFIDENCES,
    Candidate,
    CriticAnswer,
    GeneratorAnswer,
    answer_flaw,
    best_first,
    check_candidate,
    local_violations,
    missing_numbers,
    parse_json_object,
    read_candidates,
    read_evaluations,
    rejection_reasons,
    request_schema,
    unclean_reason,
)

ORIGINAL = "A box holds 12 red and 30 blue balls. How many balls are there?"
FIELDS = scripted_server.candidate(ORIGINAL, 1)
EVALUATION = json.loads(scripted_server.critic("good", [1])[0])["evaluations"][0]


def evaluation(**changes):
    return {name: value for name, value in (EVALUATION | changes).items() if name != "candidate_number"}


def critic_answer(*evaluations, selected=1):
    return json.dumps({"evaluations": list(evaluations), "selected_candidate_number": selected})


# --- reading ---------------------------------------------------------------------------------------------------------


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
    value, found = parse_json_object(text, "candidates")
    assert found == flaw
    assert value == (None if flaw else {"candidates": []})


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
        (("{}", None, "length"), "cut_off"),
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


def test_numbers_that_do_not_fit():
    third = EVALUATION | {"candidate_number": 3}
    rejecting = EVALUATION | {"decision": "reject"}
    found, selected, flaws = read_evaluations(
        critic_answer(EVALUATION, rejecting, third, third | {"candidate_number": 9}, selected="1"), 4
    )
    assert list(found) == [3] and selected is None
    assert flaws == {"duplicate_number": 1, "unknown_number": 1, "missing_evaluation": 2}


def test_a_malformed_twin_still_makes_a_number_ambiguous():
    found, _, flaws = read_evaluations(critic_answer(EVALUATION, EVALUATION | {"confidence": "high"}), 1)
    assert found == {}
    assert flaws == {"duplicate_number": 1, "bad_confidence": 1}


def test_schemas_are_strict_and_bare():
    for model in (GeneratorAnswer, CriticAnswer):
        schema = request_schema(model)
        nodes = [schema, *schema["$defs"].values()]
        assert all(
            node["additionalProperties"] is False and node["required"] == list(node["properties"]) for node in nodes
        )
        text = json.dumps(schema)
        assert "minimum" not in text and '"title"' not in text and '"description"' not in text
    assert {"answer_type" in name for name in schema["$defs"]["Evaluation"]["properties"]} == {True, False}


# --- checks without a model ------------------------------------------------------------------------------------------


def test_control_characters_are_category_cc_without_tab_and_newline():
    for code in range(0x110000):
        character = chr(code)
        category = unicodedata.category(character)
        if category in ("Cc", "Cs"):
            unclean = character not in "\t\n"
            assert (unclean_reason(f"a{character}b") is not None) == unclean, hex(code)
    assert unclean_reason("a\u200bb\u2028 中文 \U0001f600") is None
    assert unclean_reason(" \n") == "empty"


def test_numbers_of_the_original():
    assert missing_numbers("12 of 30, 1,000 or 3.5 (12)", "twelve of 30 or 3.5") == ["12", "1,000"]


@pytest.mark.parametrize(
    ("paraphrase", "counterfactual", "found"),
    [
        ("P 1", "C 2", []),
        ("P  1", "P 1", ["counterfactual_equals_paraphrase"]),
        ("P 1", "O\n1", ["counterfactual_equals_original"]),
        ("```\nP 1", "C 2", ["paraphrase_has_markdown_fence"]),
        ("P 1", "C $2 \times 3$", ["counterfactual_has_broken_latex_command"]),
        ("P $1 \neq 2$", "C 2", ["paraphrase_has_broken_latex_command"]),
        ("P\n\tindented, in\nequal parts", "C 2", []),
    ],
)
def test_local_violations(paraphrase, counterfactual, found):
    assert local_violations("O 1", paraphrase, counterfactual) == found


def test_candidates_lose_their_wrapper_and_outer_white_space():
    fields = FIELDS | {"paraphrase_problem": wrap_problem("  P 12 30 ", DEFAULT_PROMPT_TEMPLATE)}
    candidate = check_candidate(ORIGINAL, fields, 1, 1, KNOWN_WRAPPERS)
    assert candidate.fields["paraphrase_problem"] == "P 12 30"
    assert candidate.incomplete is None and not candidate.warnings


@pytest.mark.parametrize(
    ("text", "reason"), [("x\x0c", "control_characters"), ("", "empty"), ("\ud83d", "invalid_unicode")]
)
def test_unclean_rewrites_are_incomplete(text, reason):
    assert check_candidate(ORIGINAL, FIELDS | {"counterfactual_problem": text}, 1, 1, ()).incomplete == reason


# --- acceptance and ranking ------------------------------------------------------------------------------------------

FAILING = {
    "not_accepted": {"decision": "reject"},
    "violations": {"violations": [{"criterion": "a", "evidence": "b"}]},
    "paraphrase_rejected": {"paraphrase_status": "reject"},
    "counterfactual_rejected": {"counterfactual_status": "reject"},
    "counterfactual_non_determinate": {"counterfactual_determinacy": "unknown"},
    "original_non_determinate": {"original_determinacy": "underdetermined"},
    "paraphrase_confidence_low": {"paraphrase_confidence": 0.849},
    "counterfactual_confidence_low": {"counterfactual_confidence": 0.849},
    "overall_confidence_low": {"confidence": 0.849},
    "answer_type_mismatch": {"counterfactual_answer_type": "yes_no"},
}


@pytest.mark.parametrize("name", FAILING)
def test_each_criterion_alone_prevents_acceptance(name):
    assert rejection_reasons(evaluation(**FAILING[name]), 0.85) == [name]


def test_the_threshold_itself_passes():
    assert rejection_reasons(evaluation(**dict.fromkeys(CONFIDENCES, 0.85)), 0.85) == []


def candidate(round, number, overall=0.9, paraphrase=0.9, counterfactual=0.9, text=None, **changes):
    values = dict(zip(CONFIDENCES, (paraphrase, counterfactual, overall)))
    fields = FIELDS | {"counterfactual_problem": text or f"{round} {number}"}
    return Candidate(round, number, fields, evaluation(**values, **changes))


def test_ranking():
    order = [
        candidate(2, 3, overall=0.99, paraphrase=0.86),
        candidate(1, 2, paraphrase=0.97, counterfactual=0.95),
        candidate(1, 1, paraphrase=0.99, counterfactual=0.94),
        candidate(1, 3),
        candidate(2, 1),
        candidate(2, 2),
        Candidate(1, 9, FIELDS),
    ]
    assert best_first(reversed(order)) == order


def record(*candidates, threshold=0.85):
    rounds = [Round([c for c in candidates if c.round == n]) for n in range(1, max(c.round for c in candidates) + 1)]
    return build_record(Problem("x", ORIGINAL, "42"), rounds, threshold, "v1-0")


def test_the_best_passing_candidate_is_the_triplet_and_the_others_are_alternates():
    made = record(candidate(1, 1, 0.9), candidate(1, 2, 0.95), candidate(1, 3, 0.99, decision="reject"))
    assert (made["status"], made["candidate_number"]) == ("strict_pass", 2)
    assert [a["candidate_number"] for a in made["alternates"]] == [1]
    assert reason_to_drop(made) is None


def test_alternates_have_different_counterfactuals():
    made = record(candidate(1, 1, text="same  text"), candidate(1, 2, text="same text"), candidate(1, 3))
    assert [a["candidate_number"] for a in made["alternates"]] == [3]


def test_statuses_and_flags():
    later = record(candidate(1, 1, decision="reject"), candidate(2, 1))
    assert later["status"] == "repaired_pass" and later["round"] == 2
    open_case = record(candidate(1, 1, 0.3), candidate(1, 2, 0.6), candidate(2, 1, 0.5))
    assert open_case["status"] == "needs_review" and open_case["candidate_number"] == 2
    assert (open_case["triplet_complete"], open_case["usable_for_training"], open_case["validation_passed"]) == (
        True,
        True,
        False,
    )
    unjudged = record(Candidate(1, 1, FIELDS))
    assert unjudged["status"] == "needs_review" and unjudged["critic"] is None
    broken = candidate(1, 1)
    broken.incomplete = "control_characters"
    assert record(broken)["status"] == "pending_repair" and not record(broken)["triplet_complete"]
    found_here = candidate(1, 1)
    found_here.violations = ["counterfactual_equals_paraphrase"]
    assert record(found_here)["status"] == "needs_review"
