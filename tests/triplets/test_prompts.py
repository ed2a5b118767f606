import json
import shutil

import pytest

from crop_trl.triplets.candidates import Candidate
from crop_trl.triplets.prompts import DEFAULT_TEMPLATES, fill, load_templates, round_feedback


def copy_templates(tmp_path):
    return shutil.copytree(DEFAULT_TEMPLATES, tmp_path / "mine")


def test_braces_of_a_problem_are_not_placeholders():
    problem = r"Let $S = \{x\}$ and $\frac{1}{2}$; {feedback} {candidate_count} {0} {"
    user = load_templates().generator_messages(problem, 3, "")[1]["content"]
    assert problem in user
    assert "up to 3 different" in user and "{candidate_count} {0}" in user


def test_fill_leaves_what_it_has_no_value_for():
    assert fill("{problem} {original} {other}", {"problem": "{original}"}) == "{original} {original} {other}"


def test_critic_sees_every_candidate_numbered_as_valid_json():
    candidates = [{"paraphrase_problem": 'a "quoted" \\frac'}, {"paraphrase_problem": "中文"}]
    user = load_templates().critic_messages("The problem", candidates)[1]["content"]
    block = user.split("<candidates>\n")[1].split("\n</candidates>")[0]
    assert [c["candidate_number"] for c in json.loads(block)] == [1, 2]
    assert json.loads(block)[0]["paraphrase_problem"] == candidates[0]["paraphrase_problem"]
    assert "中文" in user


def test_no_lone_surrogate_gets_into_a_message():
    templates = load_templates()
    messages = templates.critic_messages("P \ud83d", [{"condition_type": "a\udc00b \U0001f600"}])
    messages += templates.generator_messages("P", 3, "because \ud800.")
    text = "".join(message["content"] for message in messages)
    text.encode()
    assert "a\ufffdb \U0001f600" in text and "because \ufffd." in text and "P \ufffd" in text


def test_version_follows_the_texts(tmp_path):
    mine = copy_templates(tmp_path)
    before = load_templates(mine).version
    assert before.split("-")[1] == load_templates().version.split("-")[1]
    (mine / "critic_system.txt").write_text("Judge.", encoding="utf-8")
    assert load_templates(mine).version != before


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("generator_user.txt", "{problem} {candidate_count}", "lacks {feedback}"),
        ("critic_user.txt", "{original} {candidates_json} {problem}", "contains {problem}"),
        ("critic_user.txt", None, "no readable critic_user.txt"),
    ],
)
def test_a_broken_template_is_named(tmp_path, name, text, says):
    mine = copy_templates(tmp_path)
    (mine / name).unlink() if text is None else (mine / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="templates") as caught:
        load_templates(mine)
    assert says in str(caught.value)


def test_feedback_carries_the_critics_reasons():
    evaluation = {
        "violations": [{"criterion": "two_conditions", "evidence": "7 and 9 both differ"}],
        "counterfactual_reason": "no solution is left",
    }
    fields = {
        "counterfactual_condition_description": "{9}",
        "paraphrase_problem": "P\n{x}",
        "counterfactual_problem": "C",
    }
    candidate = Candidate(1, 2, fields, evaluation, violations=["local_check"])
    text = round_feedback(["generator:bad_candidate", "critic:not_json"], [candidate])
    for part in (
        "Candidate 2",
        "<paraphrase>\nP\n{x}\n</paraphrase>\n<counterfactual>\nC\n</counterfactual>",
        "{9}",
        "7 and 9 both differ",
        "no solution is left",
        "local check",
        "lacked a field",
    ):
        assert part in text
    assert "JSON" not in text  # what the critic did wrong is nothing to the generator
    assert round_feedback([], []) == ""


def test_no_template_names_a_real_key_or_wrapper():
    for text in load_templates().texts.values():
        assert "boxed" not in text
    assert all(
        "language" in text and "[/asy]" in text for name, text in load_templates().texts.items() if "system" in name
    )
