"""Chains of equations: which of them end in the answer, and which only lead to an unknown."""

import math
import re
from collections.abc import Callable
from fractions import Fraction

from .latex import exact_number, split_top_level, squeeze
from .numerals import arithmetic, spell
from .readings import EQUALS, LABEL, LIST


def turned(chain: list[str]) -> list[str]:
    """The chain with its name in front: 5 = x."""
    named = len(chain) > 1 and re.fullmatch("[A-Za-z]", chain[-1]) and value_of(chain[0]) is not None
    return chain[::-1] if named else chain


def several_equations(chain: list[str]) -> bool:
    """Whether the equals signs belong to a list: x = 24, y = 42."""
    return any(exact_number(part) is None and len(split_top_level(part, LIST)) > 1 for part in chain[1:-1])


_GREEK = (
    r"\\(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|chi|psi|omega)"
    r"(?![a-zA-Z])"
)
_SYMBOL = re.compile(rf"({_GREEK}|\\[a-zA-Z]+|[A-Za-z])(?: ?_ ?(\{{[^{{}}]*\}}|\w))?")
_CALL = re.compile(r"(?<![a-zA-Z\\])([A-Za-wA-W])'*(?: ?\^ ?\{?-?\d\}?)? ?\(([^()]*)\)")
_NAMED = re.compile(
    rf"\\(?:sin|cos|tan|cot|sec|csc) ?(?:\d* ?(?:[A-Za-z]|{_GREEK})|\([^()^]*\)|\\frac\{{[^{{}}^]*\}}\{{\d+\}})\Z"
    r"|\\lfloor[^=]*\\rfloor\Z|\\lceil[^=]*\\rceil\Z"
)
_BINDING = re.compile(r"\\(?:sum|prod|int|iint|oint|lim|max|min|sup|inf|gcd|lcm)(?![a-zA-Z])")


def _free_letters(text: str) -> list[str]:
    """Variables in order, each with its subscript; e and i are numbers."""
    text = re.sub(r"\\text ?\{[^{}]*\}", " ", text)
    found = [name + (index or "").strip("{} ") for name, index in _SYMBOL.findall(text)]
    return [name for name in found if name not in ("e", "i") and (name[0] != "\\" or re.match(_GREEK, name))]


def _poses_equation(first: str, last: str) -> bool:
    """Whether the first member of a chain is a condition on one unknown (x^2 = 25) and not the name of a value."""
    first = re.sub(r"\\degree(?![a-zA-Z])|\\\$|%", "", first).strip()
    if _BINDING.search(first) or _NAMED.match(first):
        return False
    before = None
    while before != first:  # f(2) is a name; n(n+1) is a product
        before = first
        first = _CALL.sub(lambda m: m.group() if m.group(1) in m.group(2) else " 0 ", first)
    product = re.match(r"([A-Za-z]) ?\(.*\1.*\)\Z", first)  # x(x+1)
    inverted = re.match(r"\\(?:log|ln|lg|exp|sqrt)(?![a-zA-Z])|\| ?[a-y] ?\|", first)
    if LABEL.match(first) and not product and not inverted and "\\pi" not in first:
        return False
    letters = _free_letters(first)
    if "\\pi" in first and "\\pi" in last and not {"x", "y", "z", "n"}.intersection(letters):
        return False  # \pi r^2 = 25\pi names an area
    if len(set(letters)) != 1 or letters[0] in _free_letters(last):
        return False
    # x + 1/x is what is asked for; x^2 + x is a step.
    letter = re.escape(letters[0])
    reciprocal = rf"\\frac ?\{{[^{{}}]*\}} ?\{{ ?{letter}|/ ?{letter}|{letter} ?\^ ?\{{? ?-"
    return len(letters) == 1 or not re.search(reciprocal, first)


_RATIO = re.compile(r"(?:\\frac ?\{ ?([a-z]) ?\} ?\{ ?([a-z]) ?\}|([a-z]) ?/ ?([a-z]))\Z")
_PARTS = re.compile(r"(?:\\frac ?\{ ?(-?\d+) ?\} ?\{ ?(\d+) ?\}|(-?\d+) ?/ ?(\d+))\Z")


_TUPLE = re.compile(r"\(([^()]*,[^()]*)\)\Z")
_TOKEN = re.compile(r"\\[a-zA-Z]+|[a-zA-Z]")


def derived_value(text: str) -> Fraction | None:
    """
    What a list of equations says last, when that follows from those before it: `m = 3, n = 7, m + n = 10` says 10.

    Args:
        text (`str`): A normalised answer.

    Returns:
        `Fraction` or `None`: `None` unless all but the last give a number to a letter (or to both of a ratio in lowest
            terms), and the last is right arithmetic with two of those letters or more.
    """
    chains = [[member.strip() for member in split_top_level(part, EQUALS)] for part in split_top_level(text, LIST)]
    if len(chains) < 2 or any(len(chain) != 2 for chain in chains):
        return None
    known: dict[str, Fraction] = {}
    for name, value in chains[:-1]:
        number, ratio, parts = value_of(value), _RATIO.match(name), _PARTS.match(value)
        if re.fullmatch("[a-zA-Z]", name) and number is not None:
            known[name] = number
        elif (names := _TUPLE.match(name)) and (values := _TUPLE.match(value)):
            letters = [letter.strip() for letter in names.group(1).split(",")]
            numbers = [value_of(part) for part in values.group(1).split(",")]
            if (
                None in numbers
                or len(numbers) != len(letters)
                or not all(map(re.compile("[a-zA-Z]\\Z").match, letters))
            ):
                return None
            known.update(zip(letters, numbers))
        elif ratio and parts:
            letters, (top, bottom) = filter(None, ratio.groups()), (int(part) for part in filter(None, parts.groups()))
            if math.gcd(top, bottom) != 1:
                return None
            known.update(zip(letters, (Fraction(top), Fraction(bottom))))
        else:
            return None
    expression, said = chains[-1][0], value_of(chains[-1][1])
    letters = {token for token in _TOKEN.findall(expression) if len(token) == 1}
    if said is None or len(letters) < 2 or not letters <= known.keys():
        return None
    put_in = _TOKEN.sub(lambda m: f"({spell(known[m.group()])})" if m.group() in known else m.group(), expression)
    return said if arithmetic(put_in) == said else None


_NUMERIC = re.compile(r"(?:[\d+\-*/^!(){}., ]|\\(?:frac|sqrt|pi|cdot|times|div|binom)(?![a-zA-Z]))+\Z")


def value_of(text: str) -> Fraction | None:
    """The exact value of a number, or of arithmetic with numbers."""
    number = exact_number(text)
    return arithmetic(text) if number is None else number


def consistent(chain: list[str], scalars: Callable[[str, str], bool]) -> bool:
    """
    Whether a chain says its last member: no other is a value unlike it (5 + 21 = 25), and the chain is no step towards
    an unknown (2x = 10, x^2 = 25).

    Args:
        chain (list of `str`): Members, from left to right.
        scalars (`Callable[[str, str], bool]`): Compares two expressions.

    Returns:
        `bool`
    """
    if _poses_equation(chain[0], chain[-1]):
        return False
    step = re.fullmatch(r"[+-]?\d*[a-z](?:[+-]\d+)?(?:/\d+)?", squeeze(chain[0]))
    if step and not LABEL.match(chain[0]):
        return False
    values = {value for part in chain if (value := value_of(part)) is not None}
    if len(values) > 1:
        return False
    roots = [part for part in chain if _NUMERIC.match(part) and re.search(r"\d|\\pi", part) and value_of(part) is None]
    return all(scalars(part, chain[-1]) for part in roots if part != chain[-1])
