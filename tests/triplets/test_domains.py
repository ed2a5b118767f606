"""Other domains than mathematics, the user's own, and templates of the paper's form, against the scripted server."""

import re

import pytest
import yaml
from triplets import scripted_answers
from triplets.running import flags, generate, records_by_id, write_paper_form

from crop_trl.triplets.domain import DOMAINS, load_domain
from crop_trl.triplets.outputs import OutputDirectory
from crop_trl.triplets.prompts import load_templates
from crop_trl.triplets.reading import read_evaluations
from crop_trl.triplets.record import load_triplets

# The tab before "au" is the code's; in mathematics it is what JSON makes of \tau.
CODE = 'Print 3 lines.\n\ndef light(km):\n\tau = 150\n\tprint(km / au, end="\\n")'
PROBLEMS = {
    "coding": CODE,
    "open_questions": "Name 3 reasons for what is said here.\n\n> The 2nd bridge was closed.",
}


def test_the_default_domain_asks_what_earlier_ledgers_answer():
    """Whoever changes one of these has everything asked anew, and paid for again, by reruns of earlier runs."""
    templates = load_templates()
    assert (templates.version, templates.digest("generator"), templates.digest("critic")) == (
        "v2-ade487738059",
        "46afb4e285ad",
        "9140ffbbbf02",
    )
    assert {kind: digest[:12] for kind, digest in templates.domain.schema_digests.items()} == {
        "generator": "d8d857d0372e",
        "critic": "839d96ad4b19",
    }


def test_every_shipped_domain_has_an_example():
    assert {path.stem for path in DOMAINS.glob("*.yaml")} == {"mathematics", *PROBLEMS}


@pytest.mark.parametrize("domain", PROBLEMS)
def test_a_domain_from_problems_to_the_trainers_rows(domain, start_server, problems, program, tmp_path):
    source = problems(*(f"[plan:{plan}] {PROBLEMS[domain]}" for plan in ("good", "repaired", "type_mismatch")))
    options = {"input": source, "output": "out", "domain": domain, "base_url": start_server("--no-json-schema")}
    process = program(*flags(options))
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    records = records_by_id(tmp_path / "out")
    statuses = [records[f"p{n:04d}"]["status"] for n in range(3)]
    # Another domain's answer type ("single_rational") makes an answer unusable.
    assert statuses == ["strict_pass", "repaired_pass", "needs_review"]
    assert records["p0002"]["rounds"][0]["flaws"] == {"critic:bad_evaluation": 3}
    types = load_domain(domain).answer_types
    assert records["p0000"]["critic"]["original_answer_type"] == next(iter(types)) != "single_integer"
    assert records["p0000"]["original_problem"] == f"[plan:good] {PROBLEMS[domain]}"
    asked = "".join(OutputDirectory(tmp_path / "out").load_run()["templates"]["texts"].values())
    assert not re.search("mathem|asy|single_|finite", asked)
    assert set(re.findall(r"\{(\w+)\}", asked)) == {
        "problem", "candidate_count", "feedback", "original", "candidates_json"
    }  # fmt: skip
    rows, _ = load_triplets(str(tmp_path / "out/triplets.jsonl"), template="{problem}")
    assert len(rows) == 2 and PROBLEMS[domain] in rows["prompt"][0][0]["content"]


def test_a_domain_goes_into_a_requests_identity_as_far_as_it_can_be_read(start_server, problems, tmp_path):
    url, source, output = start_server(), problems(f"[plan:good] {CODE}"), tmp_path / "out"
    assert generate(url, source, output, domain="coding").requests == 2
    found = yaml.safe_load((DOMAINS / "coding.yaml").read_text())
    mine = tmp_path / "mine.yaml"
    # Checks without a model are made again over the same answers; a word of the critic's asks the critic alone.
    found["verbatim"]["lines"] = "Print 3 lines"
    mine.write_text(yaml.safe_dump(found, sort_keys=False))
    again = generate(url, source, output, domain=str(mine))
    assert (again.requests, again.records[0]["status"]) == (2, "needs_review")  # a second round is asked for
    assert again.records[0]["violations"] == ["counterfactual_changes_lines"]
    del found["verbatim"]["lines"]
    found["words"]["evidence"] = "what a test shows"
    mine.write_text(yaml.safe_dump(found, sort_keys=False))
    assert generate(url, source, output, domain=str(mine)).requests == 1
    assert generate(url, source, output, domain="coding").requests == 0
    # Read as mathematics, the tab would be taken for half of a command.
    assert "\\tau" in generate(url, source, tmp_path / "other").records[0]["original_problem"]


def test_signatures_and_quoted_passages_stay(start_server, problems, tmp_path):
    source = problems("[plan:good] def f(x=1): what?", "[plan:good]\ndef f(x=1):", "[plan:good]\n> In 1900.")
    for domain, passed in (("coding", [0, 2]), ("open_questions", [0, 1])):
        made = generate(start_server(), source, tmp_path / domain, domain=domain).records
        assert [n for n, record in enumerate(made) if record["validation_passed"]] == passed


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"answer_types": {}}, "answer_types: "),
        ({"answer_types": {True: None}}, "answer_types.*valid string"),
        ({"determinacy": {"determinate": "one answer"}}, "determinacy: .*underdetermined is missing"),
        ({"determinacy": {"solvable": None}}, "determinacy.solvable"),
        ({"verbatim": {"code": "("}}, "verbatim.code"),
        ({"words": {"problems": "riddles"}}, "words: .*statement is missing"),
        ({"answers": ""}, "answers: "),
    ],
)
def test_what_is_wrong_in_a_domain_is_named(tmp_path, change, says):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load((DOMAINS / "mathematics.yaml").read_text()) | change))
    with pytest.raises(ValueError, match=rf"`domain` .*{says}.*mathematics.yaml"):
        load_domain(str(path))
    with pytest.raises(ValueError, match="`domain` 'maths' is no file and none of coding, mathematics"):
        load_domain("maths")


def test_each_domain_reads_its_own_answer_types():
    answer = scripted_answers.critic("good", [1], "function")[0]
    assert read_evaluations(answer, 1, load_domain("coding").evaluation)[0].keys() == {1}
    assert read_evaluations(answer, 1, load_domain("mathematics").evaluation)[2] == {"bad_evaluation": 1}


def test_answers_are_compared_as_the_domain_says():
    folded = [load_domain(domain).folded_answer for domain in ("mathematics", "coding", "open_questions")]
    assert [fold("$ 12$.") for fold in folded] == ["12.", "$12$.", "12"]
    assert [fold(None) for fold in folded] == [None] * 3


def test_templates_of_the_papers_form(start_server, problems, program, tmp_path):
    folder = tmp_path / "paper"
    write_paper_form(folder)
    source = problems("[plan:good] Add 2 and 3.", "[plan:repaired] Add 4 and 5.", "[plan:underdetermined] Add 6 and 7.")
    options = {"input": source, "output": "out", "templates": folder, "base_url": start_server()}
    process = program(*flags(options))
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    records = records_by_id(tmp_path / "out")
    assert [records[f"p{n:04d}"]["status"] for n in range(3)] == ["strict_pass", "repaired_pass", "needs_review"]
    assert all(record["templates"].startswith("paper-") for record in records.values())
