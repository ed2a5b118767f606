"""What a rerun asks, and what it keeps: whatever ended the run before, no answer is lost or paid for twice."""

import json
import shutil
import time
from types import SimpleNamespace

import pytest
from triplets.running import EVERY_PLAN, KEY, answers_in, every_plan, flags, generate, records_by_id, served
from triplets.scripted_answers import PLANS

from crop_trl.triplets.costs import Account
from crop_trl.triplets.outputs import OutputDirectory
from crop_trl.triplets.prompts import DEFAULT_TEMPLATES
from crop_trl.triplets.report import build_report, write_report


def test_a_rerun_asks_nothing_and_a_changed_template_asks_anew(start_server, problems, tmp_path, capsys):
    log = tmp_path / "log"
    url = start_server("--log", str(log))
    source = problems(*(f"[plan:good] {n} and 1" for n in range(5)))
    first = generate(url, source, tmp_path / "out")
    assert first.requests == len(served(log)) == 10
    again = generate(url, source, tmp_path / "out", max_completion_tokens=99, threshold=0.5)
    assert again.requests == 0 and again.records == first.records
    mine = tmp_path / "templates"
    mine.mkdir()
    for path in DEFAULT_TEMPLATES.glob("*.txt"):
        (mine / path.name).write_text(path.read_text() + ("\nBe brief." if path.name == "critic_system.txt" else ""))
    capsys.readouterr()
    assert generate(url, source, tmp_path / "out", templates=str(mine)).requests == 5  # the critic's
    assert "is asked anew where requests differ" in capsys.readouterr().err
    assert generate(url, source, tmp_path / "out", temperature=0.5).requests == 10


def test_malformed_answers_are_asked_again_only_when_wanted(start_server, problems, tmp_path):
    url, source = start_server(), problems("[plan:not_json] 1", "[plan:refusal] 2")
    assert generate(url, source, tmp_path / "out").requests == 4
    # Two more for the answer that was no JSON, in both rounds; a refusal is an answer.
    assert generate(url, source, tmp_path / "out", malformed_retries=1).requests == 2


def test_a_failed_request_is_asked_again_by_a_rerun(start_server, problems, tmp_path):
    source = problems("[plan:http_503] 1 and 2", "[plan:good] 3 and 4")
    url = start_server()
    first = generate(url, source, tmp_path / "out", max_retries=0)
    assert [r["status"] for r in first.records] == ["pending_repair", "strict_pass"]
    second = generate(url, source, tmp_path / "out", max_retries=0)  # its critic's first request fails
    assert [r["status"] for r in second.records] == ["needs_review", "strict_pass"]
    third = generate(url, source, tmp_path / "out", max_retries=0)
    assert [r["status"] for r in third.records] == ["strict_pass", "strict_pass"]


def test_a_rerun_without_an_endpoint_keeps_all_that_is_answered(start_server, problems, tmp_path):
    source = problems(*(f"[plan:{plan}] {n} and 1" for n in range(6) for plan in ("http_400", "good")))
    generate(start_server(), source, tmp_path / "out")
    result = generate("http://127.0.0.1:9/v1", source, tmp_path / "out", concurrency=2)
    assert "does not answer" in str(result.error)
    statuses = [record["status"] for record in OutputDirectory(tmp_path / "out").load_records()]
    assert statuses == ["strict_pass"] * 6 + ["pending_repair"] * 6


def test_a_failed_or_limited_rerun_keeps_what_is_stored(start_server, problems, tmp_path, capsys):
    source = problems(*(f"[plan:good] {n} and 1" for n in range(5)))
    url, output = start_server("--model", "gpt-5.1"), OutputDirectory(tmp_path / "out")
    first = generate(url, source, output.path)
    stored = output.triplets.read_text()
    assert len(stored.splitlines()) == 5
    for changes, kept in (({"model": "other"}, 5), ({"limit": 2}, 3)):
        capsys.readouterr()
        generate(url, source, output.path, **changes)
        assert f"kept {kept} records" in capsys.readouterr().err
        assert output.triplets.read_text() == stored
        run = output.load_run()
        assert (run["unfinished"], run["kept"]) == (0, kept)
        report = build_report(output.load_records(), run, Account(), {})
        assert (report["problems"], report["unfinished"]) == (5, 0)
    capsys.readouterr()
    assert generate(url, source, output.path).records == first.records
    assert "kept" not in capsys.readouterr().err


@pytest.mark.parametrize("count", [3, 9])
def test_another_input_is_added_to_what_is_stored(start_server, problems, tmp_path, capsys, count):
    url, output = start_server(), OutputDirectory(tmp_path / "out")
    generate(url, problems(*(f"[plan:good] {n} and 1" for n in range(5))), output.path)
    rows = ({"id": f"other-{n}", "problem": f"[plan:good] {n} and 2"} for n in range(count))
    result = generate(url, problems(*rows), output.path)
    assert (len(result.records), result.kept) == (count, 5)
    assert "kept 5 records of earlier runs (5 not in this input)" in capsys.readouterr().err
    assert len(records_by_id(output.path)) == count + 5
    report = json.loads((write_report(str(output.path)), output.report_json.read_text())[1])
    assert (report["problems"], report["unfinished"]) == (count + 5, 0)


def test_other_problems_under_the_same_ids_are_refused(start_server, problems, tmp_path, capsys):
    url, output, log = start_server(), OutputDirectory(tmp_path / "out"), tmp_path / "log"
    texts = [f"[plan:good] {n} and 1" for n in range(5)]
    generate(url, problems(*texts), output.path)
    stored, run = output.triplets.read_text(), output.run.read_text()
    others = problems(*(f"[plan:good] {n} and 2" for n in range(5)), name="others.jsonl")
    with pytest.raises(ValueError, match="records of other problems under the ids of this `input`.*'p0000' first"):
        generate(start_server("--log", str(log)), others, output.path)
    assert (output.triplets.read_text(), output.run.read_text(), served(log)) == (stored, run, [])
    # A text that was mended is made anew, and that is said.
    capsys.readouterr()
    texts[3] = "[plan:good] 33 and 1"
    assert generate(url, problems(*texts), output.path).requests == 2
    assert "1 problems have another text than before ('p0003' first)" in capsys.readouterr().err
    assert records_by_id(output.path)["p0003"]["original_problem"] == texts[3]


def test_a_failed_request_replaces_nothing_that_is_finished(start_server, problems, tmp_path, capsys):
    source, output = problems(*(f"[plan:good] {n} and 1" for n in range(4)), "[plan:reject] 5 and 1"), tmp_path / "out"
    generate(start_server(), source, output)
    before = records_by_id(output)
    # The generator is asked anew (another temperature): all requests fail, or the critic's alone.
    for plan, temperature in (("http_400", 0.5), ("http_400_critic", 0.6)):
        result = generate(start_server("--plan", plan), source, output, temperature=temperature)
        assert result.stopped is None and len(result.records) == 5
        assert "5 a request failed this time" in capsys.readouterr().err
        assert records_by_id(output) == before
    # A record that lacks an answer gives way to one that got further, and to a finished one, good or not.
    path, found = tmp_path / "second", []
    for plan in ("http_400", "http_400_critic", "http_400", "reject"):
        generate(start_server("--plan", plan), source, path, temperature={"reject": 0.9}.get(plan))
        found.append({(r["status"], r["rounds"][-1]["failed"] is None) for r in records_by_id(path).values()})
    assert found == [
        {("pending_repair", False)},
        {("needs_review", False)},
        {("needs_review", False)},
        {("needs_review", True)},
    ]


@pytest.mark.multiprocess
def test_a_killed_rerun_with_another_input_leaves_a_true_report(start_server, problems, program, tmp_path):
    url, output = start_server("--latency", "0.1"), OutputDirectory(tmp_path / "out")
    generate(url, problems(*(f"[plan:good] {n} and 1" for n in range(5))), output.path)
    rows = ({"id": f"other-{n}", "problem": f"[plan:good] {n} and 2"} for n in range(60))
    source = problems(*rows, name="others.jsonl")
    process = program("--input", source, "--output", str(output.path), "--base-url", url, "--concurrency", "2")
    while len(answers_in(output.ledger)) < 14:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    markdown = write_report(str(output.path))
    report = json.loads(output.report_json.read_text())
    assert (report["problems"], report["unfinished"], report["begun"]["problems"]) == (5, 0, 60)
    assert "A later run over 60 problems began at" in markdown and "5 problems, model" in markdown
    generate(url, source, output.path)
    assert "A later run" not in write_report(str(output.path)) and len(records_by_id(output.path)) == 65


def test_a_run_killed_between_its_two_files_leaves_one_record_of_a_kind(start_server, problems, tmp_path):
    url, output = start_server(), OutputDirectory(tmp_path / "out")
    source = problems("[plan:good] 1 and 2")
    generate(start_server("--plan", "http_400"), source, output.path)
    incomplete = output.incomplete.read_text()
    generate(url, source, output.path)
    output.incomplete.write_text(incomplete)  # as it stood when triplets.jsonl had been replaced already
    leftover = output.path / f".{output.incomplete.name}.4711.partial"
    leftover.write_text("half a fi")
    assert [record["status"] for record in output.load_records()] == ["strict_pass"]
    assert generate(url, source, output.path).requests == 0 and output.incomplete.read_text() == ""
    assert not leftover.exists()


def test_files_of_somebody_else_are_named_before_anything_is_sent(start_server, problems, tmp_path):
    log, output = tmp_path / "log", OutputDirectory(tmp_path / "out")
    url, source = start_server("--log", str(log)), problems("[plan:good] 1 and 2")
    for path, text in ((output.triplets, '{"id": 1}\n'), (output.run, "{"), (output.run, "[]"), (output.reviews, "{")):
        output.path.mkdir(exist_ok=True)
        path.write_text(text)
        with pytest.raises(ValueError, match=path.name):
            generate(url, source, output.path)
        path.unlink()
    assert served(log) == []


@pytest.mark.multiprocess
@pytest.mark.parametrize(("count", "file_size", "unwritten"), [(40, 600_000, "ledger"), (19, 600_000, "triplets")])
def test_a_full_disk_is_named_and_costs_nothing(start_server, problems, program, tmp_path, count, file_size, unwritten):
    log, output = tmp_path / "log", OutputDirectory(tmp_path / "out")
    url = start_server("--log", str(log))
    # Long texts: seven of them stand in a record, and six in the answers that it is made of.
    source = problems(*(f"[plan:good] {n} and 1. {'Think of ten. ' * 300}" for n in range(count)))
    command = ["--input", source, "--output", str(output.path), "--base-url", url, "--concurrency", "2"]
    process = program(*command, file_size=file_size)
    errors = [line for line in process.communicate()[1].splitlines() if line.startswith("error:")]
    assert process.returncode == 1 and len(errors) == 1
    assert f"{unwritten}.jsonl cannot be written (File too large)" in errors[0] and "make room" in errors[0]
    kept = {entry["answer"]["response_id"] for entry in answers_in(output.ledger)}
    assert len(served(log)) - len(kept) <= 2 * (unwritten == "ledger")
    assert generate(url, source, output.path).stopped is None
    assert len(records_by_id(output.path)) == count and len(served(log)) <= 2 * count + 2


@pytest.mark.multiprocess
def test_a_folder_that_is_deleted_ends_the_run(start_server, problems, program, tmp_path):
    log, output = tmp_path / "log", tmp_path / "out"
    url = start_server("--log", str(log), "--latency", "0.02")
    source = problems(*(f"[plan:good] {n} and 1" for n in range(2_000)))
    process = program("--input", source, "--output", str(output), "--base-url", url, "--concurrency", "8")
    while len(answers_in(output / "ledger.jsonl")) < 20:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    shutil.rmtree(output)
    _, errors = process.communicate()
    (error,) = (line for line in errors.splitlines() if line.startswith("error:"))
    assert process.returncode == 1 and "ledger.jsonl is no longer there" in error and len(served(log)) < 4_000


def test_nothing_is_sent_that_the_disk_may_not_hold(start_server, problems, tmp_path, monkeypatch):
    log, output = tmp_path / "log", tmp_path / "out"
    url, source = start_server("--log", str(log)), problems(*(f"[plan:good] {n} and 1" for n in range(9)))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=200_000))
    result = generate(url, source, output, concurrency=5)
    assert "has only 0.2 MB left" in str(result.error) and len(served(log)) == len(answers_in(output / "ledger.jsonl"))
    assert 0 < len(served(log)) <= 3
    monkeypatch.undo()
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert generate(url, source, output).error is None and len(served(log)) == 18


def test_a_rerun_that_leaves_out_duplicates_does_not_keep_them(start_server, problems, tmp_path):
    source = problems("[plan:good] 1 and 2", "[plan:good] 1  and 2", "[plan:good] 3 and 4")
    url = start_server()
    generate(url, source, tmp_path / "out")
    generate(url, source, tmp_path / "out", deduplicate=True)
    assert len(records_by_id(tmp_path / "out")) == 2


@pytest.mark.multiprocess
def test_kill_9_loses_only_what_was_in_flight(start_server, problems, program, tmp_path):
    log, output = tmp_path / "log", tmp_path / "out"
    url = start_server("--log", str(log), "--latency", "0.02")
    source = problems(*every_plan())
    command = ["--input", source, "--output", str(output), "--base-url", url, "--concurrency", "32", *flags(EVERY_PLAN)]
    ledger = output / "ledger.jsonl"
    kills = []
    for answers in (40, 110):
        process = program(*command)
        while len(answers_in(ledger)) < answers:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.kill()
        process.communicate()
        kills.append((len(served(log)), {entry["answer"]["response_id"] for entry in answers_in(ledger)}))
    final = program(*command)
    _, errors = final.communicate()
    assert final.returncode == 0, errors
    answers = served(log)
    request_of = {answer["id"]: answer["request"] for answer in answers}
    at_end = {entry["answer"]["response_id"] for entry in answers_in(ledger)}
    for sent, known in kills:
        assert known <= at_end
        asked_later = {answer["request"] for answer in answers[sent:]}
        assert not {request_of[identifier] for identifier in known} & asked_later
    assert len(answers) - len(at_end) <= 2 * 32
    for record in records_by_id(output).values():
        plan = record["original_problem"].split("]")[0].removeprefix("[plan:")
        assert record["status"] == PLANS[plan][1], plan
