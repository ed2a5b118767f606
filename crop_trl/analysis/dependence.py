"""Which tokens of a response depend on the conditions of its problem: from worked solutions, without any model.

A record says it with its `solution` and with `changes`: the same problem with one condition changed, and the solution
of that, told in the same words. Numbers, signs and words that differ there depend on the condition. A response is laid
beside the solution; where it writes a value that depends on some condition, its tokens are positive, up to the first
value that is another one than the solution's.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

# Of a token: it depends on a condition, or on none, or could not be aligned, or follows the first wrong value.
POSITIVE, NEGATIVE, UNALIGNED, AFTER_ERROR = 1, 0, -1, -2

_UNIT = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?|[^\W\d]+|[^\w\s]")
# "Step 3:" or "3." at the start of a line counts lines and says nothing of the problem.
_COUNTER = re.compile(r"(?:\bstep\s+|^\s*)(\d+)(?=[:.)])", re.IGNORECASE | re.MULTILINE)
_SIGNS = {sign: sign for sign in "+-*/"} | {"x": "*", "×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"}
_FEW = 3
_STEP_END = re.compile(r"[.!?]\s|\n")


class Units:
    """The numbers, words and signs of a text."""

    def __init__(self, text: str):
        self.text = text
        found = list(_UNIT.finditer(text))
        counters = {match.start(1) for match in _COUNTER.finditer(text)}
        self.spans = [match.span() for match in found]
        self.numbers = [match[0][0].isdecimal() and match.start() not in counters for match in found]
        self.values = [
            str(float(match[0].replace(",", ""))) if number else _SIGNS.get(match[0], match[0])
            for match, number in zip(found, self.numbers)
        ]
        self.signs = [value in "+-*/" for value in self.values]

    @cached_property
    def steps(self) -> list[int]:
        """Which sentence or line each unit stands in."""
        ends = [match.start() for match in _STEP_END.finditer(self.text)]
        return np.searchsorted(ends, [start for start, _ in self.spans]).tolist()

    def aligned(self, other: "Units") -> Iterator[tuple[bool, range, range]]:
        """Passages of this text and of another that belong together, and whether they read alike, their numbers aside:
        a wrong number has the place of the right one. What is alike should be much, and in one piece."""
        pairs = [*_pairs(self, other), (len(self.values), len(other.values))]
        n = m = 0
        for place, (i, j) in enumerate(pairs, start=1):
            if i > n or j > m:
                yield False, range(n, i), range(m, j)
            if place < len(pairs):
                yield True, range(i, i + 1), range(j, j + 1)
            n, m = i + 1, j + 1


def _pairs(one: Units, two: Units) -> list[tuple[int, int]]:
    """The best alignment: 1 for a pair of equal units, 1/2 for numbers that differ, 1/2 more for following a pair."""
    numbers, values = np.array(two.numbers, dtype=bool), np.array(two.values, dtype=object)
    size = (len(one.values) + 1, len(values) + 1)
    best = np.zeros(size, dtype=np.float32)  # of the first units of each text
    paired = np.full(size, -np.inf, dtype=np.float32)  # the same, where the last two are a pair
    for n, (number, value) in enumerate(zip(one.numbers, one.values)):
        gain = np.where((values == value) & (numbers == number), 1.0, np.where(number & numbers, 0.5, -np.inf))
        paired[n + 1, 1:] = gain + np.maximum(best[n, :-1], paired[n, :-1] + 0.5)
        best[n + 1, 1:] = np.maximum.accumulate(np.maximum(best[n, 1:], paired[n + 1, 1:]))
    n, m, found, follows = len(one.values), len(values), [], False
    while n and m:
        if not follows and best[n, m] == best[n - 1, m]:
            n -= 1
        elif not follows and best[n, m] == best[n, m - 1]:
            m -= 1
        else:
            n, m = n - 1, m - 1
            follows = bool(paired[n, m] + 0.5 > best[n, m])
            found.append((n, m))
    return found[::-1]


def differing(text: Units, others: Sequence[Units]) -> list[set[str | None]]:
    """For each unit of a text, what stands in its place in others; `None`: a number or sign that is not there."""
    found = [set() for _ in text.values]
    for other in others:
        for _, here, there in text.aligned(other):
            if len(here) == len(there) <= _FEW:
                for n, m in zip(here, there):
                    found[n] |= {other.values[m]} - {text.values[n]}
            else:
                for n in here:
                    found[n] |= {None} if text.numbers[n] or text.signs[n] else set()
    return found


def problem_of(record: Mapping[str, Any]) -> str | None:
    """The text of a record's problem."""
    return record.get("original_problem") or record.get("problem")


@dataclass
class Reference:
    """The worked solution of a problem, and which of its units depend on a condition."""

    solution: Units
    others: list[set[str | None]]  # of each unit, what it may be when a condition changes; empty: it depends on none
    changing: set[str]  # values that depend on a condition somewhere in problem or solution
    constant: set[str]  # values that somewhere do not

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Reference":
        """From a record; raises `ValueError` where it does not hold what labels need."""
        changes, where = record.get("changes"), f"record {str(record.get('id', '?'))!r}"
        if not isinstance(record.get("solution"), str) or not isinstance(changes, Sequence) or not changes:
            raise ValueError(f"{where} has no `solution` or no `changes`; docs/selectors.md says what labels need.")
        if not isinstance(problem_of(record), str):
            raise ValueError(f"{where} has no `original_problem`; docs/selectors.md says what labels need.")
        if not all(isinstance(change.get(name), str) for change in changes for name in ("problem", "solution")):
            raise ValueError(f"`changes` of {where} lacks a `problem` or `solution`; each change needs both.")
        found, changing, constant = [], set(), set()
        for name, text in (("problem", problem_of(record)), ("solution", record["solution"])):
            units = Units(text)
            others = differing(units, [Units(change[name]) for change in changes])
            changing |= {value for value, other in zip(units.values, others) if other}
            constant |= {value for value, other in zip(units.values, others) if not other}
            found.append((units, others))
        return cls(*found[-1], changing, constant)

    @classmethod
    def of_solution(cls, problem: str, solution: str) -> "Reference":
        """Of a problem whose changes are not known: enough to tell where a response goes wrong."""
        units = Units(solution)
        return cls(units, [set() for _ in units.values], set(), {*units.values, *Units(problem).values})

    def first_wrong(self, pieces: Sequence[str]) -> int | None:
        """The token with which a response, given as the pieces that its text is made of, leaves the solution."""
        wrong = np.flatnonzero(self.label_tokens(pieces) == AFTER_ERROR)
        return int(wrong[0]) if wrong.size else None

    def _by_value(self, units: Units, n: int) -> int | None:
        """The label of a unit that has no counterpart in the solution; `None` for a number that occurs nowhere."""
        value = units.values[n]
        if value in self.changing:
            # A word may say something else here, as does "more" in "once more".
            return POSITIVE if units.numbers[n] and value not in self.constant else UNALIGNED
        return None if units.numbers[n] and value not in self.constant else NEGATIVE

    def label_units(self, units: Units) -> tuple[list[int], int | None]:
        """A label for each unit of a response, and the place of its first wrong one (`None`: nothing is wrong)."""
        labels = [NEGATIVE] * len(units.values)
        doubtful = None  # the first value of this step that the solution does not have there
        for alike, theirs, here in self.solution.aligned(units):
            instead = set().union(*(self.others[t] for t in theirs))
            for n in here:
                if doubtful is not None and units.steps[doubtful] != units.steps[n]:
                    doubtful = None
                if alike:
                    right = units.values[n] == self.solution.values[theirs[0]]
                    label = (POSITIVE if instead else NEGATIVE) if right else None
                elif units.numbers[n] and any(self.solution.numbers[t] for t in theirs):
                    label = None
                elif units.signs[n] and any(self.solution.signs[t] for t in theirs):
                    label = None
                elif units.values[n] in instead:
                    label = None  # the word for another condition
                else:
                    label = UNALIGNED if instead else self._by_value(units, n)
                    if label and doubtful is None:
                        # Perhaps said in other words, perhaps where the error begins: what follows will tell.
                        doubtful = n
                if label is None:
                    return labels, n if doubtful is None else doubtful
                labels[n] = label
        return labels, None

    def label_tokens(self, pieces: Sequence[str]) -> np.ndarray:
        """A label for each token of a response, given as the pieces that its text is made of."""
        units = Units("".join(pieces))
        found, wrong = self.label_units(units)
        cut = len(units.text) + 1 if wrong is None else units.spans[wrong][0]
        of_characters = np.full(len(units.text), NEGATIVE, dtype=np.int8)
        for (start, end), label in zip(units.spans, found):
            of_characters[start:end] = label
        ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        # A token without text of its own belongs to the character before it.
        starts = np.minimum(np.append(0, ends)[:-1], np.maximum(ends - 1, 0))

        def holds(label: int) -> np.ndarray:
            before = np.append(0, np.cumsum(of_characters == label))
            return before[ends] > before[starts]

        labels = np.select([holds(POSITIVE), holds(UNALIGNED)], [POSITIVE, UNALIGNED], NEGATIVE).astype(np.int8)
        labels[ends > cut] = AFTER_ERROR
        return labels


# Of right responses, the share that must read like their solutions before a wrong one is compared with its own.
_ALIKE = 0.9


def first_wrong_places(
    problems: Sequence[str],
    solutions: Sequence[str | None],
    pieces: Sequence[Sequence[str]],
    right: Sequence[bool | None],
) -> list[int | None]:
    """The token with which each wrong response leaves its solution; `None` where right ones read unlike theirs too."""
    found = [
        Reference.of_solution(problem, solution).first_wrong(part) if solution and verdict is not None else None
        for problem, solution, part, verdict in zip(problems, solutions, pieces, right)
    ]
    alike = [place is None for place, solution, verdict in zip(found, solutions, right) if solution and verdict]
    known = bool(alike) and np.mean(alike) >= _ALIKE
    return [place if known and verdict is False else None for place, verdict in zip(found, right)]
