"""What kind of token a method keeps, by the categories of the paper's appendix. Words, numbers, LaTeX commands and
phrases are found in the whole response; a token that holds a part of one has its category, however it was cut."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import yaml

from ..text import CJK

CATEGORIES = ("task-specific", "formatting", "boilerplate", "function", "content")
"""In their order of precedence: what a token holds several of, it is the first of."""

_TASK, _FORMATTING, _BOILERPLATE, _FUNCTION, _CONTENT = range(len(CATEGORIES))
# White space and marks within a word say nothing of their own: a token is one of these only when it holds nothing else.
_SILENT = len(CATEGORIES)

# Letters without Chinese characters and without the small and Roman digits that Python counts among them.
_LETTER = rf"[^\W\d_{CJK}²³¹⁰-₟¼-¾⅐-↏]"
_LEXER = re.compile(
    rf"""
      (?P<special> <\|[^|<>\s]*\|> | </?(?:think|tool_call|s|pad|eos|bos|unk)> )
    | (?P<layout> \\(?:begin|end)\s*\{{[A-Za-z]+\*?\}} )
    | \\(?P<command> [A-Za-z]+ )\*?
    | (?P<delimiter> \\. | \\\n )
    | (?P<number> \d+(?:[.,]\d+)* )
    | (?P<dotted> (?<!\w)(?:{_LETTER}\.){{2,}} )
    | (?P<word> {_LETTER}+(?:['’]{_LETTER}+)* )
    | (?P<cjk> [{CJK}]+ )
    """,
    re.VERBOSE,
)
# What surrounds a letter in a formula, or begins and ends one.
_FORMULA = set("+-*/=<>^_|{}()[]\\$&,.;:!'′·×÷−≤≥≠≈±∈∪∩")
_OPERATORS = set("+-*/=<>^%°√·•×÷∶′″!±")


@dataclass(frozen=True)
class WordLists:
    """What the words of a language and of LaTeX mean, as places in [`CATEGORIES`]; read by [`load_word_lists`]."""

    words: dict[str, int]  # in lower case
    layout_commands: frozenset[str]  # LaTeX commands that are formatting; all others are task-specific
    phrases: tuple[tuple[re.Pattern, int], ...]  # of several words
    characters: re.Pattern  # Chinese entries, the longest first
    chinese: dict[str, int]


def _nouns(word: str) -> list[str]:
    plural = word[:-1] + "ies" if word.endswith("y") and word[-2] not in "aeiou" else word + "s"
    return [word, plural, word + "es"]


def _verbs(word: str) -> list[str]:
    stem = word[:-1] if word.endswith("e") else word
    forms = [word, word + "s", word + "es", stem + "ed", stem + "ing"]
    if word.endswith("y"):
        forms += [word[:-1] + "ies", word[:-1] + "ied"]
    return forms


def _phrase_pattern(phrases: Sequence[str]) -> re.Pattern:
    # The longest first, so that "we have to" would win over "we have"; any white space between the words.
    alternatives = [re.escape(p).replace("\\ ", r"\s+") for p in sorted(phrases, key=len, reverse=True)]
    return re.compile(rf"(?<![\w'’])(?:{'|'.join(alternatives)})(?![\w])", re.IGNORECASE)


@lru_cache
def load_word_lists() -> WordLists:
    """What `categories.yaml` says."""
    data = yaml.safe_load(Path(__file__).with_name("categories.yaml").read_text(encoding="utf-8"))
    task, boilerplate, function = (data[key] for key in ("task_specific", "boilerplate", "function_words"))
    words: dict[str, int] = {}
    # From the last in precedence to the first, so that the first stays.
    for text, category, forms in (
        (function["words"], _FUNCTION, lambda w: [w]),
        (boilerplate["words"], _BOILERPLATE, lambda w: [w]),
        (task["operations"], _TASK, _verbs),
        (task["concepts"], _TASK, _nouns),
        (task["symbols"], _TASK, lambda w: [w]),
    ):
        words.update({form: category for word in text.split() for form in forms(word)})
    chinese: dict[str, int] = {}
    for part, category in ((function, _FUNCTION), (boilerplate, _BOILERPLATE), (task, _TASK)):
        chinese.update(dict.fromkeys(part["chinese"].split(), category))
    return WordLists(
        words=words,
        layout_commands=frozenset(data["formatting"]["latex"].split()),
        phrases=(
            (_phrase_pattern(boilerplate["phrases"]), _BOILERPLATE),
            (_phrase_pattern([form for p in task["concept_phrases"] for form in _nouns(p)]), _TASK),
        ),
        characters=re.compile("|".join(map(re.escape, sorted(chinese, key=len, reverse=True)))),
        chinese=chinese,
    )


def categorize(pieces: Sequence[str]) -> np.ndarray:
    """Place in [`CATEGORIES`] of every token, given as [`~crop_trl.text.token_pieces`] cuts them: `int8`."""
    lists = load_word_lists()
    lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
    of_characters = _categorize_characters("".join(pieces), lists)
    categories = np.full(len(pieces), _FORMATTING, dtype=np.int8)
    starts = np.cumsum(lengths) - lengths
    full = np.flatnonzero(lengths)
    if full.size:
        first = np.minimum.reduceat(of_characters, starts[full])
        categories[full] = np.where(first == _SILENT, _FORMATTING, first)
        # A token without text of its own belongs to the character before it.
        before = np.maximum.accumulate(np.where(lengths > 0, np.arange(len(pieces)), -1))
        ends = of_characters[np.maximum(starts[before] + lengths[before] - 1, 0)]
        empty = (lengths == 0) & (before >= 0)
        categories[empty] = np.where(ends[empty] == _SILENT, _FORMATTING, ends[empty])
    return categories


def _categorize_characters(text: str, lists: WordLists) -> np.ndarray:
    """Category of every character, `_SILENT` for what counts only when it stands alone."""
    codes, places = np.unique(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4"), return_inverse=True)
    out = np.array([_of_symbol(chr(code)) for code in codes], dtype=np.int8)[places]
    for match in _LEXER.finditer(text):
        start, end = match.span()
        kind = match.lastgroup
        if kind == "number":
            out[start:end] = _TASK
        elif kind == "command":
            out[start:end] = _FORMATTING if match["command"] in lists.layout_commands else _TASK
        elif kind == "dotted":
            out[start:end] = lists.words.get(match.group().casefold(), _CONTENT)
        elif kind == "word":
            _mark_word(text, start, end, lists, out)
        elif kind == "cjk":
            out[start:end] = _CONTENT
            for entry in lists.characters.finditer(text, start, end):
                out[entry.start() : entry.end()] = lists.chinese[entry.group()]
        else:
            out[start:end] = _FORMATTING
    for pattern, category in lists.phrases:
        for match in pattern.finditer(text):
            span = out[match.start() : match.end()]
            span[(span > category) & (span != _SILENT)] = category
    _mark_ornaments(text, out)
    return out


def _of_symbol(char: str) -> int:
    """Category of a character that belongs to no word, number or command."""
    if char.isspace() or char in "\u200b\ufeff":
        return _SILENT
    if char in _OPERATORS:
        return _TASK
    kind = unicodedata.category(char)
    if kind[0] == "N" or kind == "Sm":
        return _FORMATTING if char == "|" else _TASK
    return _CONTENT if kind[0] == "L" else _FORMATTING


def _mark_word(text: str, start: int, end: int, lists: WordLists, out: np.ndarray) -> None:
    word = text[start:end].casefold().replace("’", "'")
    if len(word) == 1 or "GREEK" in unicodedata.name(text[start], ""):
        out[start:end] = _FUNCTION if _is_prose(text, start) else _TASK
        return
    category = lists.words.get(word)
    if category is None and "'" in word:
        # A possessive or a short form: its first part is looked up, what hangs on is a function word.
        stem = word.split("'")[0]
        out[start + len(stem) : end] = _FUNCTION
        end = start + len(stem)
        category = lists.words.get(stem)
    if category is None:
        category = _TASK if _is_symbolic(text, start, end) else _CONTENT
    out[start:end] = category


def _is_prose(text: str, at: int) -> bool:
    """Whether a lone letter is a word: `a` or `I` beside other words, and not between signs of a formula."""
    if text[at] not in "aAI":
        return False
    before, after = _neighbour(text, at - 1, -1), _neighbour(text, at + 1, 1)
    if before in _OPERATORS - {"*"} or before in "$(|{":
        return False
    if re.compile(rf"\s+{_LETTER}{{2}}|['’]{_LETTER}").match(text, at + 1):
        return True
    # An article before a number: "in a 30-day month".
    return text[at] == "a" and before.isalpha() and after.isdigit() and text[at + 1] == " "


def _is_symbolic(text: str, start: int, end: int) -> bool:
    """Whether letters that are no known word are symbols: points and segments (AB, ABC), or variables side by side."""
    word = text[start:end]
    if len(word) > 4 or not word.isascii():
        return False
    before, after = _neighbour(text, start - 1, -1), _neighbour(text, end, 1)
    in_formula = (before.isdigit() or before in _FORMULA - set(".,;:!'")) and after in _FORMULA
    return word.isupper() or (len(word) <= 3 and in_formula)


def _neighbour(text: str, at: int, step: int) -> str:
    """The nearest character that is no blank, from `at` on; a line break at the ends of the text."""
    while 0 <= at < len(text) and text[at] == " ":
        at += step
    return text[at] if 0 <= at < len(text) else "\n"


def _mark_ornaments(text: str, out: np.ndarray) -> None:
    """Signs that look like operators and are not: Markdown, hyphens, bullets, tags, colons and exclamation marks."""
    for match in re.finditer(r"\*\*+|(?m:^[ \t]*[-*•+](?=\s))|-{3,}|={3,}|!", text):
        out[match.start() : match.end()] = np.where(out[match.start() : match.end()] == _SILENT, _SILENT, _FORMATTING)
    for match in re.finditer(rf"(?<=\w)[-‐‑](?={_LETTER}{{2}})", text):
        out[match.start()] = _SILENT
    # A colon between numbers is a ratio.
    for match in re.finditer(r"(?<=[\w}]) :(?= [\w{\\])|(?<=\d):(?=\d)", text):
        out[match.end() - 1] = _TASK
