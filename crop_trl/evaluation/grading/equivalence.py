"""Whether a boxed answer says the same as the gold one: structure first, algebra for what is left.

An answer has readings: `(-2,1)` is a point or an open interval, `1,234` a number or two. Two answers are the same when
some reading of one equals some reading of the other. Values inside are compared by a `scalars` function, which the
caller supplies: an exact one for numbers that never starts anything, or one with computer algebra behind it
(`algebra.py`), which belongs in a process that can be killed.
"""

import math
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import product

from .chains import consistent, several_equations, turned
from .latex import squeeze, strip_group
from .notations import OTHER_CHOICE, choice, described, letters_of, residue, word_of_letters
from .numerals import exact_number, spell
from .readings import (
    LABEL,
    RELATION,
    SET_OPERATION,
    Based,
    Interval,
    Matrix,
    NumberSet,
    Ratio,
    Scalar,
    Sequence,
    Text,
    chain_of,
    readings,
    text_reading,
)
from .units import Quantity, parse_unit, same_unit, split_quantity

Scalars = Callable[[str, str], bool]


def same(gold: str, prediction: str, scalars: Scalars, depth: int = 0) -> bool:
    """Whether two normalised answers say the same; `scalars` compares expressions, `depth` counts lists around."""
    gold, prediction = strip_group(gold), strip_group(prediction)
    if not gold or not prediction or depth > 6:
        return False
    if squeeze(gold) == squeeze(prediction):
        return True
    gold_number, number = exact_number(gold), exact_number(prediction)
    if gold_number is not None and gold_number == number:
        return True
    if "\\approx" in prediction:
        *exact_part, rounded = re.split(r"\\approx(?![a-zA-Z])", prediction)
        if gold_number is not None and exact_number(rounded) == gold_number:
            return True
        # "\\sqrt{2} \\approx 1.41" says the square root; a rounded value alone says nothing exact.
        prediction = exact_part[0].strip()
        if not prediction:
            return False
    checks = (_same_notation, _same_quantity, _same_structure, _same_value)
    return _any_holds(lambda check=check: check(gold, prediction, scalars, depth) for check in checks)


class Undecided(Exception):
    """Raised by a `scalars` function that would need computer algebra."""


def _any_holds(checks: Iterable[Callable[[], bool]]) -> bool:
    """Whether some check holds; raises [`Undecided`] when none does but one could not tell."""
    postponed: Undecided | None = None
    for check in checks:
        try:
            if check():
                return True
        except Undecided as undecided:
            postponed = undecided
    if postponed:
        raise postponed
    return False


LETTER = re.compile(r"[A-Za-df-hj-z]\Z")  # but e and i are numbers


def exact_scalars(left: str, right: str) -> bool:
    """Compare numbers exactly; raises [`Undecided`] for what is not a number on both sides."""
    first, second = exact_number(left), exact_number(right)
    if first is not None and second is not None:
        return first == second
    if re.fullmatch("[A-Za-z]", left) and re.fullmatch("[A-Za-z]", right):
        return left == right
    if any(number is not None and LETTER.match(text) for number, text in ((first, right), (second, left))):
        return False
    raise Undecided


_INFINITELY_MANY = re.compile(r"(?:there (?:is|are) )?(?:infinitely many|an? infinite number of)(?![a-z])", re.I)


def _same_notation(gold: str, prediction: str, scalars: Scalars, depth: int) -> bool:
    """Values that come with something else (`notations.py`)."""

    def equal(first: str, second: str) -> bool:
        return same(first, second, scalars, depth + 1)

    def without_lead() -> bool:
        both = described(gold), described(prediction)
        return any(both) and equal(both[0] or gold, both[1] or prediction)

    checks = [lambda check=check: check(gold, prediction, equal) for check in (_same_residue, _same_choice)]
    return _any_holds([*checks, without_lead])


def _same_residue(gold: str, prediction: str, equal: Scalars) -> bool:
    left, right = residue(gold), residue(prediction)
    if left is None and right is None:
        return False
    (golds, modulus), (members, own) = left or ([gold], None), right or ([prediction], None)
    first, second, period = (exact_number(text) for text in (golds[-1], members[-1], own or modulus))
    if modulus and own:
        if None not in (first, second, period):
            return modulus == own and period > 0 and (first - second) % period == 0
        return equal(modulus, own) and equal(golds[-1], members[-1])
    if len(members) > 1 and not LABEL.match(members[0]) and letters_of(members[0]):
        return False  # 3x \equiv 1: not solved
    if own and None not in (second, period) and not 0 <= second < period:
        return False  # 12 mod 5 is 2
    return equal(golds[-1], members[-1])


def _same_choice(gold: str, prediction: str, equal: Scalars) -> bool:
    left, right = choice(gold), choice(prediction)
    if left and right:
        return left[0] == right[0]
    named, other = left or right, prediction if left else gold
    if named is None:
        return False
    words = text_reading(other)
    if words and re.fullmatch("[A-J]", words.words):
        return words.words == named[0]
    return equal(gold, right[1]) if right else equal(left[1], prediction)


def _same_quantity(gold: str, prediction: str, scalars: Scalars, depth: int) -> bool:
    """Values with units. A unit that only one side has is optional; two units must go together."""
    left, right = split_quantity(gold), split_quantity(prediction)
    if left is None and right is None:
        return False
    left, right = left or Quantity(gold, "none"), right or Quantity(prediction, "none")
    if (left.sum or right.sum) and "none" in (left.kind, right.kind):
        return False  # 2 hours 30 minutes is 2.5 or 150 only where the unit is said

    def equal(first: str, second: str) -> bool:
        a, b = exact_number(first), exact_number(second)
        return a == b if a is not None and b is not None else same(first, second, scalars, depth + 1)

    def scaled(text: str, factor: Fraction) -> str:
        number = exact_number(text)
        if number is not None:
            number *= factor
            return spell(number)
        if factor == 1:
            return text
        return f"{_parenthesised(text)} \\cdot {spell(factor)}"

    first, second = (scaled(q.value, Fraction(q.scale)) if q.scale != 1 else q.value for q in (left, right))
    kinds = {left.kind, right.kind}
    if left.kind == right.kind == "unit" and left.unit and right.unit:
        factor = same_unit(left.unit, right.unit)
        return factor is not None and equal(scaled(first, factor), second)
    if left.kind == right.kind:
        return equal(first, second)
    if kinds == {"percent", "none"}:
        percent, plain = (first, second) if left.kind == "percent" else (second, first)
        asked = exact_number(plain) if right.kind == "percent" else None
        # 12% may answer a question for 12 percent; where a share such as 0.5 was asked for, 0.5% is not it.
        as_share = asked is not None and 0 < abs(asked) < 1
        return not as_share and equal(percent, plain) or equal(scaled(percent, Fraction(1, 100)), plain)
    if "degree" in kinds and kinds <= {"degree", "none", "radian"}:
        degrees, other = (first, second) if left.kind == "degree" else (second, first)
        radians = f"{_parenthesised(degrees)} \\cdot \\frac{{\\pi}}{{180}}"
        if "none" in kinds and equal(degrees, other):
            return True
        return exact_number(other) in (None, 0) and equal(radians, other)
    return "none" in kinds and equal(first, second)


def _parenthesised(text: str) -> str:
    return text if re.fullmatch(r"\d+", text) else f"({text})"


def _same_structure(gold: str, prediction: str, scalars: Scalars, depth: int) -> bool:
    pairs = product(readings(gold), readings(prediction))
    return _any_holds(lambda pair=pair: _same_reading(*pair, scalars, depth) for pair in pairs)


def _same_reading(left: object, right: object, scalars: Scalars, depth: int) -> bool:
    def equal(first: str, second: str) -> bool:
        # As a whole answer {5} may say 5; as a part of another it is a set, and 5 is none.
        sets = [_is_set(text) for text in (first, second)]
        plain = [not is_set and not re.search(r"[\[({]|\\text", text) for is_set, text in zip(sets, (first, second))]
        return not (any(sets) and any(plain)) and same(first, second, scalars, depth + 1)

    if isinstance(left, Scalar) and isinstance(right, Scalar):  # those that need algebra come later
        first, second = exact_number(left.text), exact_number(right.text)
        return squeeze(left.text) == squeeze(right.text) if None in (first, second) else first == second
    if isinstance(left, Text) and isinstance(right, Text):
        first, second = (re.sub(r"[\s.,\"]+", " ", words).strip() for words in (left.words, right.words))
        if first == second:
            return True
        if not (left.marked or right.marked):
            return False
        if any(words in ("e", "i") and not side.marked for side, words in ((left, first), (right, second))):
            return False  # a number, and no choice
        if first.casefold() == second.casefold():
            return True
        if any(_INFINITELY_MANY.fullmatch(words) for words in (first, second)):
            # What there are so many of may be said or not, as with a unit.
            nouns = [_INFINITELY_MANY.sub("", words, count=1).strip() for words in (first, second)]
            many = all(_INFINITELY_MANY.match(words) for words in (first, second))
            return many and all(not noun or parse_unit(noun) is not None for noun in nouns)
        # A choice named together with what it says: (C) ellipse.
        named = re.fullmatch("[A-Ja-j]", first) and re.match(rf"\(?{first}(?:\)|[.:]) ?(?=\S)", second, re.I)
        return bool(named) and not OTHER_CHOICE.search(second[named.end() :])
    if isinstance(left, Sequence) and isinstance(right, Sequence):
        return _same_sequence(left, right, equal)
    if (
        isinstance(left, Sequence)
        and isinstance(right, Scalar)
        or isinstance(left, Scalar)
        and isinstance(right, Sequence)
    ):
        several, one = (left, right) if isinstance(left, Sequence) else (right, left)
        if several.brackets != "{}" or len(several.items) != 1:
            return False
        if _is_set(several.items[0]) or several.items[0].startswith("["):
            return False  # {5} may say 5 and {(1,2)} a point, but the set of a set is not that set
        return equal(several.items[0], one.text)
    if isinstance(left, NumberSet) and isinstance(right, NumberSet):
        return left == right
    if isinstance(left, Interval) and isinstance(right, Interval):
        return (left.low_closed, left.high_closed) == (right.low_closed, right.high_closed) and all(
            (a is None) == (b is None) and (a is None or equal(a, b))
            for a, b in ((left.low, right.low), (left.high, right.high))
        )
    if isinstance(left, Matrix) and isinstance(right, Matrix):
        shapes = [[len(row) for row in matrix.rows] for matrix in (left, right)]
        return (
            shapes[0] == shapes[1]
            and left.determinant == right.determinant
            and all(equal(a, b) for first, second in zip(left.rows, right.rows) for a, b in zip(first, second))
        )
    if isinstance(left, Based) or isinstance(right, Based):
        if isinstance(left, Based) and isinstance(right, Based):
            return left == right
        based, other = (left, right) if isinstance(left, Based) else (right, left)
        if based is right and based.base != 10:
            return False  # an answer may leave out the base that was asked for, not bring in one
        return isinstance(other, Scalar) and other.text.lstrip("0") == based.digits
    if isinstance(left, Ratio) and isinstance(right, Ratio) and len(left.parts) == len(right.parts):
        numbers = [[exact_number(part) for part in ratio.parts] for ratio in (left, right)]
        if None in numbers[0] or None in numbers[1]:
            return left.parts == right.parts
        return all(a * numbers[1][0] == b * numbers[0][0] for a, b in zip(*numbers))
    if isinstance(left, Ratio) and isinstance(right, Scalar) or isinstance(left, Scalar) and isinstance(right, Ratio):
        ratio, other = (left, right) if isinstance(left, Ratio) else (right, left)
        if math.gcd(*(int(part) for part in ratio.parts if part.isdigit())) > 1:
            return False  # a ratio that is an answer is in lowest terms: 6:30 is a time
        as_fraction = f"\\frac{{{ratio.parts[0]}}}{{{ratio.parts[1]}}}" if len(ratio.parts) == 2 else None
        return bool(as_fraction and re.search(r"\\frac|/", other.text)) and equal(as_fraction, other.text)
    return False


def _is_set(text: str) -> bool:
    return text.startswith("\\{") or "\\emptyset" in text


def _same_sequence(left: Sequence, right: Sequence, equal: Scalars) -> bool:
    """Lists and sets are compared without order, points and vectors with it."""
    vectors = ("()", "<>", "column", "")
    ordered = not (left.brackets in ("", "{}") and right.brackets in ("", "{}"))
    if ordered:
        if left.brackets != right.brackets and not (left.brackets in vectors and right.brackets in vectors):
            return False
        # A matrix is compared with a matrix as one: a row is no column.
        if "column" in (left.brackets, right.brackets) and "" in (left.brackets, right.brackets):
            return False
        if len(left.items) == 1 and left.brackets == right.brackets == "()":
            return False
        return len(left.items) == len(right.items) and all(map(equal, left.items, right.items))
    if "\\ldots" in left.items or "\\ldots" in right.items:
        return len(left.items) == len(right.items) and all(
            (a == b) if "\\ldots" in (a, b) else equal(a, b) for a, b in zip(left.items, right.items)
        )
    if len(left.items) != len(right.items):
        return False
    rest = list(right.items)
    for item in left.items:
        for index, candidate in enumerate(rest):
            if equal(item, candidate):
                del rest[index]
                break
        else:
            return False
    return True


def _same_value(gold: str, prediction: str, scalars: Scalars, depth: int) -> bool:
    """Single values: a name before the equals sign is optional, a chain of equations says its last member."""
    left, right = turned(chain_of(gold)), turned(chain_of(prediction))
    if several_equations(left) or several_equations(right):
        return False  # lists are compared as such
    if len(left) > 1 and LABEL.match(left[0]) and len(right) == 1:
        return same(left[-1], prediction, scalars, depth + 1)
    if len(left) == 1 and len(right) > 1 and all(right):
        return consistent(right, scalars) and same(gold, right[-1], scalars, depth + 1)
    if len(left) > 1 and len(right) > 1:
        names = [squeeze(chain[0]) for chain in (left, right)]
        as_function = "y" in names and any(re.fullmatch(r"[a-z]\(x\)", name) for name in names)
        if LABEL.match(left[0]) and (names[0] == names[1] or as_function):
            return same(left[-1], right[-1], scalars, depth + 1)
        return scalars(gold, prediction)
    if any(sign in text for text in (gold, prediction) for sign in ("\\ldots", "\\pm", "\\mp", "\\approx")):
        return False
    if "\\text" in gold + prediction and text_reading(gold):
        return False
    both = (gold, prediction)
    listed = [any(_is_list(reading) for reading in readings(text)) for text in both]
    if all(listed) or any(listed) and not any(RELATION.search(text) or SET_OPERATION.search(text) for text in both):
        return False  # structure has spoken
    if word_of_letters(gold) and re.fullmatch("[A-Za-z]+", squeeze(prediction)):
        return False  # to algebra, HTHT and HHTT are the same product
    if ":" in gold + prediction:
        return False  # ratios and times were compared as such; to algebra a colon divides
    if re.search(r"\d\)? ?_", gold + prediction):
        return False  # a number in some base was compared as such; to algebra its base would be nothing
    return scalars(gold, prediction)


def _is_list(reading: object) -> bool:
    return (
        isinstance(reading, Interval)
        or isinstance(reading, Sequence)
        and len(reading.items) > 1
        and reading.brackets != "column"
    )
