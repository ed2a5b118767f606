"""What requests cost: prices, a running account, and what an answer counts as."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

CHARS_PER_TOKEN = 3.3  # for English with LaTeX; used where an endpoint reports nothing
FIRST_ANSWER_TOKENS = 3_000  # reckoned with while no answer has been seen
TOKEN_FIELDS = ("input", "cached_input", "output")


@dataclass(frozen=True)
class Prices:
    """US dollars per million tokens; `cached_input` is the price of input tokens that the endpoint had cached."""

    input: float
    output: float
    cached_input: float

    def cost(self, tokens: Mapping[str, float]) -> float:
        """Dollars for token counts `input` (all of them), `cached_input` (the cached part) and `output`."""
        fresh = tokens["input"] - tokens["cached_input"]
        return (fresh * self.input + tokens["cached_input"] * self.cached_input + tokens["output"] * self.output) / 1e6


@cache
def listed_prices(model: str) -> Prices | None:
    """The prices of the table for `model` (a date at the end of its name aside), or `None`."""
    table = json.loads((Path(__file__).parent / "prices.json").read_text(encoding="utf-8"))["models"]
    row = table.get(re.sub(r"-\d{4}-\d{2}-\d{2}$", "", model))
    return Prices(**row) if row else None


def given_prices(settings: Mapping[str, Any]) -> dict[str, Prices]:
    """Model to the prices that its settings give, that of cached input being by default that of other input."""
    found = {}
    for prefix in ("critic_", ""):
        model = settings.get(f"{prefix}model")
        price, output, cached = (settings.get(f"{prefix}price_{name}") for name in ("input", "output", "cached_input"))
        if (price is None) != (output is None):
            raise ValueError(
                f"`{prefix}price_input` and `{prefix}price_output` go together; give both, in dollars per million "
                "tokens."
            )
        if model and price is not None:
            found[model] = Prices(price, output, price if cached is None else cached)
    return found


def stated_usage(usage: Any, messages: Sequence[Mapping[str, str]], content: str | None) -> dict[str, Any]:
    """A response's `usage` as the ledger keeps it. What a total has beyond its parts (thinking, at some endpoints) is
    output; what an endpoint does not state is `estimated` from the texts' lengths, without thinking that the answer
    does not show."""
    usage = usage if isinstance(usage, Mapping) else {}
    details = usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, Mapping) else None
    prompt, completion, total = (_count(usage.get(f"{name}_tokens")) for name in ("prompt", "completion", "total"))
    if prompt and total and total > prompt + (completion or 0):
        completion = total - prompt
    kept: dict[str, Any] = {
        "prompt_tokens": prompt if prompt else sum(estimate_tokens(message["content"]) for message in messages),
        "completion_tokens": estimate_tokens(content or "") if completion is None else completion,
        "prompt_tokens_details": {"cached_tokens": min(cached or 0, prompt or 0)},
    }
    return kept | ({"estimated": True} if not prompt or completion is None else {})


def _count(value: Any) -> int | None:
    return int(value) if type(value) in (int, float) and 0 <= value < 1e12 else None


def estimate_tokens(text: str) -> int:
    """A rough token count; characters outside ASCII (Chinese problems) are taken as a token each."""
    wide = 0 if text.isascii() else sum(character > "\x7f" for character in text)
    return round((len(text) - wide) / CHARS_PER_TOKEN) + wide


@dataclass
class Account:
    """Answers and tokens so far, by model and kind of request, with what is in flight.

    The account runs over the whole ledger, earlier runs included, so a limit holds for a data set and not for a run.
    Each model has its own prices: the last ones given for it, which the ledger keeps, or those of the table."""

    max_cost: float | None = None
    # Output tokens that no answer exceeds; without it, one that is longer than all before can pass the limit.
    longest_answer: int | None = None
    given: dict[str, Prices] = field(default_factory=dict)
    booked: dict[tuple[str, str], Counter] = field(default_factory=lambda: defaultdict(Counter))
    longest: Counter = field(default_factory=Counter)
    in_flight: int = 0
    reserved: float = 0.0

    def add(self, entry: Mapping[str, Any]) -> "Account":
        """Book an entry of the ledger."""
        if "prices" in entry:
            self.given[entry["prices_of"]] = Prices(**entry["prices"])
        elif "key" in entry:
            group, usage = (entry["model"], entry["kind"]), entry["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            counts = (usage["prompt_tokens"], cached, usage["completion_tokens"])
            tokens = dict(zip(TOKEN_FIELDS, counts, strict=True))
            self.booked[group].update(tokens, answers=1, estimated="estimated" in usage)
            self.longest[group] = max(self.longest[group], tokens["output"])
        return self

    def add_all(self, entries: Iterable[Mapping[str, Any]]) -> "Account":
        """Book the entries of a ledger."""
        for entry in entries:
            self.add(entry)
        return self

    def prices(self, model: str) -> Prices | None:
        """What a model costs, if that is known."""
        return self.given.get(model) or listed_prices(model)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Answers, tokens and dollars (`None`: no known price) of each model and kind of request."""
        return [
            {"model": model, "request": kind}
            | {name: counts[name] for name in ("answers", "estimated", *TOKEN_FIELDS)}
            | {"dollars": prices.cost(counts) if (prices := self.prices(model)) else None}
            for (model, kind), counts in sorted(self.booked.items())
        ]

    @property
    def cost(self) -> float | None:
        """Dollars so far for answers of models with a known price; `None` where there is none."""
        dollars = [row["dollars"] for row in self.rows if row["dollars"] is not None]
        return sum(dollars) if dollars or not self.booked else None

    def cost_bound(self, model: str, kind: str, prompt_tokens: int) -> float:
        """What a request may cost: as long an answer as can be, or as its kind has had so far, is reckoned with."""
        output = self.longest_answer or self.longest[model, kind] or FIRST_ANSWER_TOKENS
        return self.prices(model).cost({"input": prompt_tokens, "cached_input": 0, "output": output})

    def allows(self, cost: float) -> bool:
        """Whether the limit leaves room for a request of that cost, those in flight taken into account."""
        return self.max_cost is None or (self.cost or 0.0) + self.reserved + cost <= self.max_cost

    def reserve(self, cost: float) -> None:
        """A request of that cost, at most, is on its way."""
        self.in_flight += 1
        self.reserved += cost

    def release(self, cost: float) -> None:
        """It is there, or lost."""
        self.in_flight -= 1
        self.reserved = self.reserved - cost if self.in_flight else 0.0  # no rounding is left over
