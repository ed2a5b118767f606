"""What is booked, and the limit on it."""

import json

import pytest
from triplets.running import generate

from crop_trl.triplets.costs import FIRST_ANSWER_TOKENS, Account, Prices, find_prices, stated_usage
from crop_trl.triplets.ledger import read_entries
from crop_trl.triplets.report import write_report


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


def test_prices():
    assert find_prices("gpt-5.1-2025-11-13").output == find_prices("gpt-5.1").output
    assert find_prices("gpt-5.1") == Prices(input=1.25, output=10.0, cached_input=0.125)
    assert find_prices("gpt-4.1-mini") == Prices(input=0.4, output=1.6, cached_input=0.1)
    assert find_prices("unknown") is None
    account = Account(Prices(input=1.0, output=10.0, cached_input=0.1))
    account.add("critic", {"prompt_tokens": 1_000_000, "completion_tokens": 100_000, "prompt_tokens_details": None})
    account.add("critic", {"prompt_tokens": 1_000_000, "prompt_tokens_details": {"cached_tokens": 500_000}})
    account.add("critic", None)
    assert account.cost == pytest.approx(1.0 + 1.0 + 0.5 + 0.05)
    assert account.estimated == 1


SENT = [{"role": "user", "content": "x" * 3300}]


@pytest.mark.parametrize(
    ("prompt_tokens", "completion_tokens", "cached_tokens", "kept", "estimated"),
    [
        (90, 5, 0, (90, 5, 0), False),
        (90, 5.0, 80, (90, 5, 80), False),
        (90, 5, 95, (90, 5, 90), False),
        (90, None, None, (90, 100, 0), True),
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
    assert costs["silent"]["estimated"] == 20 and costs["stated"]["estimated"] == 0
    # The server counts 4 characters a token, the estimate 3.3, and the server has some of the input cached.
    assert 1.0 < costs["silent"]["dollars"] / costs["stated"]["dollars"] < 1.5
    assert "20 answers came without token counts; theirs are estimated" in reports["silent"][0]
    limit = costs["silent"]["dollars"] / 2
    stopped = generate(silent, source, tmp_path / "limited", max_cost=limit, concurrency=2, **prices)
    account = Account(Prices(10.0, 30.0, 10.0)).add_entries(read_entries(tmp_path / "limited" / "ledger.jsonl"))
    assert stopped.stopped == "max_cost" and 0.5 * limit < account.cost <= limit


def test_what_is_reserved_for_requests_in_flight_stops_nothing(start_server, problems, tmp_path):
    source = problems(*(f"[plan:good] {n} and 7" for n in range(40)))
    url = start_server("--latency", "0.05")
    prices = {"price_input": 10.0, "price_output": 30.0}
    generate(url, source, tmp_path / "all", **prices)
    account = Account(Prices(10.0, 30.0, 10.0)).add_entries(read_entries(tmp_path / "all" / "ledger.jsonl"))
    # Before the first answer each of 40 requests reserves what a long answer would cost: far beyond the limit.
    limit = account.cost + 0.15
    assert 40 * account.prices.cost({"input": 0, "cached_input": 0, "output": FIRST_ANSWER_TOKENS}) > limit
    result = generate(url, source, tmp_path / "limited", concurrency=40, max_cost=limit, **prices)
    assert (result.stopped, len(result.records), result.requests) == (None, 40, 80)
