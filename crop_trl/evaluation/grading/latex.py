"""Bringing boxed answers to one spelling. Strings only: cheap, and safe anywhere."""

import functools
import re
import unicodedata

from .numerals import number_in_words

UNICODE = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "φ": r"\phi ", "∞": r"\infty ", "√": r"\sqrt ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "±": r"\pm ", "∓": r"\mp ", "≈": r"\approx ", "°": r"\degree ", "º": r"\degree ", "…": r"\ldots ", "⋯": r"\ldots ",
    "ℝ": r"\mathbb{R}", "∖": r"\setminus ", "⟨": r"\langle ", "⟩": r"\rangle ", "′": "'", "’": "'",
    "\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u200b": "", "\ufeff": "", "∠": r"\angle ", "¢": r"\text{ cents}",
    "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]",
    "≡": r"\equiv ", "∨": r"\vee ", "∧": r"\wedge ", "″": "''", "“": '"', "”": '"', "‘": "'", "⩽": r"\le ",
    "⩾": r"\ge ", "→": r"\to ", "⇒": r"\Rightarrow ", "△": r"\triangle ", }  # fmt: skip
GREEK_LETTERS = (
    "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi rho sigma tau chi psi omega Gamma Delta Theta "
    "Lambda Xi Pi Sigma Phi Psi Omega"
).split()
for _name in GREEK_LETTERS:
    _case = "CAPITAL" if _name[0].isupper() else "SMALL"
    UNICODE[unicodedata.lookup(f"GREEK {_case} LETTER {_name.upper().replace('LAMBDA', 'LAMDA')}")] = f"\\{_name} "
SUPERSCRIPTS = {"⁰": "0", "¹": "1", "²": "2", "³": "3", "⁴": "4", "⁵": "5", "⁶": "6", "⁷": "7", "⁸": "8", "⁹": "9",
                "⁻": "-", "⁺": "+", "ⁿ": "n"}  # fmt: skip
VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅙": "1/6", "⅛": "1/8", "⅜": "3/8"}

# No answer is wrapped more often; peeling without end costs quadratic time.
MAX_LAYERS = 20
TEXT_COMMANDS = (
    "text|mbox|hbox|mathrm|textbf|mathbf|textrm|textit|mathit|textnormal|textsf|texttt|textup|textsc|mathsf|mathtt|"
    "boldsymbol|bm|pmb|emph|operatorname|rm|bf"
)
SAME_COMMAND = {
    "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "nicefrac": r"\frac", "sfrac": r"\frac",
    "Bbb": r"\mathbb", "mathds": r"\mathbb", "intercal": r"\top", "leq": r"\le", "leqslant": r"\le", "geq": r"\ge",
    "geqslant": r"\ge", "neq": r"\ne", "lt": "<", "gt": ">", "dots": r"\ldots", "cdots": r"\ldots", "dotsc": r"\ldots",
    "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "varnothing": r"\emptyset", "colon": ":",
    "infin": r"\infty", "degrees": r"\degree", "R": r"\mathbb{R}", "lvert": "|", "rvert": "|", "vert": "|",
    "dollar": r"\$", "textdollar": r"\$", "lor": r"\text{or}", "vee": r"\text{or}", "simeq": r"\approx",
    "varphi": r"\phi", "arcsin": r"\arcsin", "backslash": r"\setminus", "textdegree": r"\degree",
    "approxeq": r"\approx",
    "iff": r"\Leftrightarrow", "quad": " ", "qquad": " ", "enspace": " ", "thinspace": " ", "displaystyle": " ",
    "textstyle": " ", "limits": "", "left": "", "right": "",
    "bigl": "", "bigr": "", "Bigl": "", "Bigr": "", "biggl": "", "biggr": "", "Biggl": "", "Biggr": "", "big": "",
    "Big": "", "bigg": "", "Bigg": "", "middle": "", "mathstrut": "", "strut": "",
    "checkmark": "", "square": "", "Box": "", "therefore": "", "implies": r"\Rightarrow", "qed": "",
    "blacksquare": "", "qedsymbol": "", "nonumber": "", "notag": "", "hfill": "", "null": "",
    "scriptstyle": " ", "lg": r"\log_{10}",
}  # fmt: skip
FUNCTION_WORDS = ("arcsin", "arccos", "arctan", "sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "sqrt", "pi")


def braced(text: str, start: int) -> int | None:
    """Where the group opened by the brace at `start` ends, or `None`; escaped braces do not count."""
    depth, index = 0, start
    while index < len(text):
        char = text[index]
        if char == "\\":
            index += 2
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return index
        index += 1
    return None


def _argument(text: str, index: int) -> tuple[str, int] | None:
    """The LaTeX argument at `index` (a group, a command or one character) and where it ends."""
    while index < len(text) and text[index] == " ":
        index += 1
    if index >= len(text):
        return None
    if text[index] == "{":
        end = braced(text, index)
        return None if end is None else (text[index + 1 : end], end + 1)
    command = re.compile(r"\\[a-zA-Z]+").match(text, index)
    if command:
        return command.group(), command.end()
    return text[index], index + 1


# Commands whose last argument is what they show, or that show nothing: how many come before it, and whether it counts.
PRESENTATION = {
    "boxed": (0, True), "fbox": (0, True), "framebox": (0, True), "underline": (0, True), "ensuremath": (0, True),
    "mathord": (0, True), "mathop": (0, True), "textcolor": (1, True), "colorbox": (1, True), "fcolorbox": (2, True),
    "color": (0, False), "hspace": (0, False), "vspace": (0, False), "phantom": (0, False), "hphantom": (0, False),
    "vphantom": (0, False), "tag": (0, False), "label": (0, False), "hskip": (0, False),
}  # fmt: skip
_PRESENTATION = re.compile(rf"\\({'|'.join(PRESENTATION)})(?![a-zA-Z])\*?")


def bare(text: str) -> str:
    """Take off commands that only change how something looks, with the arguments that say how."""
    for _ in range(MAX_LAYERS):
        out, index = [], 0
        for match in _PRESENTATION.finditer(text):
            if match.start() < index:
                continue  # inside an argument; its turn comes in the next round
            before, shown = PRESENTATION[match.group(1)]
            end, argument = match.end(), None
            for _ in range(before + 1):
                argument = _argument(text, end)
                if argument is None:
                    break
                end = argument[1]
            if argument is None:
                continue
            out += [text[index : match.start()], f"{{{argument[0]}}}" if shown else " "]
            index = end
        if not index:
            return text
        text = "".join(out) + text[index:]
    return text


_ENVIRONMENT = re.compile(r"\\(?:begin|end) ?\{(?:aligned|align|split|gathered|gather|equation|displaymath)\*?\}")


def _one_line(text: str) -> str:
    """An aligned derivation as one chain of equations."""
    if not _ENVIRONMENT.search(text):
        return text
    text = re.sub(r"\\\\\s*(?:\[[^\]]*\])?\s*(?=&?\s*=)", " ", _ENVIRONMENT.sub(" ", text))
    return text.replace("&", " ").strip()


_TEXT = re.compile(rf"\\(?:{TEXT_COMMANDS})\*?\s*(?={{)")


def _out_of_text(text: str) -> str:
    """One command for all fonts, without the formulas in it: `\\mathbf{\\frac34}`, `\\text{is $\\frac34$}`."""
    out, index = [], 0
    for match in _TEXT.finditer(text):
        end = braced(text, match.end())
        if match.start() < index or end is None:
            continue  # inside another one
        parts = re.split(r"(?<!\\)\$", text[match.end() + 1 : end])
        if len(parts) == 1 and re.search(r"\\[a-zA-Z]|[{^]", parts[0]):
            parts = ["", parts[0]]
        words = [_out_of_text(part) if n % 2 else f"\\text{{{part}}}" for n, part in enumerate(parts) if part]
        out += [text[index : match.start()], "".join(words)]
        index = end + 1
    return "".join(out) + text[index:]


_QUOTES = (("**", "**"), ("`", "`"), ('"', '"'), ("``", "''"), ("``", '"'), ("'", "'"), ("__", "__"))


def _unquote(text: str) -> str:
    """Without Markdown or quotation marks round the whole."""
    for opening, closing in _QUOTES:
        inner = text[len(opening) : -len(closing)]
        if inner and text.startswith(opening) and text.endswith(closing) and not {opening[0], closing[0]} & set(inner):
            return inner.strip()
    return text


def brace_arguments(text: str, depth: int = 0) -> str:
    """Give `\\frac` and `\\sqrt` their arguments in braces, and read `\\sqrt(...)` as it was meant."""
    if depth > MAX_LAYERS:
        return text
    out, index = [], 0
    for match in re.finditer(r"\\(frac|sqrt)(?![a-zA-Z])", text):
        if match.start() < index:
            continue  # inside an argument that was rewritten as a whole
        out.append(text[index : match.start()])
        index = match.end()
        out.append(match.group())
        if match.group(1) == "sqrt":
            root = re.compile(r"\s*\[([^\]]*)\]").match(text, index)
            if root:
                out.append(f"[{root.group(1)}]")
                index = root.end()
            paren = re.compile(r"\s*\(([^()]*)\)").match(text, index)
            if paren:
                out.append(f"{{{brace_arguments(paren.group(1), depth + 1)}}}")
                index = paren.end()
                continue
        for _ in range(2 if match.group(1) == "frac" else 1):
            found = _argument(text, index)
            if found is None:
                break
            out.append(f"{{{brace_arguments(found[0], depth + 1).strip()}}}")
            index = found[1]
    out.append(text[index:])
    return "".join(out)


def strip_group(text: str) -> str:
    """Take off braces that enclose everything, and what surrounds a formula without being part of it."""
    for _ in range(MAX_LAYERS):
        before = text
        text = text.strip().rstrip(".,;:").rstrip() if not text.endswith("\\ldots") else text.strip()
        if text.startswith("{") and braced(text, 0) == len(text) - 1:
            text = text[1:-1]
        text = text.removesuffix("\\\\").removesuffix("\\").removeprefix("\\#").lstrip("#")
        if text == before:
            break
    return text


@functools.lru_cache(maxsize=4096)
def normalize(text: str) -> str:
    """Bring an answer to one spelling: no delimiters, spacing or fonts, one command per symbol."""
    powers = "[" + "".join(SUPERSCRIPTS) + "]+"
    text = re.sub(powers, lambda m: "^{" + "".join(map(SUPERSCRIPTS.get, m.group())) + "}", text)
    for char, fraction in VULGAR.items():
        text = text.replace(char, r" \frac{{{}}}{{{}}}".format(*fraction.split("/")))
    text = re.sub(r"([√∛∜]) ?(\d+(?:\.\d+)?)", r"\1{\2}", text)
    text = "".join(UNICODE.get(char, char) for char in text)
    text = unicodedata.normalize("NFKC", text)
    text = "".join(" " if unicodedata.category(char) == "Cc" else char for char in text)
    text = re.sub(r"(?<=\d)(?:,\\!|\{,\})(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\\(?:mathrm|operatorname) ?(?:\{ ?([ei]) ?\}|([ei])(?![a-zA-Z]))", r"\1\2", text)
    text = re.sub(r"(?<!\\)\$", "", _out_of_text(text))
    text = re.sub(r"\\\\|\\[()\[\]!]|\\[,;:> ]|~", lambda m: m.group() if m.group() == r"\\" else
                  "" if m.group()[-1] in "()[]!" else " ", text)  # fmt: skip
    # Nothing set above or below it.
    text = re.sub(r"\\(?:under|over)set ?\{\s*\}\s*(?=\{)|\\stackrel ?\{\s*\}\s*(?=\{)", "", text)
    text = bare(_one_line(_unquote(text.strip())))
    text = re.sub(r"\A(?:\s|=(?!=)|:|\\(?:Rightarrow|Longrightarrow|implies|to)(?![a-zA-Z]))+", "", text)
    text = re.sub(r"\\(left|right)\s*\.", "", text)
    text = re.sub(r"\\([a-zA-Z]+)", _same_command, text)
    text = re.sub(r"\\log ?_ ?(?:e|\{ ?e ?\})", r"\\ln ", text)
    text = re.sub(r"\\(?:bf|rm|it|sf|tt|tiny|small|large|Large|LARGE|huge|Huge)(?![a-zA-Z])", "", text)
    text = re.sub(r"(?<=[\d\s])\{\}|\A\{\}", "", text)
    text = re.sub(r"\\mathbb ?([A-Z])(?![a-zA-Z])", r"\\mathbb{\1}", text)
    text = re.sub(r"\^ ?(?:\{ ?((?:\\prime ?)+)\}|\\prime(?![a-zA-Z]))", _primes, text)
    text = re.sub(r"(?<![\^_])\{([:=<>])\}", r"\1", text)
    text = re.sub(r"\\dot ?\{?(\d)\}?(?:(\d*)\\dot ?\{?(\d)\}?)?", _dotted, text)
    text = re.sub(r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac ?\{ ?\\text ?\{([^{}]*)\} ?\} ?\{ ?\\text ?\{([^{}]*)\} ?\}", r"\\text{ \1/\2}", text)
    text = re.sub(r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}", text)
    text = re.sub(r"\\text\{\s*([+-]?\d[\d,.]*)\s*", r"\1 \\text{ ", text)  # words around a number, not a word
    text = re.sub(r"(?<=\d)\s*\^?\s*\{?\s*\\text\{\s*(?:st|nd|rd|th)\s*\}\}?", "", text)
    text = re.sub(r"\\text\{\s*(sin|cos|tan|ln|log)\s*\}", r"\\\1 ", text)
    text = re.sub(r"\\text\{[\s.,;:]*\}", " ", text)
    text = re.sub(r"\^\s*(\{\s*(\\circ|\\degree|o|\\text\{o\})\s*\}|\\(circ|degree)(?![a-z]))", r"\\degree ", text)
    text = re.sub(r"\{\}\s*(?=\\degree)", "", text)
    text = text.replace("{,}", ",").replace(r"\%", "%").replace(r"\text{%}", "%").replace(r"\text{\$}", r"\$")
    text = re.sub(r"\.{3,}", r"\\ldots ", text)
    # Words of programming notation: functions without their backslash.
    if r"\text" not in text:
        text = re.sub(rf"(?<![a-zA-Z\\])({'|'.join(FUNCTION_WORDS)})(?![a-zA-Z])", r"\\\1 ", text)
    text = text.replace("**", "^").replace("<=", r"\le ").replace(">=", r"\ge ").replace("!=", r"\ne ")
    text = strip_group(re.sub(r"\s+", " ", brace_arguments(text)))
    return _digits_of_words(text)


def _digits_of_words(text: str) -> str:
    """A whole answer in words ("twelve") as digits; a number at the end of words as words and a number."""
    if described := re.fullmatch(r"\\text ?\{([^{}\d]*[a-z:=] ?)([+-]?\d[\d,.]*)((?: [a-zA-Z .]*)?)\}", text):
        before, number, after = described.groups()
        return f"\\text{{{before}}} {number}" + (f" \\text{{{after}}}" if after.strip(" .") else "")
    if text.lower() in ("infinity", r"\text{infinity}"):
        return r"\infty"
    words = re.fullmatch(r"(?:\\text ?\{)?([A-Za-z][A-Za-z -]*)\}?", text)
    number = number_in_words(words.group(1)) if words else None
    return text if number is None else str(number)


def _primes(match: re.Match) -> str:
    return "'" * match.group().count("\\prime")


def _dotted(match: re.Match) -> str:
    first, middle, last = match.groups()
    return f"\\overline{{{first}{middle or ''}{last or ''}}}"


def _same_command(match: re.Match) -> str:
    replacement = SAME_COMMAND.get(match.group(1))
    if replacement is None:
        return match.group()
    # A command must stay apart from the letters that follow it.
    return replacement + " " if replacement[-1:].isalpha() else replacement


def squeeze(text: str) -> str:
    """The text without white space, except where it ends a command or parts two numbers."""
    text = re.sub(r"(\\[a-zA-Z]+) +(?=[a-zA-Z])", "\\1\0", text)
    text = re.sub(r"(?<=\d) +(?=\d)", "\0", text)
    return text.replace(" ", "").replace("\0", " ")


OPENING, CLOSING = "([{", ")]}"


def split_top_level(text: str, separator: re.Pattern) -> list[str]:
    """Split at matches of `separator` that stand outside all brackets and braces; brackets need not pair by kind."""
    parts, depth, last, index = [], 0, 0, 0
    while index < len(text):
        char = text[index]
        if depth == 0 and (match := separator.match(text, index)) and match.end() > index:
            parts.append(text[last:index])
            last = index = match.end()
            continue
        if char == "\\" and index + 1 < len(text):
            name = re.compile(r"\\(langle|rangle|begin|end|\{|\})").match(text, index)
            if name:
                depth += 1 if name.group(1) in ("langle", "begin", "{") else -1
                index = name.end()
                continue
            index += 2
            continue
        depth += (char in OPENING) - (char in CLOSING)
        index += 1
    return [*parts, text[last:]]
