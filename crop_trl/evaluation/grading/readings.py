"""The readings of a normalised answer: number, list, point, interval, matrix, words, ratio, equation."""

import functools
import re
from dataclasses import dataclass

from .latex import split_top_level, squeeze, strip_group
from .notations import number_set
from .numerals import exact_number

MAX_ITEMS = 100


@dataclass(frozen=True)
class Sequence:
    """Several values. `brackets` is `""`, `"{}"`, `"()"`, `"[]"`, `"(]"`, `"[)"`, `"<>"` or `"column"`."""

    brackets: str
    items: tuple[str, ...]


@dataclass(frozen=True)
class Interval:
    """A stretch of the real line; `None` is an end at infinity."""

    low: str | None
    low_closed: bool
    high: str | None
    high_closed: bool


@dataclass(frozen=True)
class Matrix:
    """Rows of entries, or the determinant of them."""

    rows: tuple[tuple[str, ...], ...]
    determinant: bool = False


@dataclass(frozen=True)
class Text:
    """Words."""

    words: str
    marked: bool  # stood in \text{} or is plainly a word, so its case does not matter


@dataclass(frozen=True)
class Based:
    """Digits in a number base."""

    digits: str
    base: int


@dataclass(frozen=True)
class Ratio:
    """A ratio such as `2:3`, in parts."""

    parts: tuple[str, ...]


@dataclass(frozen=True)
class NumberSet:
    """All real numbers, all integers: `letter` is R, Z, Q, N or C."""

    letter: str


@dataclass(frozen=True)
class Scalar:
    """An expression that stands for itself."""

    text: str


NAME = r"(?:\\[a-zA-Z]+ ?)?[A-Za-z]?(?:_(?:\{[^{}]*\}|\w))?'*"
# What may stand before "=" without being part of the answer: x, a_1, f(x), P(A), \angle ABC, AB, \text{Area}.
LABEL = re.compile(
    rf"(?:{NAME}|{NAME} ?\([^()=]*\)|\\(?:angle|triangle|overline|vec|mathbf|hat|bar|widehat) ?\{{?[A-Z]*[a-z]?\}}?"
    r"|(?:\||\\\|)(?:[+-]? ?\\(?:vec|mathbf|overrightarrow) ?\{?[A-Za-z]+\}? ?)+(?:\||\\\|)|[A-Z]{2,4}|\|[A-Za-z]+\|"
    r"|\(?(?:[a-z], ?)+[a-z]\)?|(?:\\text ?\{[^{}]*\} ?)+|[A-Za-z][A-Za-z ]{2,})\Z"
)
COMMA = re.compile(r"[,;]")
LIST = re.compile(r"[,;]|\\text ?\{\s*,?\s*(?:and|or|&)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])|\\\\")
EQUALS = re.compile(r"(?<![<>!\\:])=(?!=)")
RELATION = re.compile(r"\\(le|ge)(?![a-zA-Z])|<|>")
BRACKETS = (
    ("\\{", "\\}", "{}"),
    ("\\langle", "\\rangle", "<>"),
    ("(", ")", "()"),
    ("[", "]", "[]"),
    ("(", "]", "(]"),
    ("[", ")", "[)"),
)
REALS = r"(?:\\mathbb\{R\}|\(-\\infty, ?\+?\\infty ?\))"
SET_OPERATION = re.compile(r"\\(?:cup|cap|setminus|mid)(?![a-zA-Z])|\|")
UNION = re.compile(r"\\cup(?![a-zA-Z])|\\text ?\{\s*or\s*\}|(?<![a-zA-Z\\])or(?![a-zA-Z])|,")
MATRIX = re.compile(
    r"\\begin ?\{([bpvBV]?)(?:small)?(?:matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end ?\{\1(?:small)?(?:matrix|array)\}\Z",
    re.DOTALL,
)
LEAD_IN = re.compile(r"(?:the |your |final |correct |so |therefore,? |thus,? |hence,? )*answer(?: is| =|:)?:? *", re.I)
NOTHING = ("\\emptyset", "\\{\\}")
NOTHING_WORDS = re.compile(
    r"(?:there (?:is|are|exists?) )?(?:none|(?:no|an|the)?(?: ?(?:real|integer|such|valid|possible|empty))*"
    r" ?(?:solutions?|roots?|set|values?|numbers?|integers?)(?: exists?)?)",
    re.I,
)


def text_reading(text: str) -> Text | None:
    """The answer as words, when it is words."""
    marked = "\\text" in text
    words = re.sub(r"\\text ?\{([^{}]*)\}", r" \1 ", text)
    words = re.sub(r"\s+", " ", words.replace("~", " ")).strip()
    if re.search(r"[\\^_=<>+*/|]", words) or not re.search("[a-zA-Z]", words):
        return None
    words = LEAD_IN.sub("", words).strip(' .,:;"`')  # not the prime of f'
    words = re.sub(r"(?:an?|the) (?=[a-z]{3})", "", words) if re.match(r"(?:an?|the) [a-z]{3,}\Z", words) else words
    if choice := re.fullmatch(r"(?:(?:choice|option|answer) )?\(? ?([A-Za-z]+) ?\)?", words, re.I):
        words = choice.group(1)
    # A bare word reads as text; one or two letters may as well be variables.
    marked = marked or bool(re.fullmatch(r"[A-Za-z][a-z]{2,}(?:[ -][A-Za-z]+)*", words))
    return Text(words, marked) if words else None


def chain_of(text: str) -> list[str]:
    """The members of a chain of equations."""
    return [part.strip() for part in split_top_level(text, EQUALS)]


def _interval(text: str) -> Interval | None:
    """An interval in brackets, or an inequality of one variable."""
    text = _membership(text)
    match = re.match(r"([(\[\]])(.*)([)\]\[])\Z", text, re.DOTALL)
    if match:
        items = [item.strip() for item in split_top_level(match.group(2), COMMA)]
        if len(items) != 2 or not all(items):
            return None
        return Interval(*_end(items[0], match.group(1) == "["), *_end(items[1], match.group(3) == "]"))
    if absolute := re.match(rf"\| ?{NAME} ?\| ?(<|\\le(?![a-zA-Z])) ?(.+)\Z", text):
        bound, closed = absolute.group(2), absolute.group(1) != "<"
        return Interval(f"-({bound})", closed, bound, closed)
    relations = list(RELATION.finditer(text))
    parts = [part.strip() for part in split_top_level(text, RELATION)]
    if not 2 <= len(parts) <= 3 or len(relations) != len(parts) - 1 or not all(parts):
        return None
    closed = [relation.group(1) is not None for relation in relations]
    down = [relation.group().startswith((">", "\\ge")) for relation in relations]
    if len(parts) == 3:
        if not LABEL.match(parts[1]) or down[0] != down[1]:
            return None
        low, high = (2, 0) if down[0] else (0, 2)
        low_closed, high_closed = (closed[1], closed[0]) if down[0] else closed
        return Interval(*_end(parts[low], low_closed), *_end(parts[high], high_closed))
    if LABEL.match(parts[0]):
        bound, above = parts[1], down[0]
    elif LABEL.match(parts[1]):
        bound, above = parts[0], not down[0]
    else:
        return None
    return Interval(*_end(bound, closed[0]), None, False) if above else Interval(None, False, *_end(bound, closed[0]))


def _end(text: str, closed: bool) -> tuple[str | None, bool]:
    infinite = squeeze(text).lstrip("+-") in ("\\infty", "oo", "inf")
    return (None, False) if infinite else (text, closed)


SET_BUILDER = re.compile(r"\\\{ ?[a-zA-Z](?: ?\\in ?\\mathbb ?\{R\})? ?(?::|\||\\mid(?![a-z])) ?(.*)\\\}\Z")
BOTH = re.compile(r"\\text ?\{\s*and\s*\}|(?<![a-zA-Z\\])and(?![a-zA-Z])|\\(?:land|wedge)(?![a-zA-Z])")


def _both(text: str) -> Interval | None:
    """`x > 3 and x \\le 4` as one interval."""
    sides = [_interval(part.strip()) for part in split_top_level(text, BOTH)]
    if len(sides) != 2 or None in sides:
        return None
    for above, below in (sides, sides[::-1]):
        if above.high is None and below.low is None and above.low is not None and below.high is not None:
            return Interval(above.low, above.low_closed, below.high, below.high_closed)
    return None


def _membership(text: str) -> str:
    """`x \\in A` says A."""
    match = re.match(rf"{NAME} ?\\in(?![a-zA-Z]) ?(.*)\Z", text, re.DOTALL)
    return match.group(1).strip() if match else text


def _plus_minus(item: str) -> list[str]:
    if "\\pm" not in item and "\\mp" not in item:
        return [item]
    swap = {"\\pm": ("+", "-"), "\\mp": ("-", "+")}
    both = [re.sub(r"\\(?:pm|mp) ?", lambda m, side=side: swap[m.group().strip()][side], item) for side in (0, 1)]
    return [re.sub(r"^(name=)?\+", r"\1", text.strip()) for text in both]


def _items(text: str, separator: re.Pattern) -> tuple[str, ...] | None:
    """The members of a list, written-out signs included; a name before the first is taken off all."""
    parts = [part.strip() for part in split_top_level(text, separator)]
    parts = [strip_group(part) for part in parts if part]
    if not parts or len(parts) > MAX_ITEMS:
        return None
    head = chain_of(parts[0])
    if len(parts) > 1 and len(head) == 2 and LABEL.match(head[0]) and not any("=" in part for part in parts[1:]):
        parts[0] = head[1]
    return tuple(expanded for part in parts for expanded in _plus_minus(part))


def _sequences(text: str) -> list[Sequence]:
    found = []
    inner, brackets = text, ""
    for opening, closing, kind in BRACKETS:
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            body = text[len(opening) : -len(closing)]
            if len(split_top_level(text, COMMA)) == 1 and _balanced(body):
                inner, brackets = body.strip(), kind
                break
    items = _items(inner, LIST)
    if not brackets and re.search(", ?0", inner) and exact_number(inner) is not None:
        return found  # 10,080 is one number
    if items and (len(items) > 1 or brackets):
        found.append(Sequence(brackets, items))
    return found


def _balanced(text: str) -> bool:
    depth = 0
    for char in re.sub(r"\\[{}]", "", text):
        depth += (char in "([") - (char in ")]")
        if depth < 0:
            return False
    return depth == 0


def _says_nothing(words: str) -> bool:
    return bool(NOTHING_WORDS.fullmatch(words)) and bool(re.search(r"\b(?:no|none|empty)\b", words, re.I))


def _rows_in_brackets(text: str) -> list[object]:
    """`[[1,2],[3,4]]` as a matrix."""
    if not re.match(r"\[ ?\[.*\] ?\]\Z", text, re.DOTALL):
        return []
    rows = [row.strip() for row in split_top_level(text[1:-1], COMMA)]
    if not all(row[:1] == "[" and row[-1:] == "]" for row in rows):
        return []
    return [Matrix(tuple(tuple(cell.strip() for cell in split_top_level(row[1:-1], COMMA)) for row in rows))]


def _transposed(text: str) -> list[object]:
    """`(1,2)^T` as a column, and a matrix turned over."""
    match = re.match(r"(.*[)\]}]) ?\^ ?(?:\{ ?)?(?:T|\\top|\\text ?\{ ?T ?\})(?: ?\})?\Z", text, re.DOTALL)
    found: list[object] = []
    for reading in readings(match.group(1)) if match else []:
        if isinstance(reading, Matrix) and len({len(row) for row in reading.rows}) == 1:
            rows = tuple(zip(*reading.rows))
            found.append(Matrix(rows, reading.determinant))
            if len(reading.rows) == 1 and len(rows) > 1:
                found.append(Sequence("column", reading.rows[0]))
        elif isinstance(reading, Sequence) and reading.brackets in ("()", "[]", "<>"):
            found.append(Sequence("column", reading.items))
    return found


def _punctured_line(text: str) -> tuple[str, ...] | None:
    """Everything but some points or one interval, as the intervals that are left (points in ascending order)."""
    match = re.match(rf"{REALS} ?\\setminus ?(.*)\Z", _membership(text))
    gap = match and _interval(match.group(1))
    if gap and gap.low is not None and gap.high is not None:
        return (
            f"(-\\infty,{gap.low}{')' if gap.low_closed else ']'}",
            f"{'(' if gap.high_closed else '['}{gap.high},\\infty)",
        )
    match = re.match(rf"{REALS} ?(?:\\setminus|-) ?\\\{{(.*)\\\}}\Z", _membership(text))
    match = match or re.match(rf"{NAME} ?\\ne ?(.*)\Z", text)
    points = _items(match.group(1), COMMA) if match else None
    if not points:
        return None
    numbers = [exact_number(point) for point in points]
    if len(points) > 1:
        if None in numbers:
            return None
        points = tuple(point for _, point in sorted(zip(numbers, points)))
    ends = ["-\\infty", *points, "\\infty"]
    return tuple(f"({low},{high})" for low, high in zip(ends, ends[1:]))


@functools.lru_cache(maxsize=4096)
def readings(text: str) -> tuple[object, ...]:
    """Every way to read a normalised answer."""
    return tuple(_readings(text))


def _readings(text: str) -> list[object]:
    text = strip_group(re.sub(r"\\(?:begin|end) ?\{cases\}", "", text))
    if not text:
        return []
    found: list[object] = []
    if numbers := number_set(_membership(text)):
        found.append(NumberSet(numbers))
        if numbers == "R":
            found.append(Interval(None, False, None, False))
    words = text_reading(text)
    if words:
        found.append(Text("empty set", True) if _says_nothing(words.words) else words)
    if squeeze(text) in NOTHING:
        found.append(Text("empty set", True))
    text = LEAD_IN.sub("", text).strip() if text[:1].isalpha() else text
    text = re.sub(r"(?<=\w) ?\(? ?\\text ?\{ ?\(?(?:in )?base(?: (\d+))? ?\)?\}(?: ?(\d+))? ?\)?\Z", r"_{\1\2}", text)
    if not text:
        return found
    if segment := re.fullmatch(r"(?:\\overline ?\{ ?)?([A-Z]{2}) ?\}?", text):
        found.append(Scalar("".join(sorted(segment.group(1)))))  # AB is BA
    based = re.match(r"\(?([0-9A-F]+)\)? ?_ ?(?:\{ ?(?:\\text\{)? ?\(?(\w+)\)? ?\}?\}|(\d))\Z", text)
    if based:
        base = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
                "sixteen": 16}.get(based.group(2) or "") or based.group(2) or based.group(3)  # fmt: skip
        if str(base).isdigit():
            found.append(Based(based.group(1).lstrip("0") or "0", int(base)))
    if exact_number(text) is not None:
        found.append(Scalar(text))
        if not re.search("[,]", text):
            return found
    matrix = MATRIX.match(text[1:-1].strip() if text[0] in "[(" and text[1:].lstrip().startswith("\\begin") else text)
    if matrix:
        rows = [row.strip() for row in split_top_level(matrix.group(2), re.compile(r"\\\\(?:\[[^\]]*\])?"))]
        cells = tuple(tuple(cell.strip() for cell in row.split("&")) for row in rows if row)
        found.append(Matrix(cells, matrix.group(1) in ("v", "V") and bool(matrix.group(1))))
        if all(len(row) == 1 for row in cells) and len(cells) > 1:
            found.append(Sequence("column", tuple(row[0] for row in cells)))
        if len(cells) == 1 and len(cells[0]) == 1 and matrix.group(1) == "":
            return found + _readings(cells[0][0])
    found += _rows_in_brackets(text) + _transposed(text)
    if built := SET_BUILDER.match(text):
        return found + _readings(built.group(1))
    if interval := _interval(text) or _both(text):
        found.append(interval)
    if points := _punctured_line(text):
        found.append(Sequence("", points))
    union = [part.strip() for part in split_top_level(_membership(text), UNION)]
    if len(union) > 1 and all(_interval(part) for part in union):
        found.append(Sequence("", tuple(union)))
    found += _sequences(_membership(text))
    ratio = [part.strip() for part in split_top_level(text, re.compile(":|\\\\text ?\\{ ?to ?\\}"))]
    if len(ratio) > 1 and all(exact_number(part) is not None or re.fullmatch(r"[\w\\{}]+", part) for part in ratio):
        found.append(Ratio(tuple(ratio)))
    found.append(Scalar(text))
    return found
