"""Numbers as answers spell them, read exactly."""

import re
from fractions import Fraction

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_IN_WORDS = {word: value for value, word in enumerate(_ONES)}
for _value, _tens in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), start=2):
    _IN_WORDS[_tens] = 10 * _value
    _IN_WORDS |= {f"{_tens} {_ONES[one]}": 10 * _value + one for one in range(1, 10)}


def number_in_words(text: str) -> int | None:
    """The whole number below a hundred that words spell ("minus forty-two"), or `None`."""
    words = re.sub("[- ]+", " ", text.lower()).strip()
    bare = re.sub("^(?:negative|minus) ", "", words)
    value = _IN_WORDS.get(bare)
    return value if value is None or bare == words else -value


def spell(number: Fraction) -> str:
    """A rational number in the spelling of normalised answers."""
    sign, top, bottom = "-" if number < 0 else "", abs(number.numerator), number.denominator
    return f"{sign}{top}" if bottom == 1 else f"{sign}\\frac{{{top}}}{{{bottom}}}"


PLAIN = re.compile(r"([+-]?)(\d+)\Z")
GROUPED = re.compile(r"([+-]?)(\d{1,3}(?:, ?\d{3})+|\d{1,3}(?: \d{3})+)(\.\d+)?\Z")
DECIMAL = re.compile(r"([+-]?)(\d*)\.(\d+)\Z")
REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)\\overline ?\{(\d+)\}\Z")
WRITTEN_OUT = re.compile(r"([+-]?)(\d*)\.(\d*?)(?:(\d)\4{2,}|(\d{2,9}?)\5+) ?\\ldots\Z")
FRACTION = re.compile(r"([+-]?)\\frac\{([^{}]*)\}\{([^{}]*)\}\Z")
SLASH = re.compile(r"([+-]?[\d.,]+) ?/ ?(\d+)\Z")
MIXED = re.compile(r"([+-]?)(\d+) ?(?:\\frac\{(\d+)\}\{(\d+)\}|(?<= )(\d+) ?/ ?(\d+))\Z")
SCIENTIFIC = re.compile(r"(?:([+-]?[\d.,]+) ?(?:\\times|\\cdot|\*|x) ?)?10 ?\^ ?(?:\{ ?([+-]?\d{1,3}) ?\}|(\d))\Z")
E_NOTATION = re.compile(r"([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})\Z")
MAX_DIGITS = 2000


def exact_number(text: str) -> Fraction | None:
    """The rational number that a normalised text spells, or `None`.

    Reads integers (also grouped by commas or spaces), decimals, repeating decimals, fractions, mixed numbers and powers
    of ten. Nothing is rounded: 0.333 is not a third."""
    text = text.strip()
    if len(text) > MAX_DIGITS:
        return None
    if text.startswith("- ") or text.startswith("+ "):
        text = text[0] + text[2:]
    while len(text) > 2 and text[0] == "(" and text[-1] == ")" and "(" not in text[1:] and "," not in text:
        text = text[1:-1].strip()
    if PLAIN.match(text):
        return Fraction(int(text))
    if match := GROUPED.match(text):
        return Fraction(re.sub("[, ]", "", match.group()))
    if DECIMAL.match(text):
        return Fraction(text)
    if match := E_NOTATION.match(text):
        return Fraction(match.group(1)) * Fraction(10) ** int(match.group(2))
    if match := REPEATING.match(text) or WRITTEN_OUT.match(text):
        sign, whole, fixed, *cycles = match.groups()
        cycle = next(filter(None, cycles))
        value = Fraction(int((whole or "0") + fixed)) + Fraction(int(cycle), 10 ** len(cycle) - 1)
        return (-1 if sign == "-" else 1) * value / 10 ** len(fixed)
    if match := MIXED.match(text):
        sign, whole = match.group(1), int(match.group(2))
        top, bottom = (int(part) for part in match.groups()[2:] if part is not None)
        if 0 < top < bottom:
            return (-1 if sign == "-" else 1) * (whole + Fraction(top, bottom))
        return None
    if match := FRACTION.match(text) or SLASH.match(text):
        sign, top, bottom = match.groups() if match.re is FRACTION else ("", *match.groups())
        top, bottom = exact_number(top), exact_number(bottom)
        if top is None or not bottom:
            return None
        return (-1 if sign == "-" else 1) * top / bottom
    if match := SCIENTIFIC.match(text):
        factor = exact_number(match.group(1)) if match.group(1) else Fraction(1)
        return None if factor is None else factor * Fraction(10) ** int(match.group(2) or match.group(3))
    return None
