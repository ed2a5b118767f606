"""What solutions say of a candidate, and what is read in a paraphrase."""

import pytest

from crop_trl.prompts import DEFAULT_PROMPT_TEMPLATE
from crop_trl.triplets.candidates import Candidate, rejection_reasons
from crop_trl.triplets.domain import load_domain
from crop_trl.triplets.numbers import changes
from crop_trl.triplets.prompts import load_templates
from crop_trl.triplets.reading import CandidateFields
from crop_trl.triplets.rules import agreement, evaluation, fields_of, majority, read_paraphrase


@pytest.mark.parametrize(
    ("answers", "answer", "share"),
    [
        (["12", "34", "34"], "34", 2 / 3),
        (["2", "0.5", "\\frac{1}{2}", "1/2"], "0.5", 0.75),  # one answer, however it is written
        (["34", "12"], None, 0.0),  # half is not more than half
        (["34", None, None], None, 0.0),  # a solution without an answer is a solution
        ([None], None, 0.0),
        ([], None, 0.0),
    ],
)
def test_the_answer_of_a_text_is_that_of_more_than_half_of_its_solutions(answers, answer, share):
    assert majority(answers) == answer and agreement(answers, majority(answers)) == pytest.approx(share)


@pytest.mark.parametrize(
    ("original", "reworded", "altered", "reasons"),
    [
        ("34", "34", "36", set()),
        ("34", "34.0", "36", set()),
        ("34", "35", None, {"paraphrase_rejected", "counterfactual_rejected"}),
        ("34", "34", "34", {"counterfactual_rejected"}),
        ("34", "34", None, {"counterfactual_rejected", "counterfactual_non_determinate"}),
        (None, "34", "36", {"original_non_determinate", "paraphrase_rejected"}),
        ("34", "34", "\\frac{36}{5}", {"answer_type_mismatch"}),
    ],
)
def test_same_for_the_paraphrase_and_another_for_the_counterfactual(original, reworded, altered, reasons):
    judged = evaluation([original], [reworded] * 4, [altered] * 4)
    found = set(rejection_reasons(judged, 0.5)) - {"not_accepted"}
    # What could not be solved fails on its confidence besides.
    assert reasons <= found and bool(reasons) == bool(found)
    assert load_domain("mathematics").evaluation.model_validate({"candidate_number": 1, **judged})
    assert Candidate(1, 1, {}, judged).passes(0.5) == (not reasons)


def test_confidences_are_shares_of_solutions():
    judged = evaluation(["34", "34", "34", "0"], ["34"] * 4, ["36", "36", "36", None, "34"])
    found = [judged[f"{name}confidence"] for name in ("paraphrase_", "counterfactual_", "")]
    assert found == [1.0, 0.6, 0.6]
    assert rejection_reasons(judged, 0.7) == ["counterfactual_confidence_low", "overall_confidence_low"]
    assert judged["counterfactual_reason"] == "36 in 60% of 5 solutions; the original: 34"


@pytest.mark.parametrize(
    ("content", "text", "flaw"),
    [
        ("<paraphrase>\nOf 9 apples 4 are eaten.\n</paraphrase>", "Of 9 apples 4 are eaten.", None),
        ("<think><paraphrase>4</paraphrase></think>So: <paraphrase>4 of 9 go.</paraphrase> Good?", "4 of 9 go.", None),
        ("<think>4 of 9 <paraphrase>4 of 9 go.</paraphrase>", None, "no_paraphrase"),
        ("Of 9 apples 4 are eaten.", None, "no_paraphrase"),
        ("<paraphrase> </paraphrase>", None, "no_paraphrase"),
        ("<paraphrase>9 \x0capples, 4 eaten.</paraphrase>", None, "control_characters"),
        ("<paraphrase>There are  9 apples; 4 are eaten.</paraphrase>", None, "repeats_original"),
        ("<paraphrase>Of nine apples 4 are eaten.</paraphrase>", None, "other_numbers"),
        ("<paraphrase>Of 9 apples 4 are eaten, so 5 are left.</paraphrase>", None, "other_numbers"),
    ],
)
def test_a_paraphrase_stands_in_its_tags_and_has_the_same_numbers(content, text, flaw):
    found, flaws = read_paraphrase("There are 9 apples; 4 are eaten.", content)
    assert (found, list(flaws)) == (text, [flaw] if flaw else [])


def test_a_candidate_says_what_was_changed():
    text = "There are 35 apples; 4 of them are eaten."
    (change,) = [change for change in changes(text, 2) if change.old == "35"]
    fields = fields_of("A basket holds 35 apples, 4 of which the children eat.", change)
    assert CandidateFields.model_validate(fields)
    assert fields["counterfactual_problem"] == text.replace("35", change.new)


def test_solutions_are_asked_for_as_in_training():
    templates = load_templates(rules="numbers")
    (turn,) = templates.messages("critic", {"problem": "How many?"})
    assert turn == {"role": "user", "content": DEFAULT_PROMPT_TEMPLATE.replace("{problem}", "How many?")}
    (turn,) = templates.messages("generator", {"problem": "How {many}?"})
    assert "<paraphrase>" in turn["content"] and "How {many}?" in turn["content"]
    assert not any("{" in text.replace("{problem}", "").replace("\\boxed{}", "") for text in templates.texts.values())
