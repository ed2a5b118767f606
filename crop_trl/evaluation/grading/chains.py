"""Chains of equations: which of them end in the answer, and which only lead to an unknown."""

import re
from collections.abc import Callable

from .latex import split_top_level, squeeze
from .numerals import exact_number
from .readings import LABEL, LIST


def turned(chain: list[str]) -> list[str]:
    """The chain with its name in front: 5 = x."""
    named = len(chain) > 1 and re.fullmatch("[A-Za-z]", chain[-1]) and exact_number(chain[0]) is not None
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


_NUMERIC = re.compile(r"(?:[\d+\-*/^!(){}., ]|\\(?:frac|sqrt|pi|cdot|times|div|binom)(?![a-zA-Z]))+\Z")


def consistent(chain: list[str], scalars: Callable[[str, str], bool]) -> bool:
    """Whether a chain says its last member: nothing unlike it, and no step towards an unknown (2x = 10)."""
    if _poses_equation(chain[0], chain[-1]):
        return False
    step = re.fullmatch(r"[+-]?\d*[a-z](?:[+-]\d+)?(?:/\d+)?", squeeze(chain[0]))
    if step and not LABEL.match(chain[0]):
        return False
    values = {value for part in chain if (value := exact_number(part)) is not None}
    if len(values) > 1:
        return False
    roots = [
        part for part in chain if _NUMERIC.match(part) and re.search(r"\d|\\pi", part) and exact_number(part) is None
    ]
    return all(scalars(part, chain[-1]) for part in roots if part != chain[-1])
