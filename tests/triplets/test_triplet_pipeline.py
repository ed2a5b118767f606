"""The program as a user runs it, against a scripted server: statuses, resuming, stopping, secrets."""

import asyncio
import json
import runpy
import signal
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from triplets.scripted_server import PLANS

from crop_trl.triplets.costs import Account, Prices, find_prices
from crop_trl.triplets.ledger import read_entries
from crop_trl.triplets.outputs import OutputDirectory
from crop_trl.triplets.pipeline import generate_triplets
from crop_trl.triplets.prompts import DEFAULT_TEMPLATES
from crop_trl.triplets.record import DEFAULT_PROMPT_TEMPLATE, load_triplets, wrap_problem
from crop_trl.triplets.report import build_report
from crop_trl.triplets.settings import TripletSettings

KEY = "sk-test-0123456789abcdef"
FAST = {"timeout": 2.0, "max_retries": 3, "max_backoff": 0.2}


def every_plan(copies=1):
    """A problem for every plan, several times."""
    return [f"[plan:{plan}] Add {n} apples and {n + 1} pears." for n in range(copies) for plan in PLANS]


def flags(options):
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def served(log: Path):
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def generate(url, source, output, **changes):
    return generate_triplets(
        TripletSettings(input=[source], output=str(output), base_url=url, **(FAST | changes)), False
    )


def records_by_id(output):
    return {record["id"]: record for record in OutputDirectory(output).load_records()}


def test_every_plan_ends_in_its_status(start_server, problems, tmp_path):
    texts = every_plan()
    result = generate(start_server(), problems(*texts), tmp_path / "out")
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
        {"problem": None},
    )
    log = tmp_path / "log"
    result = generate(start_server("--log", str(log)), source, tmp_path / "out")
    statuses = [record["status"] for record in result.records]
    assert statuses == ["excluded_input", *["strict_pass"] * 3, *["excluded_input"] * 2]
    assert [result.records[n]["excluded_reason"] for n in (0, 4, 5)] == [
        "control_characters",
        "invalid_unicode",
        "empty",
    ]
    assert result.records[1]["original_problem"] == "[plan:good] What is 2+2?"
    assert (result.records[1]["id"], result.records[1]["answer"]) == ("row_000001", "4")
    assert len(served(log)) == 4  # two requests for each of the two texts, however often they stand there
    run = OutputDirectory(tmp_path / "out").load_run()
    assert run["input"]["duplicates"]["rows"] == 1 and run["input"]["duplicates"]["conflicting_answers"] == 1
    fewer = generate(start_server(), source, tmp_path / "fewer", deduplicate=True)
    assert len(fewer.records) == 5


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
    source = problems("[plan:http_500] 1 and 2", "[plan:good] 3 and 4")
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
        report = build_report(output.load_records(), output.load_run(), Account(), {})
        assert (report["problems"], report["unfinished"]) == (5, 0)
    capsys.readouterr()
    assert generate(url, source, output.path).records == first.records
    assert "kept" not in capsys.readouterr().err


def test_a_rerun_that_leaves_out_duplicates_does_not_keep_them(start_server, problems, tmp_path):
    source = problems("[plan:good] 1 and 2", "[plan:good] 1  and 2", "[plan:good] 3 and 4")
    url = start_server()
    generate(url, source, tmp_path / "out")
    generate(url, source, tmp_path / "out", deduplicate=True)
    assert len(records_by_id(tmp_path / "out")) == 2


def test_it_stops_when_the_endpoint_is_gone(start_server, problems, tmp_path):
    source = problems(*(f"[plan:http_400] {n}" for n in range(60)))
    result = generate(start_server(), source, tmp_path / "out", concurrency=4)
    assert "requests failed" in str(result.error) and "flagged" in str(result.error)
    assert len(result.records) < 30


def test_the_cost_limit_holds_and_a_rerun_goes_on(start_server, problems, tmp_path):
    source = problems(*(f"[plan:good] {n} and 7" for n in range(40)))
    url = start_server()
    options = {"price_input": 10.0, "price_output": 30.0, "concurrency": 8}
    stopped = generate(url, source, tmp_path / "out", max_cost=1.0, **options)
    account = Account(Prices(10.0, 30.0, 10.0)).add_entries(read_entries(tmp_path / "out" / "ledger.jsonl"))
    assert stopped.stopped == "max_cost" and 0.4 < account.cost <= 1.0
    assert 0 < len(stopped.records) < 40
    requests = stopped.requests
    rest = generate(url, source, tmp_path / "out", **options)
    assert rest.stopped is None and requests + rest.requests == 80


def test_concurrency_is_used_and_kept(start_server, problems, tmp_path):
    url = start_server("--latency", "0.2")
    generate(url, problems(*(f"[plan:good] {n}" for n in range(64))), tmp_path / "out", concurrency=16)
    stats = json.load(urllib.request.urlopen(url.removesuffix("/v1") + "/stats"))
    assert 8 < stats["most_in_flight"] <= 16


@pytest.mark.multiprocess
def test_kill_9_loses_only_what_was_in_flight(start_server, problems, program, tmp_path):
    log, output = tmp_path / "log", tmp_path / "out"
    url = start_server("--log", str(log), "--latency", "0.02")
    source = problems(*every_plan(copies=2))
    command = ["--input", source, "--output", str(output), "--base-url", url, "--concurrency", "32", *flags(FAST)]
    ledger = output / "ledger.jsonl"
    kills = []
    for answers in (40, 110, 180):
        process = program(*command)
        while sum(1 for _ in read_entries(ledger)) < answers:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.kill()
        process.communicate()
        time.sleep(0.2)  # what the server was about to answer
        kills.append((len(served(log)), {entry["answer"]["response_id"] for entry in read_entries(ledger)}))
    final = program(*command)
    _, errors = final.communicate()
    assert final.returncode == 0, errors
    answers = served(log)
    request_of = {answer["id"]: answer["request"] for answer in answers}
    at_end = {entry["answer"]["response_id"] for entry in read_entries(ledger)}
    for sent, known in kills:
        assert known <= at_end
        asked_later = {answer["request"] for answer in answers[sent:]}
        assert not {request_of[identifier] for identifier in known} & asked_later
    assert len(answers) - len(at_end) <= 3 * 32
    for record in records_by_id(output).values():
        plan = record["original_problem"].split("]")[0].removeprefix("[plan:")
        assert record["status"] == PLANS[plan][1], plan


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_finishes_what_is_in_flight(start_server, problems, program, tmp_path, number):
    log, output = tmp_path / "log", tmp_path / "out"
    url = start_server("--log", str(log), "--latency", "0.3")
    source = problems(*(f"[plan:good] {n} and 5" for n in range(200)))
    process = program("--input", source, "--output", str(output), "--base-url", url, "--concurrency", "8")
    while sum(1 for _ in read_entries(output / "ledger.jsonl")) < 20:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=20)
    assert process.returncode == 3, errors
    assert "waiting for the requests in flight" in errors and "run again to go on" in errors
    entries = list(read_entries(output / "ledger.jsonl"))
    assert len(entries) == len(served(log)) < 400  # every answer that was sent is kept
    assert "Not finished (run again)" in printed
    assert len(records_by_id(output)) >= 8


@pytest.mark.multiprocess
def test_the_key_is_in_no_file_and_no_output(start_server, problems, program, tmp_path):
    source = problems("[plan:http_500] 1", "[plan:good] 2", "[plan:http_503] 3")
    output = tmp_path / "out"
    texts = []
    for options, url in ((("--max-retries", "0"), start_server()), ((), start_server("--key", "other"))):
        process = program("--input", source, "--output", str(output), "--base-url", url, *options)
        texts += process.communicate()
    assert "[key]" in "".join(texts)  # the server repeats the key in its errors, and that was shown
    for text in (*texts, *(path.read_text() for path in output.rglob("*") if path.is_file())):
        assert KEY not in text and KEY[3:12] not in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--input problems.jsonl", "OPENAI_API_KEY is not set"),
        ("--input none.jsonl --base-url http://127.0.0.1:9/v1", "`input` 'none.jsonl' does not exist"),
        ("--input problems.jsonl --base-url http://127.0.0.1:9/v1", "does not answer"),
        ("--input problems.jsonl --base-url http://me:pw@host/v1", "`base_url` must not carry"),
        ("--output nowhere --report", "`output` 'nowhere' holds no run"),
    ],
)
def test_one_sentence_for_each_mistake(problems, tmp_path, monkeypatch, capsys, options, says):
    problems("What is 1+1?")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY")
    script = Path(__file__).resolve().parents[2] / "examples" / "generate_triplets.py"
    monkeypatch.setattr(sys, "argv", [str(script), *options.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    sentence = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert ended.value.code == 1 and len(sentence) == 1
    assert says in sentence[0] and "pw" not in sentence[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"concurrency": 0}, "`concurrency` is 0"),
        ({"threshold": 1.5}, "`threshold` is 1.5"),
        ({"response_format": "xml"}, "`response_format` is 'xml'"),
        ({"extra_body": "{"}, "`extra_body`"),
        ({"base_url": "localhost:8000"}, "`base_url`"),
        ({"base_url": "https://h/v1?key=secret"}, "`base_url` must not carry"),
        ({"input_template": "no placeholder"}, "{problem} exactly once"),
        ({"timeout": 0}, "`timeout` is 0"),
        ({"price_input": -1.0, "price_output": 1.0}, "`price_input` is -1.0"),
        ({"price_input": 1.0, "price_output": float("nan")}, "`price_output` is nan"),
        ({"price_cached_input": float("inf")}, "`price_cached_input` is inf"),
    ],
)
def test_settings_are_checked_when_they_are_made(changes, says):
    with pytest.raises(ValueError) as caught:
        TripletSettings(**changes)
    assert says in str(caught.value) and "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "mystery", "max_cost": 1.0}, "`max_cost` needs prices"),
        ({"price_input": 1.0}, "`price_input` and `price_output` go together"),
        ({"problem_column": "question"}, "`problem_column` 'question' is missing in row 1"),
        ({"id_column": "source"}, "give"),
        ({"input": []}, "`input` is empty"),
        ({"templates": "no-such-folder"}, "`templates`"),
    ],
)
def test_inputs_are_checked_before_anything_is_sent(problems, tmp_path, changes, says):
    source = problems({"problem": "a", "source": "s"}, {"problem": "b", "source": "s"})
    settings = {"input": [source], "output": str(tmp_path / "out"), "base_url": "http://127.0.0.1:9/v1"} | changes
    with pytest.raises(ValueError) as caught:
        generate_triplets(TripletSettings(**settings), progress=False)
    assert says in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_it_runs_where_an_event_loop_runs_already(start_server, problems, tmp_path):
    url, source = start_server(), problems("[plan:good] 1 and 2")

    async def notebook():
        return generate(url, source, tmp_path / "out")

    assert asyncio.run(notebook()).records[0]["status"] == "strict_pass"


def test_prices():
    assert find_prices("gpt-5.1-2025-11-13").output == find_prices("gpt-5.1").output
    assert find_prices("unknown") is None
    account = Account(Prices(input=1.0, output=10.0, cached_input=0.1))
    account.add("critic", {"prompt_tokens": 1_000_000, "completion_tokens": 100_000, "prompt_tokens_details": None})
    account.add("critic", {"prompt_tokens": 1_000_000, "prompt_tokens_details": {"cached_tokens": 500_000}})
    account.add("critic", None)
    assert account.cost == pytest.approx(1.0 + 1.0 + 0.5 + 0.05)
    assert account.without_usage == 1
