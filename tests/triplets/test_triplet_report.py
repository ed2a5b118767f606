"""The report's numbers, counted here by hand."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from triplets.running import REPORTED, generate, write_paper_form
from triplets.scripted_answers import PLANS

from crop_trl.commands.triplets import main
from crop_trl.triplets.domain import DOMAINS
from crop_trl.triplets.estimate import dry_run
from crop_trl.triplets.outputs import OutputDirectory
from crop_trl.triplets.pipeline import generate_triplets
from crop_trl.triplets.report import write_report
from crop_trl.triplets.review import write_review_page
from crop_trl.triplets.settings import TripletSettings


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
    answers = {row["request"]: row["answers"] for row in report["cost"]["rows"]}
    assert answers == {"generator": 10 + 2 * 3 + 2 * 5 + 2, "critic": 10 + 2 * 3 + 2 * 5}
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


def test_what_a_model_wrote_cannot_spoil_the_table(output):
    label = "a|b `c` *d* <b>e</b> [f](g) $h$ \\\\ i\u202ej\nk\x07 _l_ side_length " + "m" * 10_000
    directory = OutputDirectory(output)
    records = directory.load_records()
    directory.save_records([record | {"condition_type": label} for record in records])
    markdown = write_report(output)
    (line,) = (line for line in markdown.splitlines() if line.startswith("| a"))
    assert line.startswith(
        r"| a\|b `c` *d* &lt;b&gt;e&lt;/b&gt; [f](g) $h$ \\ i‹202E›j k‹07› _l_ side_… |"
    ) and line.endswith("| 100.00 % |")
    assert json.loads(directory.report_json.read_text())["condition_types"]["most_frequent"] == [[label.lower(), 14]]
    assert max(map(len, markdown.splitlines())) < 400

    directory.save_records([record | {"condition_type": " \t"} for record in records])
    assert re.search(r"^\| \(empty\) +\| +14 \|", write_report(output), re.MULTILINE)


def test_the_endpoints_words_are_shown_as_they_are(output):
    directory = OutputDirectory(output)
    directory.save_end(error="HTTP 500: <b>*down*</b>\n| `really` |")
    assert "The run ended early: `HTTP 500: <b>*down*</b> | 'really' |`." in write_report(output)


def test_dry_run_sends_nothing_and_needs_no_key(problems, tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    settings = TripletSettings(
        input=[problems(*REPORTED)], output=str(tmp_path / "out"), base_url="http://127.0.0.1:9/v1"
    )
    text = dry_run(settings)
    assert "generator request for p0000" in text and "critic request for p0000" in text and REPORTED[0] in text
    assert "20 problems to ask, 1 excluded by the input screening; 1 rows repeat" in text and "cost $" in text
    assert "1 of them to the letter, which is asked once; 0 but for white space" in text
    assert not (tmp_path / "out").exists()


def test_only_the_same_text_is_asked_once(start_server, problems, tmp_path):
    texts = ["[plan:good] 1 and 2", "[plan:good] 1 and 2", "[plan:good] 1  and 2"]
    settings = {"input": [problems(*texts)], "output": str(tmp_path / "out"), "base_url": "http://127.0.0.1:9/v1"}
    said = (
        "2 rows repeat the text of an earlier one (1 of them to the letter, which is asked once; 1 but for white space)"
    )
    assert said in dry_run(TripletSettings(**settings))
    assert generate(start_server(), settings["input"][0], settings["output"]).requests == 4
    assert said in write_report(settings["output"])


def test_dry_run_learns_from_the_ledger(output, problems):
    settings = TripletSettings(input=[problems(*REPORTED)], output=output, base_url="http://127.0.0.1:9/v1")
    assert "from the 54 answers in the ledger" in dry_run(settings)


def test_plans_cover_every_status():
    assert {plan[1] for plan in PLANS.values()} == {"strict_pass", "repaired_pass", "needs_review", "pending_repair"}


def test_every_command_of_the_documentation_runs(start_server, problems, tmp_path, monkeypatch, capsys):
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs" / "triplets.md").read_text(encoding="utf-8")
    commands = re.findall(r"^crop-trl triplets (.*)$", text.replace("\\\n", ""), re.MULTILINE)
    commands = [options for options in commands if "open-r1/" not in options]  # of the hub
    assert len(commands) == 12
    shutil.copytree(root / "examples" / "configs", tmp_path / "examples" / "configs")
    for name in ("problems", "tasks", "questions"):
        problems(*REPORTED, name=f"{name}.jsonl")
    write_paper_form(tmp_path / "paper")
    shutil.copy(DOMAINS / "mathematics.yaml", tmp_path / "mine.yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", start_server())
    for options in commands:
        if "--apply-review" in options:
            rows = [
                {"id": i, "text_hash": h, "verdict": "accept"}
                for i, h in re.findall(
                    r'<article data-id="([^"]+)" data-hash="([^"]+)"', (tmp_path / "triplets/review.html").read_text()
                )
            ]
            (tmp_path / "review.json").write_text(json.dumps({"verdicts": rows}))
        needs_vllm = "--engine vllm" in options  # see tests/real_vllm
        assert main(shlex.split(options) + ["--dry-run"] * needs_vllm) == 0
    assert "Agreement: 14 of 19" in capsys.readouterr().out
