"""Text that is shown: without secrets, with visible marks, differences between texts, Markdown tables."""

import difflib
import html
import itertools
import json
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from tqdm import tqdm


def say(text: str) -> None:
    """Print a line for people, above a progress bar if there is one; if nobody can read it, do nothing."""
    with suppress(OSError):
        tqdm.write(text, sys.stderr)
        sys.stderr.flush()


# ---------------------------------------------------------------- secrets

_SECRET = re.compile(r"(token|key|secret|password|passwd|credentials?|authorization)$", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether a setting of this name holds a key, a token or a password."""
    return bool(_SECRET.search(name))


def masked(value):
    """A setting without what must reach no log: values of secret names, and what is secret in addresses."""
    if isinstance(value, dict):
        return {k: "<hidden>" if is_secret(str(k)) and isinstance(v, str) else masked(v) for k, v in value.items()}
    if isinstance(value, list):
        return [masked(item) for item in value]
    if not isinstance(value, str):
        return value
    value = re.sub(r"(?<=://)[^/@\s]+@", "<hidden>@", value)
    return re.sub(r"([?&][^=&#\s]*=)([^&#\s]+)", lambda m: m[1] + "<hidden>" if is_secret(m[1][:-1]) else m[0], value)


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """Arguments of a command line without what must reach no log."""

    def shown(name: str, text: str) -> str:
        if text and is_secret(name):
            return "<hidden>"
        try:
            value = json.loads(text)
        except ValueError:
            return masked(text)
        return json.dumps(masked(value)) if isinstance(value, dict) else text

    found, name = [], ""
    for argument in arguments:
        if not argument.startswith("--"):
            found.append(shown(name, argument))
            continue
        name, equals, text = argument.partition("=")
        found.append(name + equals + shown(name, text))
    return found


class Redactor:
    """Takes keys out of texts that somebody else wrote, such as an error message that repeats them."""

    # Endpoints shorten a key in their messages ("sk-abc***xyz"): the part that is left goes too.
    _LIKE_A_KEY = re.compile(r"\bsk-[\w*.\-]{6,}|\bBearer\s+\S+")

    def __init__(self, *secrets: str):
        # A placeholder such as "none" protects nothing, and replacing it would damage texts.
        forms = {form for s in secrets if len(s) >= 8 for form in (s, quote(s, safe=""), s.replace("/", "\\/"))}
        self._secrets = sorted(forms, key=len, reverse=True)

    def content(self, text: str) -> str:
        """A model's text without the keys; anything else is left as it is."""
        for secret in self._secrets:
            text = text.replace(secret, "[key]")
        return text

    def message(self, text: str) -> str:
        """An error message in one line, without the keys or what looks like one, at most 300 characters."""
        return self._LIKE_A_KEY.sub("[key]", self.content(" ".join(text.split())))[:300]


# ---------------------------------------------------------------- pages and tables


_LOOK = Path(__file__).parent / "templates"


def filled(template: Path, **values) -> str:
    """A page made of a template, its values safe from HTML; it may include `look.css` and `theme.html`."""
    loader = jinja2.FileSystemLoader([template.parent, _LOOK])
    pages = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True)
    return pages.get_template(template.name).render(values)


def markdown_table(
    header: Sequence[str], rows: Iterable[Sequence[object]], right: bool = False, padded: bool = False
) -> str:
    """A Markdown table, safe from `|` and HTML; `right`: all but the first column; `padded`: for a terminal."""

    def safe(cell: object) -> str:
        # What stands in angle brackets would be taken for HTML and not be shown.
        return " ".join(html.escape(str(cell), quote=False).replace("|", "\\|").split())

    cells = [[safe(cell) for cell in row] for row in (header, *rows)]
    cells.insert(1, ["---", *(["--:" if right else "---"] * (len(header) - 1))])
    if padded:
        widths = [max(map(len, column)) for column in zip(*cells)]
        cells = [[row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))] for row in cells]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


# ---------------------------------------------------------------- differences


# One CJK character is one word here: a whole sentence has no space in it.
CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"\s+|[{CJK}]|(?:(?![{CJK}])\w)+|[^\w\s]")


def word_changes(original: str, other: str, ignore_moves: bool = False) -> list[tuple[str, bool]]:
    """Pieces of `other`, and whether each differs; `ignore_moves`: not for its place, or the case of letters."""
    pieces = _WORD.findall(other)
    words = [(i, w) for i, w in enumerate(pieces) if not w.isspace()]
    # Very long prompts would make the quadratic comparison the slowest part of a training step that logs a heat map.
    before = [w for w in _WORD.findall(original) if not w.isspace()]
    matcher = difflib.SequenceMatcher(None, before, [w for _, w in words], autojunk=len(words) > 4000)
    changed = [not w.isspace() for w in pieces]
    left_over = Counter(w.casefold() for w in before)
    for _, start, length in matcher.get_matching_blocks():
        for index, word in words[start : start + length]:
            changed[index] = False
            left_over[word.casefold()] -= 1
    for index, word in words if ignore_moves else ():
        if changed[index] and left_over[word.casefold()] > 0:
            changed[index] = False
            left_over[word.casefold()] -= 1
    # A space between two changed words belongs to the change, so that a changed phrase is one mark and not many.
    for i in range(1, len(pieces) - 1):
        if pieces[i].isspace() and "\n" not in pieces[i] and changed[i - 1] and changed[i + 1]:
            changed[i] = True
    return list(zip(pieces, changed, strict=True))


def compared(bases: Sequence[str], other: str) -> tuple[int, list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Which text another is worded after, and what differs in the one and in the other."""
    changes = [word_changes(base, other) for base in bases]
    nearer = min(range(len(bases)), key=lambda n: sum(len(piece) for piece, changed in changes[n] if changed))
    return nearer, changes[nearer], word_changes(other, bases[nearer])


def marked_triplet(
    original: str, paraphrases: Sequence[str], counterfactual: str | None = None
) -> tuple[int, list[list[tuple[str, str]]]]:
    """The texts one after another in pieces, each with its mark: `reworded`, `changed` or none. What the counterfactual
    no longer says is marked in the text that it is worded after, whose place comes first."""
    # A paraphrase moves numbers about; marked, they would look as if they were new.
    texts = [marked(original, original), *(marked(original, text, ignore_moves=True) for text in paraphrases)]
    if counterfactual is None:
        return 0, texts
    nearer, here, gone = compared([original, *paraphrases], counterfactual)
    texts[nearer] = [(text, "changed" if out else mark) for (text, mark), (_, out) in zip(texts[nearer], gone)]
    return nearer, [*texts, [(text, new and "changed" or "") for text, new in here]]


def marked(original: str, other: str, ignore_moves: bool = False) -> list[tuple[str, str]]:
    """Pieces of a text, those that differ from another one marked as `reworded`."""
    return [(text, "reworded" if new else "") for text, new in word_changes(original, other, ignore_moves)]


def joined(pieces: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """A text in as few pieces as its changes allow."""
    groups = itertools.groupby(pieces, key=lambda piece: piece[1])
    return [("".join(text for text, _ in group), changed) for changed, group in groups]


def shorten(pieces: list[tuple[str, bool]], around: int = 30, limit: int = 240) -> list[tuple[str, bool]]:
    """Leave out what is more than `around` pieces from any change in a text of more than `limit` pieces."""
    if len(pieces) <= limit:
        return pieces
    changes = [i for i, (_, changed) in enumerate(pieces) if changed]
    near = set(range(around)).union(*(range(i - around, i + around + 1) for i in changes))
    shortened, skipped = [], False
    for i, piece in enumerate(pieces):
        if i in near:
            shortened.append(piece)
        elif not skipped:
            shortened.append((" […] ", False))
        skipped = i not in near
    return shortened if len(shortened) <= 2 * limit else [*shortened[: 2 * limit], (" […]", False)]


def token_pieces(tokenizer, token_ids: Sequence[int]) -> list[str]:
    """Decode a response token by token, so that the pieces joined are the response; a character spread over several
    tokens goes to the first, and the piece of the others may be empty."""

    def decode(ids):
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    ids = [int(i) for i in token_ids]
    pieces = [""] * len(ids)
    # ids[context:] is decoded, of which the first `done` characters are given out already. `begun` is the token that
    # began a character which is not complete yet.
    context, boundary, done, begun = 0, 0, 0, None
    for i in range(len(ids)):
        text = decode(ids[context : i + 1])
        # A replacement character at the very end may be half a character; UTF-8 has at most four bytes.
        waiting = text.endswith("\ufffd") and i + 1 < len(ids) and (begun is None or i - begun < 3)
        stable = text.rstrip("\ufffd") if waiting else text
        new = stable[done:]
        if begun is not None and new and begun != i:
            pieces[begun] += new[0]
            new = new[1:]
            begun = None
        pieces[i] += new
        done = max(done, len(stable))
        if waiting:
            begun = i if begun is None else begun
            continue
        begun = None
        # Start the next window one group earlier, at a character boundary: a first token may lose its leading space.
        context, boundary = boundary, i + 1
        done = len(decode(ids[context:boundary]))
    return pieces


_VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}
CONTINUED = "⋯"


def visible_token(piece: str) -> str:
    """A token's text with marks in place of what cannot be seen: ␣ ⏎ ⇥, ⋯ for the rest of a character, ‹200B› ."""
    if not piece:
        return CONTINUED
    text = "".join(_VISIBLE.get(c) or _printable(c) for c in piece)
    return "◌" + text if unicodedata.combining(text[0]) else text


def visible_text(text: str) -> str:
    """A prompt's text with unprintable characters replaced; spaces and line breaks stay."""
    return "".join(c if c in " \n" else " " if c in "\t\r" else _printable(c) for c in text)


def _printable(char: str) -> str:
    # Control characters would act on a terminal, direction marks would turn the line round, and half a surrogate cannot
    # be written to a file.
    category = unicodedata.category(char)
    if category[0] == "C" or category in ("Zl", "Zp"):
        return f"‹{ord(char):02X}›"
    return "␣" if category == "Zs" else char
