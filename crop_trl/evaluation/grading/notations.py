"""What may stand round a value or in its place: a lead-in, the letter of a choice, a modulus, a set of numbers."""

import re

from .latex import squeeze
from .numerals import number_in_words
from .units import CHANGING_LEAD, NAMES_OF_VALUES, NOT_UNITS


def plain_words(text: str) -> str:
    """The text with what stands in `\\text{}` as bare words."""
    return re.sub(r"\s+", " ", re.sub(r"\\text ?\{([^{}]*)\}", r" \1 ", text)).strip()


_SETS = {"real": "R", "integer": "Z", "rational": "Q", "natural": "N", "complex": "C"}
_SET_WORDS = re.compile(
    rf"(?P<all>(?:(?:the|set|of|all|any|every) )*)(?P<kind>{'|'.join(_SETS)})(?P<several>s|(?: numbers?| values?))?"
    r"(?: (?:of )?[a-zA-Z])?",
    re.I,
)


def number_set(text: str) -> str | None:
    """R, Z, Q, N or C, where a normalised answer names that set as a symbol, as an interval or in words."""
    if match := re.fullmatch(r"\\mathbb ?\{([RZQNC])\}|\(-\\infty, ?\+?\\infty ?\)", text.strip()):
        return match.group(1) or "R"
    match = _SET_WORDS.fullmatch(plain_words(text).strip(" ."))
    if match and (match.group("all") or match.group("several")):  # "real" alone may describe a root
        return _SETS[match.group("kind").lower()]
    return None


_MODULUS = re.compile(
    r"\(? ?\\(?:p|b)?mod(?![a-z]) ?\{?(?P<a>[^{}()]*)\}? ?\)?[ .]*\Z"
    r"|\(? ?\\text ?\{ ?\(? ?mod(?:ulo)?\.?(?P<b> ?\d*) ?\)? ?\} ?\{?(?P<c>\d*)\}?[ .)]*\Z"
)


def residue(text: str) -> tuple[list[str], str] | None:
    """The members of a congruence and its modulus: `x \\equiv 3 \\pmod 7`, `42 \\text{ (mod } 100)`."""
    match = _MODULUS.search(text)
    modulus = match and next((part.strip() for part in match.groups() if part and part.strip()), None)
    members = [part.strip() for part in re.split(r"\\equiv(?![a-zA-Z])|=", text[: match.start()])] if match else []
    members = members[1:] if members and not members[0] else members
    return (members, modulus) if modulus and members and all(members) else None


def letters_of(text: str) -> set[str]:
    """Letters that stand for variables: not in commands, not in text; e and i are numbers."""
    return set(re.findall(r"[A-Za-df-hj-z]", re.sub(r"\\text ?\{[^{}]*\}|\\[a-zA-Z]+", " ", text)))


_CHOICE = re.compile(r"(?:\( ?([A-J]) ?\)|([A-J]) ?[).:]) ?(?=[\w\\$({-])(.*)\Z", re.DOTALL)
# Another choice beside the first: "(A) or (B)", "B and C".
OTHER_CHOICE = re.compile(r"\A(?:or|and|OR|AND|&|,)(?![a-zA-Z])|\( ?[A-Ja-j] ?\)|\A[A-J](?: (?:or|and) [A-J])*\Z")


def choice(text: str) -> tuple[str, str] | None:
    """The letter of a choice and what it says: `\\text{(B) } 42`, `\\text{B. an ellipse}`."""
    if lead := re.match(r"\\text ?\{ ?(\(? ?[A-J] ?[).:]{1,2}) ?\}? ?", text):
        rest = text[lead.end() :]
        rest = rest if lead.group().rstrip().endswith("}") else f"\\text{{{rest}"
        text = f"{lead.group(1)} {rest}"
    match = _CHOICE.match(text)
    rest = match.group(3).strip() if match else ""
    return None if not rest or OTHER_CHOICE.search(plain_words(rest)) else (match.group(1) or match.group(2), rest)


_LEAD = re.compile(r"\\text ?\{([^{}]*)\} ?[=:]* ?(?=.*\d|[A-Z]{2,4}\Z)", re.DOTALL)
LEAD_NOUNS = ("halves", "thirds", "quarters", "tens", "squared", "cubed", "factorial", "twice", "thrice")


def described(text: str) -> str | None:
    """The value after words that describe it ("The answer is "); `None` when the words change it."""
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
    """Letters alone that are no product of variables: those are written in alphabetical order, each once."""
    letters = squeeze(text)
    if not re.fullmatch(r"[A-Za-z]{3,}", letters):
        return None
    return None if letters.islower() and all(a < b for a, b in zip(letters, letters[1:])) else letters
