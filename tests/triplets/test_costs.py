"""What is booked, and the limit on it."""

import json
import re
from pathlib import Path

import pytest
from triplets.running import PAPER_FORM, generate

from crop_trl.files import read_entries
from crop_trl.triplets.costs import FIRST_ANSWER_TOKENS, Account, Prices, listed_prices, stated_usage
from crop_trl.triplets.estimate import dry_run
from crop_trl.triplets.report import write_report
from crop_trl.triplets.settings import TripletSettings


def booked(output) -> Account:
    """What the ledger of a run says; prices that were given stand in it."""
    return Account().add_all(read_entries(output / "ledger.jsonl"))


def test_the_cost_limit_holds_and_a_rerun_goes_on(start_server, problems, tmp_path):
    source = problems(*(f"[plan:good] {n} and 7" for n in range(40)))
    url = start_server()
    options = {"price_input": 10.0, "price_output": 30.0, "concurrency": 8}
    stopped = generate(url, source, tmp_path / "out", max_cost=1.0, **options)
    account = booked(tmp_path / "out")
    assert stopped.stopped == "max_cost" and 0.4 < account.cost <= 1.0
    assert 0 < len(stopped.records) < 40
    requests = stopped.requests
    rest = generate(url, source, tmp_path / "out", **options)
    assert rest.stopped is None and requests + rest.requests == 80


def test_prices():
    assert listed_prices("gpt-5.1-2025-11-13").output == listed_prices("gpt-5.1").output
    assert listed_prices("gpt-5.1") == Prices(input=1.25, output=10.0, cached_input=0.125)
    assert listed_prices("gpt-4.1-mini") == Prices(input=0.4, output=1.6, cached_input=0.1)
    assert listed_prices("unknown") is None


def test_an_account_knows_each_model_and_kind():
    account = Account(given={"mine": Prices(input=1.0, output=10.0, cached_input=0.1)})

    def add(model, kind, usage):
        account.add({"key": "k", "model": model, "kind": kind, "usage": stated_usage(usage, [], "")})

    add("mine", "critic", {"prompt_tokens": 1_000_000, "completion_tokens": 100_000, "prompt_tokens_details": None})
    add("mine", "critic", {"prompt_tokens": 1_000_000, "prompt_tokens_details": {"cached_tokens": 500_000}})
    add("mine", "critic", None)
    assert account.cost == pytest.approx(1.0 + 1.0 + 0.5 + 0.05)
    add("gpt-5-nano", "generator", {"prompt_tokens": 2_000_000, "completion_tokens": 1_000_000})
    add("unheard-of", "critic", {"prompt_tokens": 2_000_000, "completion_tokens": 1_000_000})
    dollars = {(row["model"], row["request"]): row["dollars"] for row in account.rows}
    assert dollars == {
        ("mine", "critic"): pytest.approx(2.55),
        ("gpt-5-nano", "generator"): pytest.approx(0.5),
        ("unheard-of", "critic"): None,
    }
    assert account.cost == pytest.approx(3.05) and account.rows[1]["estimated"] == 2
    entry = {"key": "k", "model": "x", "kind": "critic", "usage": stated_usage(None, [], "")}
    assert (Account().cost, Account().add(entry).cost) == (0, None)


def test_answers_keep_the_price_of_the_model_that_gave_them(start_server, problems, tmp_path):
    """A change of the model changes neither what is reported for the earlier one nor what the limit counts."""
    url, output = start_server(), tmp_path / "out"
    source = problems(*(f"[plan:good] {n} and 7" for n in range(5)))
    generate(url, source, output, model="gpt-5.1")
    first = booked(output).cost
    generate(url, source, output, model="gpt-5-nano")
    second = booked(output).cost
    assert first > 0 and 1.03 < second / first < 1.05  # nano costs a 25th
    generate(url, source, output, model="mine", price_input=1.25, price_output=10.0, price_cached_input=0.125)
    assert booked(output).cost == pytest.approx(first + second)
    # No price is given this time: the ledger has that of `mine`, and the limit leaves room for no request more.
    stopped = generate(url, source, output, model="mine", temperature=0.5, max_cost=booked(output).cost + 1e-6)
    assert (stopped.stopped, stopped.requests) == ("max_cost", 0)
    markdown = write_report(str(output))
    assert f"Cost of all answers in the ledger: ${first + second:.2f}." in markdown
    found = json.loads((output / "report.json").read_text())["cost"]
    assert {row["model"]: row["answers"] for row in found["rows"]} == {"gpt-5.1": 5, "gpt-5-nano": 5, "mine": 5}
    assert len(found["rows"]) == 6


def test_the_critic_may_be_another_model(start_server, problems, tmp_path):
    url, output = start_server("--log", str(tmp_path / "log")), tmp_path / "out"
    source = problems(*(f"[plan:repaired] {n} and 7" for n in range(3)))
    options = {"model": "mine", "critic_model": "gpt-5.1", "price_input": 1.0, "price_output": 2.0, "max_cost": 9.0}
    result = generate(url, source, output, **options)
    assert {record["status"] for record in result.records} == {"repaired_pass"}
    assert result.records[0]["rounds"][1]["models"] == {"generator": "mine", "critic": "gpt-5.1"}
    rows = {(row["model"], row["request"]): row["dollars"] for row in booked(output).rows}
    assert rows.keys() == {("mine", "generator"), ("gpt-5.1", "critic")} and all(rows.values())
    assert generate(url, source, output, **options).requests == 0
    assert generate(url, source, output, **options | {"critic_model": "gpt-5"}).requests == 3
    assert "model mine, critic gpt-5," in write_report(str(output))


SENT = [{"role": "user", "content": "x" * 3300}]


@pytest.mark.parametrize(
    ("prompt_tokens", "completion_tokens", "cached_tokens", "kept", "estimated"),
    [
        (90, 5, 0, (90, 5, 0), False),
        (90, 5.0, 80, (90, 5, 80), False),
        (90, 5, 95, (90, 5, 90), False),
        (90, None, None, (90, 5, 0), False),  # the total tells
        (90, 1, 0, (90, 5, 0), False),  # thinking that the endpoint counts in the total alone
        (190, None, None, (190, 100, 0), True),
        (0, 0, 0, (1000, 0, 0), True),  # a prompt is never empty
        (-90, True, 9, (1000, 100, 0), True),
        (float("nan"), "5", float("inf"), (1000, 100, 0), True),
    ],
)
def test_what_an_endpoint_does_not_state_is_estimated(prompt_tokens, completion_tokens, cached_tokens, kept, estimated):
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": 95}
    found = stated_usage(usage | {"prompt_tokens_details": {"cached_tokens": cached_tokens}}, SENT, "y" * 330)
    cached = found["prompt_tokens_details"]["cached_tokens"]
    assert (found["prompt_tokens"], found["completion_tokens"], cached) == kept
    assert found.get("estimated", False) == estimated


def test_no_form_of_a_usage_is_a_mistake():
    for usage in (None, {}, "many", [], {"prompt_tokens_details": 7}):
        found = stated_usage(usage, SENT, None)
        assert (found["prompt_tokens"], found["completion_tokens"], found["estimated"]) == (1000, 0, True)


def test_answers_without_token_counts_are_in_the_cost_and_under_the_limit(start_server, problems, tmp_path):
    source = problems(*(f"[plan:good] {n} and 7" for n in range(10)))
    prices = {"price_input": 10.0, "price_output": 30.0}
    stated, silent = start_server(), start_server("--no-usage")
    for url, name in ((stated, "stated"), (silent, "silent")):
        generate(url, source, tmp_path / name, **prices)
    reports = {name: (write_report(str(tmp_path / name)), tmp_path / name) for name in ("stated", "silent")}
    costs = {name: json.loads((folder / "report.json").read_text())["cost"] for name, (_, folder) in reports.items()}
    estimated = {name: sum(row["estimated"] for row in cost["rows"]) for name, cost in costs.items()}
    assert estimated == {"silent": 20, "stated": 0}
    # The server counts 4 characters a token, the estimate 3.3, and the server has some of the input cached.
    assert 1.0 < costs["silent"]["dollars"] / costs["stated"]["dollars"] < 1.5
    assert "20 answers came without token counts; theirs are estimated" in reports["silent"][0]
    limit = costs["silent"]["dollars"] / 2
    stopped = generate(silent, source, tmp_path / "limited", max_cost=limit, concurrency=2, **prices)
    account = booked(tmp_path / "limited")
    assert stopped.stopped == "max_cost" and 0.5 * limit < account.cost <= limit


def test_what_is_reserved_for_requests_in_flight_stops_nothing(start_server, problems, tmp_path):
    source = problems(*(f"[plan:good] {n} and 7" for n in range(40)))
    url = start_server("--latency", "0.05")
    prices = {"price_input": 10.0, "price_output": 30.0}
    generate(url, source, tmp_path / "all", **prices)
    account = booked(tmp_path / "all")
    # Before the first answer each of 40 requests reserves what a long answer would cost: far beyond the limit.
    limit = account.cost + 0.15
    assert 40 * account.prices("gpt-5.1").cost({"input": 0, "cached_input": 0, "output": FIRST_ANSWER_TOKENS}) > limit
    result = generate(url, source, tmp_path / "limited", concurrency=40, max_cost=limit, **prices)
    assert (result.stopped, len(result.records), result.requests) == (None, 40, 80)


def test_the_papers_data_have_the_price_that_is_told(problems, tmp_path):
    """docs/triplets.md: problems of 256 characters, listings of the paper's lengths."""
    lengths = {"generator_system": 689, "generator_user": 1303, "critic_system": 696, "critic_user": 1582}
    (tmp_path / "paper").mkdir()
    for file, text in PAPER_FORM.items():
        (tmp_path / "paper" / file).write_text(text.ljust(lengths[file.removesuffix(".txt")], "."))
    source = problems(*(f"{number:04d}".ljust(256, "x") for number in range(1_000)))
    said = dry_run(TripletSettings(input=[source], output=str(tmp_path / "out"), templates=str(tmp_path / "paper")))
    read, written, dollars = re.search(r"([\d.]+) M input and ([\d.]+) M output tokens, cost \$([\d.]+)", said).groups()
    assert (float(read), float(written)) == (pytest.approx(3.1, abs=0.05), pytest.approx(2.1, abs=0.05))
    page = (Path(__file__).parents[2] / "docs" / "triplets.md").read_text()
    assert "| input | 3,100 | 52 million | 52 x" in page and "| output | 2,100 | 35 million | 35 x" in page
    # 16,755 problems at the listed prices.
    assert "that is 415 dollars" in page and float(dollars) * 16.755 == pytest.approx(415, rel=0.02)
