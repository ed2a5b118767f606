"""Notations that say a value together with something else: a modulus, a parameter, a letter of a choice, a remark."""

import math
import re
from dataclasses import dataclass

from .latex import split_top_level, squeeze
from .numerals import number_in_words
from .units import CHANGING_LEAD, NAMES_OF_VALUES, NOT_UNITS

_TEXT = re.compile(r"\\text ?\{([^{}]*)\}")


def plain_words(text: str) -> str:
    """The text with what stands in `\\text{}` as bare words."""
    return re.sub(r"\s+", " ", _TEXT.sub(r" \1 ", text)).strip()


@dataclass(frozen=True)
class NumberSet:
    """`\\mathbb{Z}`, "all integers". `letter` is R, Z, Q, N or C."""

    letter: str


_SETS = {"real": "R", "integer": "Z", "rational": "Q", "natural": "N", "complex": "C"}
_SET_WORDS = re.compile(
    rf"(?P<all>(?:(?:the|set|of|all|any|every) )*)(?P<kind>{'|'.join(_SETS)})(?P<several>s|(?: numbers?| values?))?"
    r"(?: (?:of )?[a-zA-Z])?",
    re.I,
)


def number_set(text: str) -> NumberSet | None:
    """The set of numbers that a normalised answer names, as a symbol or in words."""
    if match := re.fullmatch(r"\\mathbb ?\{([RZQNC])\}|\(-\\infty, ?\+?\\infty ?\)", text.strip()):
        return NumberSet(match.group(1) or "R")
    match = _SET_WORDS.fullmatch(plain_words(text).strip(" ."))
    if match and (match.group("all") or match.group("several")):  # "real" alone may describe a root
        return NumberSet(_SETS[match.group("kind").lower()])
    return None


@dataclass(frozen=True)
class Clock:
    """A time of day; `half` is `"am"`, `"pm"` or empty."""

    hour: int
    minute: int
    half: str

    def same(self, other: "Clock") -> bool:
        """Whether two times can be the same: where one lacks am or pm, either will do."""
        if self.minute != other.minute:
            return False
        if self.half and other.half:
            return self.half == other.half and self.hour == other.hour
        hours = [clock.hour % 12 + 12 * (clock.half == "pm") if clock.half else clock.hour for clock in (self, other)]
        return hours[0] == hours[1] or self.hour == other.hour


_CLOCK = re.compile(r"(\d{1,2}) ?: ?([0-5]\d)(?: ?(?:([ap])\.? ?m\.?|in the (morning|afternoon|evening)))?\Z", re.I)


def clock(text: str) -> Clock | None:
    """A time of day such as `6:30 pm`, or `None`."""
    match = _CLOCK.match(plain_words(text).strip())
    if not match or int(match.group(1)) > 24:
        return None
    half, part = (group.lower() if group else "" for group in match.group(3, 4))
    half = half or {"": "", "morning": "a"}.get(part, "p")
    return Clock(int(match.group(1)), int(match.group(2)), half + "m" if half else "")


def is_clock_only(parts: tuple[str, ...]) -> bool:
    """Whether `6:30` can be no ratio: a ratio that is an answer is in lowest terms."""
    if len(parts) != 2 or not re.fullmatch(r"\d{1,2}", parts[0]) or not re.fullmatch(r"[0-5]\d", parts[1]):
        return False
    return math.gcd(int(parts[0]), int(parts[1])) > 1 or parts[1].startswith("0")


_MODULUS = re.compile(
    r"\\pmod ?(?:\{(?P<a>[^{}]*)\}|(?P<b>\d))"
    r"|\(? ?(?:\\[bm]?mod(?![a-z])|\\text ?\{ ?\(? ?mod(?:ulo)?\.?(?= |\})(?P<c> ?\d* ?\)? ?)\})"
    r" ?(?:\{(?P<d>[^{}]*)\}|(?P<e>\d+))? ?\)?"
)


def congruence(text: str) -> tuple[list[str], str] | None:
    """
    A residue with its modulus: `x \\equiv 3 \\pmod 7`, `42 \\text{ (mod } 100)`.

    Returns:
        `(list[str], str)` or `None`: The members that are said to be congruent, the last one being the residue, and the
            modulus.
    """
    match = _MODULUS.search(text)
    if not match or text[match.end() :].strip(" .)"):
        return None
    modulus = next((part.strip(" ()") for part in match.groups() if part and part.strip(" ()")), "")
    members = [part.strip() for part in re.split(r"\\equiv(?![a-zA-Z])|=", text[: match.start()])]
    members = members[1:] if members and not members[0] else members
    return (members, modulus) if modulus and members and all(members) else None


@dataclass(frozen=True)
class Family:
    """`2k\\pi, k \\in \\mathbb{Z}`: an expression and the letter that runs through a set."""

    expression: str
    letter: str
    over: str


_LINK = r"(?:where|for|with|and|any|all|some|every|\\forall|\\quad|\(|,|;|\\text ?\{[^{}]*\}| )*"
_PARAMETER = re.compile(
    rf"(?P<expression>.*?[\w}})]) ?(?:[,;(]|\\forall|\\text ?\{{|(?= for| where)){_LINK}"
    r"(?P<letter>[a-zA-Z]) ?(?:\\in(?![a-zA-Z])|\\text ?\{ ?(?:is in|in)[^{}]*\}) ?\\mathbb ?\{(?P<over>[ZN])\}[ )}]*\Z"
)
_PARAMETER_WORDS = re.compile(
    r"(?P<expression>.*?[\w})]) ?[,;(]? ?(?:where |for |with )?(?:"
    r"(?:any |all |some |every |an |each )*(?P<kind>integer|natural)s?(?: numbers?| values?)?(?: of)? "
    r"(?P<letter>[a-zA-Z])(?![a-zA-Z])"
    r"|(?:any |all )?(?<![a-zA-Z])(?P<letter2>[a-zA-Z]) "
    r"(?:is |being |are )?(?:an? |any )?(?P<kind2>integer|natural)s?(?: numbers?)?"
    r")[ ).]*\Z",
    re.I,
)


def family(text: str) -> Family | None:
    """An expression with a parameter, when that parameter is said to run through the integers or naturals."""
    if len(text) > 300 or not re.search(r"\\mathbb|integer|natural", text):
        return None
    if match := _PARAMETER.match(text):
        expression, letter, over = match.group("expression", "letter", "over")
    elif (match := _PARAMETER_WORDS.match(plain_words(text))) and "\\text" in text + "\\text" * ("for" in text):
        expression = match.group("expression")
        letter = match.group("letter") or match.group("letter2")
        over = {"i": "Z", "n": "N"}[(match.group("kind") or match.group("kind2"))[0].lower()]
    else:
        return None
    return Family(expression.strip(" ,;("), letter, over) if letter in single_letters(expression) else None


def single_letters(text: str) -> set[str]:
    """Letters that stand for variables: not in commands, not in text; e and i are numbers."""
    bare = re.sub(r"\\[a-zA-Z]+", " ", _TEXT.sub(" ", text))
    return {letter for letter in re.findall(r"[A-Za-z]", bare) if letter not in "ei"}


def rename(text: str, old: str, new: str) -> str:
    """
    The expression with one letter replaced.

    Args:
        text (`str`): An expression.
        old, new (`str`): Letters.
    """
    return re.sub(r"\\[a-zA-Z]+|[A-Za-z]", lambda m: new if m.group() == old else m.group(), text)


_CHOICE = re.compile(r"(?:\( ?([A-J]) ?\)|([A-J]) ?[).:]) ?(?=[\w\\$({-])(.*)\Z", re.DOTALL)
# Another choice beside the first: "(A) or (B)", "B and C".
OTHER_CHOICE = re.compile(r"\A(?:or|and|OR|AND|&|,)(?![a-zA-Z])|\( ?[A-Ja-j] ?\)|\A[A-J](?: (?:or|and) [A-J])*\Z")


def choice(text: str) -> tuple[str, str] | None:
    """The letter of a choice and what it says: `\\text{(B) } 42`, `\\text{B. an ellipse}`."""
    lead = re.match(r"\\text ?\{ ?(\(? ?[A-J] ?[).:]{1,2}) ?\}? ?", text)
    if lead:
        rest = text[lead.end() :]
        rest = rest if lead.group().rstrip().endswith("}") else f"\\text{{{rest}"
        match = _CHOICE.match(f"{lead.group(1)} {rest}")
    else:
        match = _CHOICE.match(text)
    if not match:
        return None
    letter, rest = match.group(1) or match.group(2), match.group(3).strip()
    return None if not rest or OTHER_CHOICE.search(plain_words(rest)) else (letter, rest)


_REMARK = re.compile(
    r"(?P<value>.*[^\s,;]) ?[,;]? ?\(? ?\\text ?\{ ?[(,]? ?(?:(?:this |which |it )?(?:is|as|being) )?(?:the |our |my )?"
    r"(?:final |only |unique |correct |required |desired |possible )*(?:answer|solution|value|one)s? ?[).]? ?\} ?\)?\Z",
    re.I | re.DOTALL,
)


def without_remark(text: str) -> str | None:
    """The answer before a remark that only says that it is the answer; `None` when there is none."""
    match = _REMARK.match(text)
    # "12 solutions" counts something; "12 is the solution" and "12 (only solution)" do not.
    if not match or not re.search(r"\b(?:the|is|as|only|unique|final|correct)\b|\(", text[match.end("value") :], re.I):
        return None
    return match.group("value")


_LEAD = re.compile(r"\\text ?\{([^{}]*)\} ?[=:]* ?(?=.*\d|[A-Z]{2,4}\Z)", re.DOTALL)
LEAD_NOUNS = ("halves", "thirds", "quarters", "tens", "squared", "cubed", "factorial", "twice", "thrice")


def described(text: str) -> str | None:
    """The value after words that describe it ("Area of the square: "); `None` when the words change it."""
    lead = _LEAD.match(text)
    if not lead:
        return None
    changing = CHANGING_LEAD.search(lead.group(1)) and lead.group().rstrip()[-1:] not in ("=", ":")
    words = re.findall("[a-z]+", lead.group(1).lower())
    if changing or NOT_UNITS.intersection(words) - {"is", "are", "such", "that", *LEAD_NOUNS}:
        return None
    if words and (
        number_in_words(words[-1]) is not None or words[-1] == "of" and not NAMES_OF_VALUES & {*words[-2:-1]}
    ):
        return None
    rest = text[lead.end() :].strip()
    return rest if re.search(r"\d", rest) or {"segment", "side"}.intersection(words) else None


def word_of_letters(text: str) -> str | None:
    """
    The text when it is letters alone and no product of variables: those are written in alphabetical order, each once.
    """
    letters = squeeze(text)
    if not re.fullmatch(r"[A-Za-z]{3,}", letters):
        return None
    product = letters.islower() and all(a < b for a, b in zip(letters, letters[1:]))
    return None if product else letters


def named_point(text: str) -> str:
    """`A(3,4)` says (3,4)."""
    match = re.match(r"[A-Z]'* ?(\(.*\))\Z", text, re.DOTALL)
    if match and len(split_top_level(match.group(1)[1:-1], re.compile(","))) > 1:
        return match.group(1)
    return text
