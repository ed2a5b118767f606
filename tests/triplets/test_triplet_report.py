"""The report's numbers, counted here by hand, and the person's check."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from triplets.scripted_server import PLANS

from crop_trl.triplets.estimate import dry_run
from crop_trl.triplets.ledger import Ledger, LedgerError
from crop_trl.triplets.outputs import OutputDirectory
from crop_trl.triplets.pipeline import generate_triplets
from crop_trl.triplets.record import load_triplets
from crop_trl.triplets.report import write_report
from crop_trl.triplets.review import apply_review, mark_differences, write_review_page
from crop_trl.triplets.settings import TripletSettings

TEXTS = [
    *(f"[plan:good] A tank holds {n} litres and loses 3 a day." for n in range(10)),
    *(f"[plan:repaired] Add {n} and 4." for n in range(3)),
    "[plan:low_counterfactual] 5 and 6",
    "[plan:type_mismatch] 6 and 7 <b>&amp;",
    "[plan:underdetermined] 7 and 8",
    "[plan:critic_not_json] 8 and 9",
    "[plan:same_texts] 9 and 10",
    "[plan:control] 10 and 11",
    "excluded \x0c here",
    "[plan:good] A tank holds 0 litres and loses 3 a day.",
]


@pytest.fixture(scope="module")
def finished(shared_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    source = folder / "problems.jsonl"
    rows = ({"id": f"p{number:04d}", "problem": text, "answer": number} for number, text in enumerate(TEXTS))
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = TripletSettings(input=[str(source)], output=str(folder / "out"), base_url=shared_server)
    generate_triplets(settings, progress=False)
    return folder / "out"


@pytest.fixture
def output(finished, tmp_path):
    return str(shutil.copytree(finished, tmp_path / "out"))


def test_report_counts(output):
    markdown = write_report(output)
    report = json.loads(OutputDirectory(output).report_json.read_text())
    assert report["problems"] == 21 and report["unfinished"] == 0
    assert report["outcomes"] == {
        "strict_pass": 11,
        "repaired_pass": 3,
        "needs_review": 5,
        "pending_repair": 1,
        "excluded_input": 1,
    }
    assert report["validated"] == 14 and report["alternates"] == 28
    assert report["repair"] == {"eligible": 9, "passed": 3}
    assert dict(report["diagnostics"]["counts"]) == {
        "counterfactual_confidence_low": 1,
        "answer_type_mismatch": 1,
        "counterfactual_non_determinate": 1,
        "critic_missing": 1,
        "found_here:counterfactual_equals_paraphrase": 1,
    }
    assert report["confidence"]["confidence"] == pytest.approx(
        {"mean": 0.96, "p05": 0.96, "median": 0.96, "minimum": 0.96}
    )
    assert report["condition_types"] == {"distinct": 1, "most_frequent": [["modulus", 14]]}
    assert report["unusable_answers"]["critic:not_json"] == 2
    assert report["unusable_answers"]["generator:control_characters"] == 6
    assert report["duplicates"]["rows"] == 1
    # One request for the repeated text; two rounds for what the first left open; no critic where nothing was complete.
    assert report["cost"]["requests"] == {"generator": 10 + 2 * 3 + 2 * 5 + 2, "critic": 10 + 2 * 3 + 2 * 5}
    assert report["cost"]["dollars"] > 0
    rows = dict(re.findall(r"^\| \**([^|*]+?)\** +\| +([\d,]+) \| +[\d.]+ %", markdown, re.MULTILINE))
    assert rows["First-round strict pass"] == "11" and rows["Final validated training subset"] == "14"
    assert "3 of 9 records" in markdown and "(33.33 %)" in markdown
    assert OutputDirectory(output).report_markdown.read_text() == markdown


def test_the_report_of_an_unfinished_or_empty_run_can_be_written(start_server, problems, tmp_path):
    source, out = problems("[plan:good] \x00"), str(tmp_path / "out")
    generate_triplets(TripletSettings(input=[source], output=out, base_url=start_server()), progress=False)
    assert "| Pre-generation input exclusion      |     1 |" in write_report(out)
    with pytest.raises(ValueError, match="no complete triplet to review"):
        write_review_page(out, 3)
    with pytest.raises(ValueError, match="holds no run"):
        write_report(str(tmp_path / "other"))


def page_items(path):
    return re.findall(r'<article data-id="([^"]+)" data-hash="([^"]+)"', path.read_text())


def test_review_page_is_seeded_complete_and_safe(output):
    page = write_review_page(output, 6, seed=1)
    items = page_items(page)
    assert len(items) == 6 and page_items(write_review_page(output, 6, seed=1)) == items
    assert page_items(write_review_page(output, 6, seed=2)) != items
    assert len(page_items(write_review_page(output, 999))) == 19
    html = page.read_text()
    assert "&lt;b&gt;&amp;amp;" in html and "<b>&amp;" not in html  # the problem's own markup stays text
    assert not re.search(r'(src|href)="?https?:', html)
    assert (
        "One number differs and the problem stays sound." in html and "The critic&#39;s result is missing" not in html
    )
    assert "result is missing" in html


def test_rejections_are_applied_kept_and_taken_back(output, tmp_path, start_server, problems):
    items = dict(page_items(write_review_page(output, 999)))
    rejected, accepted, open_case = "p0000", "p0001", "p0015"

    def save(**verdicts):
        path = tmp_path / "review.json"
        rows = [{"id": i, "text_hash": items.get(i, "x"), "verdict": v, "note": "n"} for i, v in verdicts.items()]
        path.write_text(json.dumps({"verdicts": rows}))
        return path

    markdown = apply_review(
        output, save(**{rejected: "reject", accepted: "accept", open_case: "reject", "p0002": "unsure"})
    )
    assert (
        "Rejected by a person" in markdown and "Agreement: 2 of 3 (66.67 %), Cohen's kappa 0.40; 1 unsure" in markdown
    )
    _, report = load_triplets(f"{output}/triplets.jsonl")
    assert report.kept == 13
    record = {r["id"]: r for r in OutputDirectory(output).load_records()}[rejected]
    assert (record["status"], record["validation_passed"], record["usable_for_training"]) == (
        "strict_pass",
        False,
        False,
    )
    assert record["human_review"]["note"] == "n"
    # A rerun of the same problems keeps the verdicts.
    settings = TripletSettings(input=[problems(*TEXTS)], output=output, base_url=start_server())
    assert generate_triplets(settings, progress=False).requests == 0
    assert load_triplets(f"{output}/triplets.jsonl")[1].kept == 13
    apply_review(output, save(**{rejected: "accept"}))
    assert load_triplets(f"{output}/triplets.jsonl")[1].kept == 14
    # A verdict on other texts counts for nothing.
    items[accepted] = "0" * 16
    assert "1 verdicts on earlier texts" in apply_review(output, save(**{accepted: "reject"}))
    assert load_triplets(f"{output}/triplets.jsonl")[1].kept == 14
    with pytest.raises(ValueError, match="1 records that `output`"):
        apply_review(output, save(nobody="reject"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"verdicts": {}}', '{"verdicts": [{"id": "p0000"}]}'])
def test_what_is_no_review_is_refused(output, tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a file that the review page saved"):
        apply_review(output, path)
    with pytest.raises(ValueError, match="does not exist"):
        apply_review(output, tmp_path / "none.json")


def test_a_review_waits_for_no_run(output, tmp_path):
    path = tmp_path / "review.json"
    path.write_text('{"verdicts": []}')
    with Ledger(OutputDirectory(output).ledger), pytest.raises(LedgerError, match="in use"):
        apply_review(output, path)


def test_differences_are_marked_by_word():
    pieces = mark_differences(
        "a $\\frac{13}{4}$ b c", {"reworded": "a $\\frac{12}{4}$ b", "changed": "a $\\frac{13}{4}$ x c"}
    )
    assert "".join(text for _, text in pieces) == "a $\\frac{13}{4}$ b c"
    assert [piece for piece in pieces if piece[0]] == [("reworded", "13"), ("changed", "b"), ("reworded", " c")]
    assert mark_differences("same", {}) == [("", "same")]


def test_dry_run_sends_nothing_and_needs_no_key(problems, tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    settings = TripletSettings(input=[problems(*TEXTS)], output=str(tmp_path / "out"), base_url="http://127.0.0.1:9/v1")
    text = dry_run(settings)
    assert "generator request for p0000" in text and "critic request for p0000" in text and TEXTS[0] in text
    assert "20 problems to ask, 1 excluded" in text and "cost $" in text
    assert not (tmp_path / "out").exists()


def test_dry_run_learns_from_the_ledger(output, problems):
    settings = TripletSettings(input=[problems(*TEXTS)], output=output, base_url="http://127.0.0.1:9/v1")
    assert "from the 54 answers in the ledger" in dry_run(settings)


def test_plans_cover_every_status():
    assert {plan[1] for plan in PLANS.values()} == {"strict_pass", "repaired_pass", "needs_review", "pending_repair"}


def test_every_command_of_the_documentation_runs(start_server, problems, tmp_path, monkeypatch, capsys):
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs" / "triplets.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python (examples/generate_triplets\.py) (.*)$", text, re.MULTILINE)
    assert len(commands) == 5
    problems(*TEXTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", start_server())
    for script, options in commands:
        if "--apply-review" in options:
            rows = [
                {"id": i, "text_hash": h, "verdict": "accept"} for i, h in page_items(tmp_path / "triplets/review.html")
            ]
            (tmp_path / "review.json").write_text(json.dumps({"verdicts": rows}))
        monkeypatch.setattr(sys, "argv", [script, *options.split()])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(root / script), run_name="__main__")
        assert ended.value.code == 0, capsys.readouterr().err
    assert "Agreement: 14 of 19" in capsys.readouterr().out
