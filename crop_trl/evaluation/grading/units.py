"""Units of measurement in answers: taking them off a value, and comparing them."""

import re
from dataclasses import dataclass
from fractions import Fraction

from .numerals import exact_number, spell

# Name -> (dimension, size in the dimension's base unit). Plurals are handled by `_lookup`.
_LENGTH = {"mm": "1/1000", "millimeter": "1/1000", "cm": "1/100", "centimeter": "1/100", "dm": "1/10", "m": "1",
           "meter": "1", "metre": "1", "centimetre": "1/100", "km": "1000", "kilometer": "1000", "kilometre": "1000",
           "in": "0.0254", "inch": "0.0254", "ft": "0.3048", "foot": "0.3048", "feet": "0.3048", "yd": "0.9144",
           "yard": "0.9144", "mi": "1609.344", "mile": "1609.344"}  # fmt: skip
_TIME = {"s": "1", "sec": "1", "second": "1", "min": "60", "minute": "60", "h": "3600", "hr": "3600", "hour": "3600",
         "day": "86400", "week": "604800"}  # fmt: skip
_MASS = {"mg": "1/1000", "g": "1", "gram": "1", "kg": "1000", "kilogram": "1000", "oz": "28.349523125",
         "ounce": "28.349523125", "lb": "453.59237", "pound": "453.59237"}  # fmt: skip
_MONEY = {"dollar": "1", "$": "1", "usd": "1", "cent": "1/100"}
UNITS: dict[str, tuple[str, Fraction]] = {
    name: (dimension, Fraction(size))
    for dimension, table in (("length", _LENGTH), ("time", _TIME), ("mass", _MASS), ("money", _MONEY))
    for name, size in table.items()
}
SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
MAX_UNIT_LENGTH = 120
DEGREE_NAMES = ("degree", "degrees", "deg")
RADIAN_NAMES = ("radian", "radians", "rad", "rads")
# Words after a number that change what is said: such a tail is no unit.
NOT_UNITS = frozenset(
    "or and not no nor than more less least most about approximately approx roughly around to from but except plus "
    "minus over mod modulo if when for where with all any none only that is are true false choose else cannot never "
    "neither without exceeds exceeding "
    "half one case at under below above between wrong incorrect twice thrice halves thirds tens squared cubed "
    "factorial".split()
)
# The same, unless they belong to the noun that follows: 12 positive integers, 12 square feet.
NOT_LAST = frozenset("negative positive double triple root square cube inverse reciprocal such".split())
# Words before a number that change it, some only as the last.
CHANGING_LEAD = re.compile(
    r"\b(?:negative|twice|double|triple|thrice|half|halves|factorial|(?:root|square|cube|inverse|reciprocal)"
    r"(?=\s+of\b|\s*\Z))(?:\s+of)?(?:\s+the)?\s*\Z"
    r"|\b(?:near|within|before|after|past|beyond|close|multiple|factor|divisor|power)\s*\Z",
    re.I,
)


# "The value of 12" is 12; "a multiple of 12" is not.
NAMES_OF_VALUES = frozenset(
    "value total answer maximum minimum result sum area length distance volume probability cost speed perimeter "
    "score price height radius".split()
)


@dataclass(frozen=True)
class Unit:
    """A unit: either known dimensions with a size, or just its name."""

    name: str
    dimensions: tuple[tuple[str, int], ...] | None = None
    size: Fraction = Fraction(1)


def _lookup(word: str) -> tuple[str, Fraction] | None:
    for name in (word, word.removesuffix("s"), word.removesuffix("es")):
        if name in UNITS:
            return UNITS[name]
    return None


def parse_unit(text: str) -> Unit | None:
    """Read a unit such as `cm^2`, `square inches` or `apples`; `None` for words that are none ("or more")."""
    if len(text) > MAX_UNIT_LENGTH:
        return None
    text = re.sub(r"\\text ?\{([^{}]*)\}", r" \1 ", text).lower().replace("\\$", "$")
    text = re.sub(r"[{}()]", "", text)
    text = re.sub(r"\b(square|sq\.?)\s+([a-z]+)", r"\2^2", text)
    text = re.sub(r"\b(cubic|cu\.?)\s+([a-z]+)", r"\2^3", text)
    text = re.sub(r"([a-z]+)\s+squared", r"\1^2", text)
    text = re.sub(r"([a-z]+)\s+cubed", r"\1^3", text)
    text = re.sub(r"\bper\b|\ba(?=\s+[a-z])", "/", text)
    text = re.sub(r"\bmph\b", "mile/hour", re.sub(r"\bkm?p?h\b(?<=ph)|\bkmh\b", "km/hour", text))
    text = re.sub(r"\s*([/^])\s*", r"\1", text.replace("\\cdot", " ").replace(".", " ")).strip()
    words = re.findall(r"[a-z$]+", text)
    if not words or "times" in words[:-1] or any(word in NOT_UNITS or word in SCALES for word in words):
        return None
    if words[-1] in NOT_LAST:
        return None
    if not re.fullmatch(r"[a-z$'-]+(\^-?\d)?([ /]+[a-z$'-]+(\^-?\d)?)*", text):
        return None
    dimensions: dict[str, int] = {}
    size = Fraction(1)
    for part, factors in enumerate(text.split("/")):
        for factor in factors.split():
            word, _, power = factor.partition("^")
            known = _lookup(word)
            if known is None:
                singular = re.sub(r"(?<=[a-z]{2})s\b", "", text)
                return Unit(re.sub(r"\s+", " ", singular))
            exponent = int(power or 1) * (-1 if part else 1)
            dimensions[known[0]] = dimensions.get(known[0], 0) + exponent
            size *= known[1] ** exponent
    return Unit(text, tuple(sorted((name, power) for name, power in dimensions.items() if power)), size)


@dataclass(frozen=True)
class Quantity:
    """A value with its unit; `kind`: unit, percent, degree or radian; `sum`: it was given in several units."""

    value: str
    kind: str
    unit: Unit | None = None
    scale: int = 1
    sum: bool = False


_TAIL = re.compile(r"(?P<value>.*?[\w}\])!])\s*(?P<unit>\\text ?\{[^{}]*[a-zA-Z][^{}]*\}.*)\Z", re.DOTALL)
_WORDS = re.compile(
    r"(?P<value>.*?(?:[\d}\])!]|\\pi))(?:\s+(?=[a-zA-Z])|(?=[a-zA-Z]{2,}(?:\s|\Z|\^|/)))"
    r"(?P<unit>[a-zA-Z][a-zA-Z. ]*(?:\^ ?\{?\d\}?)?(?:\s*/\s*[a-zA-Z]+(?:\^ ?\{?\d\}?)?)?)\Z",
    re.DOTALL,
)


_SUMMAND = re.compile(
    r"(?:, ?|and |, ?and |\\text ?\{ ?,? ?and ?\} ?)?(?P<value>\d[\d,.]*|\\frac\{\d+\}\{\d+\}) ?"
    r"(?:\\text ?\{ ?(?P<unit>[a-z]+)\.?(?P<joint>,? ?and)? ?,? ?\}|(?P<plain>[a-z]+)\.?) ?,? ?",
    re.I,
)


def _sum_of_units(text: str) -> Quantity | None:
    """`2 hours 30 minutes`, in the first unit: known units of one kind, each smaller than the one before."""
    total, index, units = Fraction(0), 0, []
    while index < len(text):
        match = _SUMMAND.match(text, index)
        unit = match and parse_unit(match.group("unit") or match.group("plain"))
        number = exact_number(match.group("value").rstrip(",.")) if match else None
        if not unit or unit.dimensions is None or number is None or len(unit.dimensions) != 1:
            return None
        if units and (unit.dimensions != units[0].dimensions or unit.size >= units[-1].size):
            return None
        units.append(unit)
        total += number * unit.size / units[0].size
        index = match.end()
    if len(units) < 2:
        return None
    return Quantity(spell(total), "unit", units[0], sum=True)


def split_quantity(text: str) -> Quantity | None:
    """Take a unit off a normalised answer; `None` when it carries none."""
    if text[:1].isdigit() and (parts := _sum_of_units(text)):
        return parts
    match = re.match(r"(?P<sign>[+-]? ?)(?:\\\$|USD|\\text ?\{ ?(?:USD|\\\$) ?\}) ?(?P<value>.+)\Z", text, re.DOTALL)
    if match:
        rest = match.group("sign").strip() + match.group("value")
        inner = split_quantity(rest)
        if inner and inner.kind == "unit" and (inner.unit is None or inner.unit.dimensions == (("money", 1),)):
            return Quantity(inner.value, "unit", inner.unit or parse_unit("$"), inner.scale)
        return Quantity(rest, "unit", parse_unit("$"))
    if match := re.match(r"(.+?)\s*\\\$\Z", text, re.DOTALL):
        return Quantity(match.group(1), "unit", parse_unit("$"))
    if match := re.match(r"(.+?)\s*(?:%|\\text ?\{\s*%?\s*(?:percent|per cent|pct)?\s*\})\Z", text, re.DOTALL | re.I):
        inner = split_quantity(match.group(1))
        return None if inner and inner.kind == "percent" else Quantity(match.group(1), "percent")
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])", text) and "\\degree" in text:
        return None  # the degrees belong to the argument
    if match := re.match(r"(.+?)\s*\\degree(?: ?(?:\\text ?\{ ?)?[CF](?: ?\})?)?\Z", text, re.DOTALL):
        return Quantity(match.group(1), "degree")
    match = _TAIL.match(text) or _WORDS.match(text)
    if not match:
        return None
    value, tail = match.group("value").strip(), match.group("unit").strip()
    plain = re.sub(r"\\text ?\{([^{}]*)\}", r" \1 ", tail).strip().lower().rstrip(".")
    if "\\text" in value or not value:
        return None
    if plain in ("percent", "per cent", "pct", "percentage"):
        return Quantity(value, "percent")
    if plain in DEGREE_NAMES:
        return Quantity(value, "degree")
    if plain in RADIAN_NAMES:
        return Quantity(value, "radian")
    scale = 1
    words = plain.split()
    while words and words[0] in SCALES:
        scale *= SCALES[words.pop(0)]
    if scale > 1:
        unit = parse_unit(" ".join(words).removeprefix("of ")) if words else None
        return Quantity(value, "unit", unit, scale) if unit or not words else None
    unit = parse_unit(tail)
    if unit is None:
        return None
    # Without \text a single unknown letter is a variable, and so are two or three: only longer words are units.
    if "\\text" not in tail and unit.dimensions is None and not re.search(r"[a-z]{3}", plain):
        return None
    if "\\text" not in tail and len(plain) == 1 and (unit.dimensions is None or exact_number(value) is None):
        return None
    return Quantity(value, "unit", unit, scale)


def same_unit(left: Unit, right: Unit) -> Fraction | None:
    """What the left value must be multiplied by to be in the right unit; `None` when the units do not go together."""
    if left.dimensions is not None and right.dimensions is not None:
        return left.size / right.size if left.dimensions == right.dimensions else None
    return Fraction(1) if left.name == right.name else None
