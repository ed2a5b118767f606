"""Numbers in words, and arithmetic that needs no algebra."""

import ast
import operator
import re
from fractions import Fraction

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_SMALL = {word: value for value, word in enumerate(_ONES)}
_SMALL |= {w: 10 * v for v, w in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), start=2)}
_LARGE = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_ORDINALS = "third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
_PARTS = {"half": 2, "halves": 2, "quarter": 4} | {word: value for value, word in enumerate(_ORDINALS, start=3)}
_PARTS |= {"sixteenth": 16, "twentieth": 20, "hundredth": 100, "thousandth": 1000}


def number_in_words(text: str) -> Fraction | None:
    """
    The number that words spell ("one hundred and five", "minus two thirds").

    Returns:
        `Fraction` or `None`: `None` unless every word belongs to one number.
    """
    words = text.lower().replace("-", " ").split()
    if not words or len(words) > 20 or not words[-1].isalpha():
        return None
    sign = 1
    if words[0] in ("negative", "minus") and len(words) > 1:
        sign, words = -1, words[1:]
    part = _PARTS.get(words[-1]) or _PARTS.get(words[-1].removesuffix("s"))
    if part is not None:
        top = 1 if len(words) == 1 or words[:-1] == ["a"] else _whole(words[:-1])
        # "half" is a number, "third" a place in an order; "twenty thirds" would be unclear.
        if top is None or top == 0 or len(words) == 1 and part > 2 or words[-1].endswith("s") != (top != 1):
            return None
        return sign * Fraction(top, part)
    whole = _whole(words)
    return None if whole is None else Fraction(sign * whole)


def _whole(words: list[str]) -> int | None:
    total, group, last = 0, 0, None
    ceiling = 10**15  # scales must fall: a million, then thousands
    for position, word in enumerate(words):
        if word == "and":
            # British English, between hundreds and what follows: never two numbers joined.
            if last not in ("hundred", "scale") or position + 1 == len(words):
                return None
            last = "and"
        elif word in _SMALL:
            value = _SMALL[word]
            tens = last == "tens" and 0 < value < 10
            if last in ("ones", "tens") and not tens:
                return None
            group += value
            last = "tens" if value >= 20 else "ones"
        elif word == "hundred":
            if not 0 < group < 100 or last not in ("ones", "tens"):
                return None
            group, last = group * 100, "hundred"
        elif word in _LARGE:
            scale = _LARGE[word]
            if group == 0 or scale >= ceiling or last == "and":
                return None
            total, group, ceiling, last = total + group * scale, 0, scale, "scale"
        else:
            return None
    return total + group


_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_ALLOWED = re.compile(r"[\d+\-*/^(). ]+\Z")
_MAX_LENGTH, _MAX_POWER = 200, 1000
_MAX_BITS = 10_000


def arithmetic(text: str) -> Fraction | None:
    """
    The exact value of whole numbers and decimals joined by `+ - \\cdot \\times / \\frac{}{} ^` and parentheses.

    Args:
        text (`str`): A normalised answer.

    Returns:
        `Fraction` or `None`: `None` for anything else, for values too large to be looked at, and for a division by 0.
    """
    if len(text) > _MAX_LENGTH or not re.search(r"\d", text):
        return None
    if re.search(r"\d ?\\frac|\d \d|/ ?\d+ ?\(", text):
        return None  # a mixed number, a list, a quotient that is read in two ways
    before = None
    while before != text:
        before = text
        text = re.sub(r"\\frac ?\{([^{}]*)\} ?\{([^{}]*)\}", r"((\1)/(\2))", text)
    text = re.sub(r"\\(?:cdot|times|div|\*) ?", lambda m: "/" if "div" in m.group() else "*", text)
    text = text.replace("{", "(").replace("}", ")")
    if not _ALLOWED.match(text) or "//" in text or "**" in text:
        return None
    text = re.sub(r"\) ?(?=[(\d])|(?<=\d) ?(?=\()", lambda m: m.group().rstrip() + "*", text)
    # Decimals as fractions (floats round), no leading zeros (no Python).
    text = re.sub(r"(\d*)\.(\d+)|0*(\d+)", _decimal, text).replace("^", "**")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _decimal(match: re.Match) -> str:
    whole, rest, plain = match.groups()
    return plain if plain else f"({int(whole + rest)}/1{'0' * len(rest)})"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            if right.denominator != 1 or abs(right) > _MAX_POWER:
                raise ValueError("power")
            size = max(left.numerator.bit_length(), left.denominator.bit_length())
            if size * abs(right) > _MAX_BITS:
                raise ValueError("size")
            return left ** int(right)
        return Fraction(_OPERATIONS[type(node.op)](left, right))
    raise ValueError("no arithmetic")


def spell(number: Fraction) -> str:
    """A rational number in the spelling of normalised answers."""
    sign, top, bottom = "-" if number < 0 else "", abs(number.numerator), number.denominator
    return f"{sign}{top}" if bottom == 1 else f"{sign}\\frac{{{top}}}{{{bottom}}}"
