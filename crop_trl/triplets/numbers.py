r"""Counterfactuals by rule: one number of a problem takes another value of its size, and nothing else changes.

A number stays where it is hardly a quantity (0 and 1, an index, an exponent, part of a name or a pattern), says what
form the answer has, or stands in more than one place, where a change would contradict the rest. Whether the problem
still makes sense and has another answer, solving tells.
"""

import re
from collections import Counter
from collections.abc import Container
from random import Random
from typing import NamedTuple

REACH = 50  # how far from the old value the new one may lie, in units of the last place that is not 0
_NUMBER = re.compile(
    r"(?<![\w.,\\])(?:\d{1,3}(?:,\d{3})+|\d{1,12})(?:\.\d{1,6})?(?!\d|[.,]\d|_|st\b|nd\b|rd\b|th\b)", re.ASCII
)
_KEPT = [
    re.compile(pattern, re.DOTALL | re.IGNORECASE)
    for pattern in (
        r"[_^]\s*(?:\{[^{}]*\}|\d+)|\\sqrt\[\d+\]",
        r"[-\d\s,+$]*(?:\\[lc]?dots|\.\.\.|…)[-\d\s,+$]*",  # 1, 2, ..., 100
        r"\b(?:90|180|270|360)\s*(?:\^|\\circ|°|degrees)|\b100\s*\\?%",
        r"(?:in the form|nearest|written as|expressed as|answer\b)[^.?!]*|\d+ (?:decimal|significant)",
        r"\(A\).*\(B\).*",
    )
]


class Change(NamedTuple):
    """One number of a text, what takes its place, and the text with it."""

    old: str
    new: str
    text: str


def changes(text: str, count: int) -> list[Change]:
    """At most `count` changes, each of another number; always the same for the same text."""
    draw, numbers, found = Random(text), list(_NUMBER.finditer(text)), []
    times = Counter(_bare(number[0]) for number in numbers)
    kept = [match.span() for pattern in _KEPT for match in pattern.finditer(text)]
    alone = [n for n in numbers if times[_bare(n[0])] == 1 and not any(a < n.end() and n.start() < b for a, b in kept)]
    for number in draw.sample(alone, len(alone)):
        others = _others(number[0], times)
        if others and len(found) < count:
            new = draw.choice(others)
            found.append(Change(number[0], new, text[: number.start()] + new + text[number.end() :]))
    return found


def _others(old: str, taken: Container[str]) -> list[str]:
    """Values that a number could have: as many digits, round like it, even or odd like it if it can be."""
    digits = _bare(old)
    decimals, value = len(digits.partition(".")[2]), int(digits.replace(".", ""))
    if value < 2 or re.match(r"0\d", digits):
        return []
    unit = 10 ** (len(str(value)) - len(str(value).rstrip("0")))
    reach = max(3, min(value // unit // 3, REACH))
    near = [value + unit * step for step in range(-reach, reach + 1) if step]
    near = [n for n in near if n > 1 and len(str(n)) == len(str(value))]
    written = {n: f"{n / 10**decimals:{',' if ',' in old else ''}.{decimals}f}" for n in near}
    free = {n: new for n, new in written.items() if _bare(new) not in taken}
    return [new for n, new in free.items() if (n - value) // unit % 2 == 0] or [*free.values()]


def _bare(number: str) -> str:
    return number.replace(",", "")
