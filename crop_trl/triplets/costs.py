"""What requests cost: prices, a running account, and estimates before a run."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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


def find_prices(
    model: str, price_input: float | None = None, price_output: float | None = None, price_cached: float | None = None
) -> Prices | None:
    """The prices given, or those of the table for `model` (a date at the end of its name aside), or `None`."""
    if (price_input is None) != (price_output is None):
        raise ValueError("`price_input` and `price_output` go together; give both, in dollars per million tokens.")
    if price_input is not None:
        return Prices(price_input, price_output, price_input if price_cached is None else price_cached)
    table = json.loads((Path(__file__).parent / "prices.json").read_text(encoding="utf-8"))["models"]
    row = table.get(re.sub(r"-\d{4}-\d{2}-\d{2}$", "", model))
    return Prices(**row) if row else None


def stated_usage(usage: Any, messages: Sequence[Mapping[str, str]], content: str | None) -> dict[str, Any]:
    """
    A response's `usage` as the ledger keeps it; what an endpoint does not state is `estimated` from the texts' lengths,
    without thinking that the answer does not show.
    """
    usage = usage if isinstance(usage, Mapping) else {}
    details = usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, Mapping) else None
    prompt, completion = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    kept: dict[str, Any] = {
        "prompt_tokens": prompt if prompt else sum(estimate_tokens(message["content"]) for message in messages),
        "completion_tokens": estimate_tokens(content or "") if completion is None else completion,
        "prompt_tokens_details": {"cached_tokens": min(cached or 0, prompt or 0)},
    }
    return kept | ({"estimated": True} if not prompt or completion is None else {})


def _count(value: Any) -> int | None:
    return int(value) if type(value) in (int, float) and 0 <= value < 1e12 else None


def count_tokens(usage: Mapping[str, Any] | None) -> dict[str, int]:
    """Token counts of what [`stated_usage`] returned; zeros for `None`."""
    usage = usage or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    counts = (usage.get("prompt_tokens"), cached, usage.get("completion_tokens"))
    return {name: count or 0 for name, count in zip(TOKEN_FIELDS, counts, strict=True)}


def estimate_tokens(text: str) -> int:
    """A rough token count; characters outside ASCII (Chinese problems) are taken as a token each."""
    wide = 0 if text.isascii() else sum(character > "\x7f" for character in text)
    return round((len(text) - wide) / CHARS_PER_TOKEN) + wide


@dataclass
class Account:
    """
    Requests and tokens so far, by kind of request, with what is in flight.

    The account runs over the whole ledger, earlier runs included, so a limit holds for a data set and not for a run.
    """

    prices: Prices | None = None  # without them there is no cost, and no limit
    max_cost: float | None = None
    # Output tokens that no answer exceeds; without it, one that is longer than all before can pass the limit.
    longest_answer: int | None = None
    requests: Counter = field(default_factory=Counter)
    tokens: dict[str, Counter] = field(default_factory=dict)
    longest: Counter = field(default_factory=Counter)
    estimated: int = 0
    in_flight: int = 0
    reserved: float = 0.0

    def add(self, kind: str, usage: Mapping[str, Any] | None) -> None:
        """Book an answer."""
        self.requests[kind] += 1
        counts = count_tokens(usage)
        self.tokens.setdefault(kind, Counter()).update(counts)
        self.longest[kind] = max(self.longest[kind], counts["output"])
        self.estimated += not usage or bool(usage.get("estimated"))

    def add_entries(self, entries: Iterable[Mapping[str, Any]]) -> "Account":
        """Book the entries of a ledger."""
        for entry in entries:
            self.add(entry["kind"], entry.get("usage"))
        return self

    @property
    def total(self) -> Counter:
        """Tokens of all kinds of request together."""
        return sum(self.tokens.values(), Counter({name: 0 for name in TOKEN_FIELDS}))

    @property
    def cost(self) -> float | None:
        """Dollars so far."""
        total = self.total
        return self.prices.cost({name: total[name] for name in TOKEN_FIELDS}) if self.prices else None

    def cost_bound(self, kind: str, prompt_tokens: int) -> float:
        """What a request may cost: as long an answer as can be, or as its kind has had so far, is reckoned with."""
        output = self.longest_answer or self.longest[kind] or FIRST_ANSWER_TOKENS
        return self.prices.cost({"input": prompt_tokens, "cached_input": 0, "output": output})

    def allows(self, cost: float) -> bool:
        """Whether the limit leaves room for a request of that cost, those in flight taken into account."""
        return self.max_cost is None or self.cost + self.reserved + cost <= self.max_cost

    def reserve(self, cost: float) -> None:
        """A request of that cost, at most, is on its way."""
        self.in_flight += 1
        self.reserved += cost

    def release(self, cost: float) -> None:
        """It is there, or lost."""
        self.in_flight -= 1
        self.reserved = self.reserved - cost if self.in_flight else 0.0  # no rounding is left over
