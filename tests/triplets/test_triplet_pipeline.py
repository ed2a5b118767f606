"""The program as a user runs it, against a scripted server: statuses, resuming, stopping, secrets."""

import asyncio
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from triplets.running import EVERY_PLAN, KEY, answers_in, every_plan, generate, records_by_id, served, stats
from triplets.scripted_answers import PLANS, RAW_REPLIES

from crop_trl.commands import triplets
from crop_trl.prompts import DEFAULT_PROMPT_TEMPLATE, wrap_problem
from crop_trl.triplets.outputs import OutputDirectory
from crop_trl.triplets.record import load_triplets
from crop_trl.triplets.settings import TripletSettings


def test_every_plan_ends_in_its_status(start_server, problems, tmp_path):
    texts = every_plan()
    result = generate(start_server(), problems(*texts), tmp_path / "out", **EVERY_PLAN)
    assert result.stopped is None and len(result.records) == len(texts)
    found = {plan: record["status"] for plan, record in zip(PLANS, result.records)}
    assert found == {plan: facts[1] for plan, facts in PLANS.items()}
    by_plan = dict(zip(PLANS, result.records))
    # The critic claims to select candidate 1, which it rejects; its claim is kept and not followed.
    assert by_plan["wrong_selection"]["candidate_number"] == 2
    assert by_plan["wrong_selection"]["rounds"][0]["critic_selected"] == 1
    assert by_plan["missing_evaluation"]["candidate_number"] == 2
    assert by_plan["duplicate_number"]["candidate_number"] == 2
    # Numbered among all candidates, though the critic was only sent those that were complete.
    assert by_plan["one_control"]["candidate_number"] == 2
    assert by_plan["repaired"]["round"] == 2 and by_plan["repaired"]["rounds"][0]["passed"] == 0
    assert by_plan["critic_not_json"]["critic"] is None
    assert by_plan["http_400"]["rounds"] == [by_plan["http_400"]["rounds"][0]]
    assert "flagged" in by_plan["http_400"]["rounds"][0]["failed"]
    assert len(by_plan["good"]["alternates"]) == 2
    flaws = {flaw for record in result.records for r in record.get("rounds", ()) for flaw in r["flaws"]}
    assert {"generator:not_json", "generator:cut_off", "generator:empty", "generator:refusal"} <= flaws
    assert {"critic:bad_confidence", "critic:duplicate_number", "critic:unknown_number", "critic:cut_off"} <= flaws
    # What the files hold is what was returned, and the trainer takes what passed.
    assert len(records_by_id(tmp_path / "out")) == len(texts)
    dataset, report = load_triplets(str(tmp_path / "out" / "triplets.jsonl"))
    passed = sum(status in ("strict_pass", "repaired_pass") for status in found.values())
    assert report.kept == len(dataset) == passed


def test_screening_wrappers_and_duplicates(start_server, problems, tmp_path):
    source = problems(
        {"problem": "[plan:good] \frac{1}{2}"},
        {"problem": wrap_problem("  [plan:good] What is 2+2? ", DEFAULT_PROMPT_TEMPLATE), "answer": 4},
        {"problem": "[plan:good] What is 2+2?", "answer": 5},
        {"problem": [{"role": "user", "content": "[plan:good] {problem} \\frac{3}{4}"}]},
        {"problem": "\ud83d"},
        {"problem": " \n"},
        {"problem": None},
        {"problem": 42},
        {"problem": [{"role": "system", "content": "[plan:good] What is 2+2?"}]},
    )
    log = tmp_path / "log"
    result = generate(start_server("--log", str(log)), source, tmp_path / "out")
    statuses = [record["status"] for record in result.records]
    assert statuses == ["excluded_input", *["strict_pass"] * 3, *["excluded_input"] * 5]
    assert [result.records[n]["excluded_reason"] for n in (0, *range(4, 9))] == [
        "control_characters",
        "invalid_unicode",
        "empty",
        *["not_text"] * 3,
    ]
    assert result.records[1]["original_problem"] == "[plan:good] What is 2+2?"
    assert (result.records[1]["id"], result.records[1]["answer"]) == ("row_000001", "4")
    assert len(served(log)) == 4  # two requests for each of the two texts, however often they stand there
    run = OutputDirectory(tmp_path / "out").load_run()
    assert run["input"]["duplicates"]["rows"] == 1 and run["input"]["duplicates"]["conflicting_answers"] == 1
    fewer = generate(start_server(), source, tmp_path / "fewer", deduplicate=True)
    assert len(fewer.records) == 8
    # Copies of whole rows share their id too.
    copies = problems(*[{"id": "a", "problem": "[plan:good] 1 and 2"}] * 3, name="copies.jsonl")
    copied = generate(start_server(), copies, tmp_path / "copied", deduplicate=True)
    assert [record["id"] for record in copied.records] == ["a"]


def test_columns_reach_into_mappings(start_server, problems, tmp_path):
    rows = [{"q": {"text": f"[plan:good] {n} and 2"}, "meta": {"id": f"m{n}", "gold": n}} for n in range(2)]
    columns = {"problem_column": "q.text", "id_column": "meta.id", "answer_column": "meta.gold"}
    result = generate(start_server(), problems(*rows), tmp_path / "out", **columns)
    assert [(record["id"], record["answer"]) for record in result.records] == [("m0", "0"), ("m1", "1")]


def test_it_stops_when_the_endpoint_takes_nothing(start_server, problems, tmp_path):
    source = problems(*(f"[plan:http_400] {n}" for n in range(60)))
    result = generate(start_server(), source, tmp_path / "out", concurrency=4)
    assert "requests failed" in str(result.error) and "flagged" in str(result.error)
    assert len(result.records) < 30


@pytest.mark.parametrize(("plan", "kind"), [("not_json", "generator"), ("critic_cut_off", "critic")])
def test_it_stops_when_no_answer_is_of_use(start_server, problems, tmp_path, plan, kind):
    source = problems(*(f"[plan:{plan}] {n} and 1" for n in range(60)))
    url = start_server()
    result = generate(url, source, tmp_path / "out", concurrency=4)
    error = str(result.error)
    assert f"The last 20 answers of the {kind} were unusable" in error and "ledger.jsonl" in error
    assert result.requests <= (20 + 3) * (2 if kind == "critic" else 1)
    # They are final: a rerun pays for new ones, and stops again when these are no better.
    again = generate(url, source, tmp_path / "out", concurrency=4)
    assert "unusable" in str(again.error) and 20 <= again.requests and len(again.records) > len(result.records)


@pytest.mark.parametrize("plan", ["http_400", "http_400_critic"])
def test_refused_requests_are_cases_of_their_own_where_others_were_taken(start_server, problems, tmp_path, plan):
    texts = ["[plan:good] 1 and 2", *(f"[plan:{plan}] {n} and 1" for n in range(60))]
    url, output = start_server(), tmp_path / "out"
    first = generate(url, problems(*texts), output, concurrency=4)
    assert (first.stopped, len(first.records), first.requests) == (None, 61, 62 if plan == "http_400_critic" else 2)
    assert {record["status"] for record in first.records[1:]} == {PLANS[plan][1]}
    # A rerun asks for those alone, and knows from the ledger that requests like them were answered.
    again = generate(url, problems(*texts), output, concurrency=4)
    assert (again.stopped, len(again.records), again.requests) == (None, 61, 0)
    # Not so when what all requests have in common is another.
    refused = problems(*(f"[plan:http_400] {n} and 1" for n in range(60)), name="refused.jsonl")
    assert generate(url, refused, tmp_path / "other", concurrency=4).error
    assert "requests failed" in str(generate(url, source_of(output, refused), output, temperature=0.5).error)


def source_of(output, source):
    """The same problems under ids of their own, so that they are no other texts under the ids in `output`."""
    path = output / "renamed.jsonl"
    rows = (json.loads(line) for line in Path(source).read_text().splitlines())
    path.write_text("".join(json.dumps(row | {"id": f"other-{row['id']}"}) + "\n" for row in rows))
    return str(path)


def test_a_gateway_that_forbids_single_requests_is_not_a_bad_key(start_server, problems, tmp_path):
    source = problems("[plan:good] 1 and 2", "[plan:http_403] 2 and 3")
    url = start_server()
    for _ in range(2):  # the second time nothing is asked but what is forbidden
        result = generate(url, source, tmp_path / "out")
        assert result.error is None and [r["status"] for r in result.records] == ["strict_pass", "pending_repair"]
    forbidden = generate(url, problems("[plan:http_403] 2 and 3"), tmp_path / "fresh")
    assert "refuses the key" in str(forbidden.error)


@pytest.mark.parametrize("options", [(), ("--no-json-schema",)])
def test_concurrency_is_used_and_kept(start_server, problems, tmp_path, options):
    """None is answered before all are in flight: no request waits for another to find out how to ask for JSON."""
    url = start_server("--hold", "16", *options)
    source = problems(*(f"[plan:good] {n} and 1" for n in range(20)))
    result = generate(url, source, tmp_path / "out", concurrency=16, timeout=60)
    assert {record["status"] for record in result.records} == {"strict_pass"}
    counts = stats(url)
    assert counts["most_in_flight"] == 16
    # What is turned down is what was in flight when nothing was known yet.
    assert 40 <= counts["arrived"] <= (40 + 16 if options else 40)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_after_an_interrupt_nothing_is_sent(start_server, problems, tmp_path, monkeypatch, number):
    url = start_server("--hold", "1000")
    before = signal.signal(number, lambda *_: None)  # a run that does not handle it must not end the tests
    noted = threading.Event()
    monkeypatch.setattr("crop_trl.triplets.pipeline.say", lambda text: noted.set())

    def interrupt():
        while stats(url)["in_flight"] < 8:
            time.sleep(0.02)
        os.kill(os.getpid(), number)
        noted.wait()
        stats(url, "release")

    threading.Thread(target=interrupt, daemon=True).start()
    source = problems(*(f"[plan:good] {n} and 1" for n in range(40)))
    result = generate(url, source, tmp_path / "out", concurrency=8, timeout=60)
    signal.signal(number, before)
    assert (result.stopped, result.requests, stats(url)["arrived"]) == ("interrupted", 8, 8)


def test_a_dead_server_is_given_up(start_server, problems, tmp_path):
    url = start_server("--plan", "http_drop")
    result = generate(url, problems(*map(str, range(100))), tmp_path / "out", concurrency=25, max_backoff=0.0)
    assert "does not answer" in str(result.error)
    assert stats(url)["arrived"] <= 3 * 25  # once, and twice again


@pytest.mark.multiprocess
def test_an_interrupt_finishes_what_is_in_flight(start_server, problems, program, tmp_path):
    log, output = tmp_path / "log", tmp_path / "out"
    url = start_server("--log", str(log), "--latency", "0.3")
    source = problems(*(f"[plan:good] {n} and 5" for n in range(200)))
    process = program("--input", source, "--output", str(output), "--base-url", url, "--concurrency", "8")
    while len(answers_in(output / "ledger.jsonl")) < 20:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate()
    assert process.returncode == 3, errors
    assert "waiting for the requests in flight" in errors and "run again to go on" in errors
    entries = answers_in(output / "ledger.jsonl")
    assert len(entries) == len(served(log)) < 400  # every answer that was sent is kept
    assert "Not finished (run again)" in printed
    assert len(records_by_id(output)) >= 8


@pytest.mark.multiprocess
def test_the_key_is_in_no_file_and_no_output(start_server, problems, program, tmp_path):
    faults = ("500", "503", *RAW_REPLIES)
    source = problems("[plan:good] 1", *(f"[plan:http_{fault}] {n}" for n, fault in enumerate(faults)))
    output, other = tmp_path / "out", "another-0123456789"
    extra = json.dumps({"user": KEY, "metadata": {"api_key": other}, "Authorization": f"Bearer {other}-2"})
    texts = []
    for options, url in ((("--max-retries", "0"), start_server()), ((), start_server("--key", "other"))):
        options = ("--input", source, "--output", str(output), "--base-url", url, "--extra-body", extra, *options)
        texts += program(*options).communicate()
    assert "[key]" in "".join(texts)  # the server repeats the key in its errors, and that was shown
    texts += (path.read_text() for path in output.rglob("*") if path.is_file())
    with pytest.raises(ValueError, match="`extra_body` is no JSON object") as refused:
        TripletSettings(extra_body=f'{{"api_key": "{KEY}"')
    texts += [repr(TripletSettings(extra_body=extra)), str(refused.value)]
    for text in texts:
        assert not any(part in text for part in (KEY, KEY[3:12], other))


@pytest.mark.multiprocess
def test_a_reader_that_goes_away_costs_nothing(start_server, problems, program, tmp_path):
    source, output = problems(*(f"[plan:good] {n} and 5" for n in range(60))), tmp_path / "out"
    url = start_server("--latency", "0.05")
    process = program("--input", source, "--output", str(output), "--base-url", url, "--concurrency", "4")
    process.stderr.read(1)  # the bar is there
    process.stderr.close()
    process.stdout.close()
    assert process.wait() == 0
    assert {record["status"] for record in records_by_id(output).values()} == {"strict_pass"}
    assert len(records_by_id(output)) == 60 and "ended" in OutputDirectory(output).load_run()


@pytest.mark.multiprocess
def test_the_output_can_be_cut_by_head(problems, program):
    process = program("--input", problems(*(f"Add {n} and 5." * 500 for n in range(3))), "--dry-run")
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait() == 0 and process.stderr.read() == ""


def test_two_tasks_at_once_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="error: `dry_run` and `counts` are two tasks; give one at a time."):
        triplets.main(["--output", str(tmp_path), "--dry-run", "--counts", "run.yaml"])


@pytest.mark.multiprocess
def test_a_terminal_without_unicode_shows_what_it_can(problems, program, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    process = program("--input", problems("求 2 与 3 之和 é"), "--dry-run")
    printed, errors = process.communicate()
    assert process.returncode == 0 and r"\u6c42 2" in printed and errors == ""


def test_it_runs_where_an_event_loop_runs_already(start_server, problems, tmp_path):
    url, source = start_server(), problems("[plan:good] 1 and 2")

    async def notebook():
        return generate(url, source, tmp_path / "out")

    assert asyncio.run(notebook()).records[0]["status"] == "strict_pass"
