r"""LaTeX that lost its backslashes to JSON, or has too many: `\times` written with one comes out as a tab and `imes`.

A text is compared with the problem that it was made of and with the rest of the reply. Where these know the command,
there is one reading and the text is mended; where there is doubt, it is named and the candidate is not accepted.
"""

import re
from collections.abc import Iterable

ESCAPES = {"\n": "n", "\t": "t", "\b": "b", "\f": "f", "\r": "r"}
# What an escape may have been the first letter of, where nothing else tells.
COMMANDS = frozenset(
    "nabla natural ncong ne nearrow neg neq newline nexists ngeq ngeqq ngeqslant ngtr ni nleftarrow nLeftarrow nleq "
    "nleftrightarrow nLeftrightarrow nleqq nleqslant nless nmid nobreakspace nolimits nonumber normalsize not notag "
    "notin nparallel nprec npreceq nrightarrow nRightarrow nshortmid nsim nsubset nsubseteq nsubseteqq nsucc nsucceq "
    "nsupset nsupseteq nsupseteqq ntriangleleft ntrianglelefteq ntriangleright ntrianglerighteq nu nvdash nvDash "
    "nVdash nVDash nwarrow "
    "tabcolsep tag tan tanh tau tbinom text textbf textbullet textcircled textdegree textdollar textit textmd "
    "textnormal textrm textsc textsf textsl textstyle texttt textup tfrac therefore theta thickapprox thicksim "
    "thickspace thinspace tilde times tiny to top triangle triangledown triangleleft trianglelefteq triangleq "
    "triangleright trianglerighteq tt twoheadleftarrow twoheadrightarrow".split()
)
# After a line break the rest of these may be a word, a name or the number of an item.
WORDS = frozenset("ne ni not nu neg nmid nless nprec nsim natural nexists nparallel newline nsubset nsupset".split())
# After a tab outside a formula these begin a word or a cell.
CELLS = frozenset("tt to tan top tag tiny text".split())
_EATEN = re.compile("([\n\t\b\f\r])([A-Za-z]+)")
_COMMAND = re.compile(r"(?<!\\)\\([A-Za-z]+|[(){}%$])")
_DOUBLED = re.compile(r"(?<!\\)\\\\([A-Za-z]+|[(){}%$])")
_LITERAL = re.compile(r"(?<!\\)\\(n[A-Za-z]*|t(?![A-Za-z]))")
_DELIMITER = re.compile(r"(?<!\\)(?:\$|\\[()\[\]])")


def commands(texts: Iterable[str]) -> set[str]:
    """The LaTeX commands in some texts, without their backslash."""
    return {command for text in texts for command in _COMMAND.findall(text)}


def mend(text: str, original: str, known: set[str]) -> tuple[str, list[str], list[str]]:
    """A text with its commands mended, what was mended in it, and what may be broken; `known` are the commands of the
    original and of the reply. What the original has in the same form is no mistake."""
    mended: list[str] = []
    broken: list[str] = []
    own = commands([original])

    def eaten(match: re.Match) -> str:
        escape, rest = match.groups()
        command = ESCAPES[escape] + rest
        if re.search(match[0] + r"(?![A-Za-z])", original):
            return match[0]
        doubtful = escape == "\n" and command in WORDS
        in_math = _in_math(match.string[: match.start()])
        if escape == "\t" and command in CELLS and not in_math:
            return match[0]
        if command in known and (in_math or not doubtful):
            mended.append(command)
            return f"\\{command}"
        # `$$` and a row's end are followed by a line break of their own.
        if doubtful and command not in known and (not in_math or match.string[: match.start()].endswith(("$$", "\\"))):
            return match[0]
        if command in known or command in COMMANDS or (escape == "\t" and in_math):
            broken.append(command)
        return match[0]

    def doubled(match: re.Match) -> str:
        command = match[1]
        if match[0] in original:
            return match[0]
        # Two backslashes may end a row: then a bracket after them is one, and of a command nobody can tell.
        rows = "&" in text or r"\begin" in text
        if rows and not command[0].isalpha():
            return match[0]
        if command in known and not rows:
            mended.append(command)
            return f"\\{command}"
        if command in known:
            broken.append(command)
            return match[0]
        follows = match.string[match.end() : match.end() + 1]
        if follows == "{" or (not rows and len(command) > 1 and command[0].islower()):
            broken.append(command)
        return match[0]

    def literal(match: re.Match) -> str:
        command = match[1]
        if command in own or command in COMMANDS:
            return match[0]
        if command[0] == "n" and not command[1:2].islower():
            mended.append("n")
            return "\n" + command[1:]
        broken.append(command)
        return match[0]

    for pattern, replace in ((_EATEN, eaten), (_DOUBLED, doubled), (_LITERAL, literal)):
        text = pattern.sub(replace, text)
    return text, mended, broken


def mend_problem(text: str) -> str:
    """A problem with the commands back that only the tab or line break in their place can have been."""

    def back(match: re.Match) -> str:
        command = ESCAPES[match[1]] + match[2]
        before = match.string[: match.start()]
        # A backslash before it ended a row: with one more, that would be lost.
        doubtful = (command in CELLS and not _in_math(before)) or before.endswith("\\")
        return f"\\{command}" if command in COMMANDS - WORDS and not doubtful else match[0]

    return _EATEN.sub(back, text)


def _in_math(before: str) -> bool:
    r"""Whether a formula is open after a text; one that marks none but has commands is all formula."""
    marks = _DELIMITER.findall(before)
    dollars = sum(mark == "$" for mark in marks)
    brackets = [mark for mark in marks if mark != "$"]
    return bool(dollars % 2 or (brackets and brackets[-1] in (r"\(", r"\["))) or (not marks and "\\" in before)
