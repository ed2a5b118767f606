import json
import unicodedata

import pytest
from triplets import scripted_answers

from crop_trl.prompts import DEFAULT_PROMPT_TEMPLATE, wrap_problem
from crop_trl.triplets.candidates import (
    Candidate,
    Round,
    build_record,
    check_candidate,
    local_violations,
    missing_numbers,
    rejection_reasons,
)
from crop_trl.triplets.domain import load_domain
from crop_trl.triplets.reading import CONFIDENCES
from crop_trl.triplets.record import reason_to_drop
from crop_trl.triplets.source import KNOWN_WRAPPERS, Problem, unclean_reason

MATHEMATICS = load_domain("mathematics")
ORIGINAL = "A box holds 12 red and 30 blue balls. How many balls are there?"
FIELDS = scripted_answers.candidate(ORIGINAL, 1)
EVALUATION = json.loads(scripted_answers.critic("good", [1])[0])["evaluations"][0]


def evaluation(**changes):
    return {name: value for name, value in (EVALUATION | changes).items() if name != "candidate_number"}


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
    ],
)
def test_local_violations(paraphrase, counterfactual, found):
    assert local_violations("O 1", paraphrase, counterfactual, MATHEMATICS.verbatim) == found


FIGURE = "[asy]\ndraw((0,0)--(12,5));\n[/asy]"


@pytest.mark.parametrize(
    ("original", "paraphrase", "found"),
    [
        (f"How long is it? {FIGURE}", f"{FIGURE} Say how long this is.", []),
        (f"How long is it? {FIGURE}", "Say how long this is.", ["paraphrase_changes_figure_code"]),
        (f"How long is it? {FIGURE}", f"How long? {FIGURE.replace('12', '13')}", ["paraphrase_changes_figure_code"]),
        ("How long is it?", f"How long? {FIGURE}", ["paraphrase_changes_figure_code"]),
        (r"How? \begin{asy}draw((1,2));\end{asy}", "How?", ["paraphrase_changes_figure_code"]),
        ("求 $x$ 的所有可能值之和。", "所有可能的 $x$ 之和是多少？", []),
        ("求 $x$ 的所有可能值之和。", "What is the sum of all $x$?", ["paraphrase_is_in_another_language"]),
        ("What is the sum of all $x$?", "所有可能的 $x$ 之和是多少？", ["paraphrase_is_in_another_language"]),
        ("Mr Li (李) has 3 hats.", "Three hats belong to Mr Li.", []),
    ],
)
def test_figures_and_language_stay(original, paraphrase, found):
    assert [
        v for v in local_violations(original, paraphrase, "C 2", MATHEMATICS.verbatim) if v.startswith("paraphrase")
    ] == found


def test_candidates_lose_their_wrapper_and_outer_white_space():
    fields = FIELDS | {"paraphrase_problem": wrap_problem("  P 12 30 ", DEFAULT_PROMPT_TEMPLATE)}
    candidate = check_candidate(ORIGINAL, fields, 1, 1, KNOWN_WRAPPERS, set(), MATHEMATICS)
    assert candidate.fields["paraphrase_problem"] == "P 12 30"
    assert candidate.incomplete is None and not candidate.warnings


@pytest.mark.parametrize(
    ("text", "reason"), [("x\x0c", "control_characters"), ("", "empty"), ("\ud83d", "invalid_unicode")]
)
def test_unclean_rewrites_are_incomplete(text, reason):
    fields = FIELDS | {"counterfactual_problem": text}
    assert check_candidate(ORIGINAL, fields, 1, 1, (), set(), MATHEMATICS).incomplete == reason


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


def found_here(candidate):
    candidate.violations = ["counterfactual_equals_paraphrase"]
    return candidate


def test_ranking():
    order = [
        candidate(2, 3, overall=0.99, paraphrase=0.86),
        candidate(1, 2, paraphrase=0.97, counterfactual=0.95),
        candidate(1, 1, paraphrase=0.99, counterfactual=0.94),
        candidate(1, 3),
        candidate(2, 1),
        candidate(2, 2),
        candidate(2, 4, overall=0.1),
        Candidate(1, 9, FIELDS),
        candidate(1, 4, overall=0.3, decision="reject"),
        candidate(1, 5, overall=0.99, decision="reject", paraphrase_status="reject", paraphrase=0.1),
        candidate(1, 6, overall=0.99, decision="reject", paraphrase_status="reject", paraphrase=0.99),
        found_here(candidate(1, 7, overall=0.99)),
    ]
    assert sorted(reversed(order), key=lambda candidate: candidate.rank) == order


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
    rejected = candidate(1, 3, 0.99, decision="reject")  # with the most confidence
    open_case = record(candidate(1, 1, 0.3), candidate(1, 2, 0.6), rejected, candidate(2, 1, 0.5))
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
    assert record(found_here(candidate(1, 1)))["status"] == "needs_review"
