"""One spelling for problem texts: what must agree before two of them count as the same."""

import re
import unicodedata

from ..evaluation.grading.latex import brace_arguments

# Commands whose backslash was decoded as an escape on the way ("\frac" -> form feed + "rac").
BROKEN_COMMANDS = (
    ("\x0c(?=rac|orall|loor)", r"\\f"),
    ("\x08(?=eta|egin|inom|ar|oxed|ig|mod|ot)", r"\\b"),
    ("\t(?=imes|ext|heta|an|riangle|frac|au|o\\b)", r"\\t"),
    ("\x07(?=lpha|ngle|pprox|lign)", r"\\a"),
    ("\x0b(?=ec|arphi|dots|ert)", r"\\v"),
    ("\r(?=ight|ho|angle|floor|ceil)", r"\\r"),
    ("\n(?=eq\\b|abla)", r"\\n"),
)
SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\times ", "⋅": r"\times ", "÷": r"\div ", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\ne ", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "°": r"\degree ", "∠": r"\angle ",
    "△": r"\triangle ", "…": r"\ldots ", "⋯": r"\ldots ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ",
}  # fmt: skip
SAME_COMMAND = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge",
    "neq": "ne", "cdot": "times", "ast": "times", "dots": "ldots", "cdots": "ldots", "dotsc": "ldots", "circ": "degree",
    "varphi": "phi", "varepsilon": "epsilon", "to": "rightarrow", "lbrace": "{", "rbrace": "}", "mid": "|", "vert": "|",
    "lvert": "|", "rvert": "|", "colon": ":", "bmod": "mod", "pmod": "mod", "land": "wedge", "overline": "bar",
}  # fmt: skip
# Commands that change how something looks, not what it says.
PRESENTATION = frozenset(
    "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr displaystyle textstyle limits nolimits quad qquad "
    "text textbf textit textrm mathrm mathbf mathit mathcal mathsf operatorname mbox hbox rm bf it hspace vspace hfill "
    "noindent medskip bigskip smallskip par newline linebreak nonumber label tag ensuremath boldsymbol bm mathbb emph "
    "underline item centering thinspace enspace allowbreak mathop mathrel".split()
)
ENVIRONMENT = re.compile(r"\\(?:begin|end) ?\{(?:align|aligned|equation|gather|gathered|center|split|eqnarray|itemize"
                         r"|enumerate|tabular|multline)\*?\}")  # fmt: skip
# What data sets append to make every answer an integer.
ANSWER_FORM = re.compile(
    r"(?:the (?:original |final |correct )?answer (?:\S+ )?(?:is|can be|may be|should be|has) [^.?]{0,40}\bform"
    r"|(?:express|provide|give|write|enter|present) (?:your|the) (?:final )?answer (?:in|as|is)\b[^.?]{0,60}"
    r"\b(?:form|fraction|integer)|please (?:give|provide|find|compute|fill)|if your answer is|fill in the"
    r"|(?:can|may) be (?:uniquely )?(?:written|expressed|simplified) (?:in the form|as)).*",
    re.I | re.DOTALL,
)
TOKEN = re.compile(
    r"\\[a-zA-Z]+|\\[{}|%]|\d+(?:\.\d+)?|\.\d+|[a-zA-Z]+|[\u3400-\u9fff]|[-+*/^_=<>|!%()\[\]]|(?<=\d):(?=\d)"
)
WORD = re.compile(r"[a-z]{2,}\Z|[\u3400-\u9fff]\Z")


def tokens_of(text: str) -> list[str]:
    """A problem's tokens in one spelling: case, space, punctuation and looks of LaTeX do not matter."""
    for broken, whole in BROKEN_COMMANDS:
        text = re.sub(broken, whole, text)
    text = re.sub(r"\[asy\].*?\[/asy\]|!\[[^\]]*\]\([^)]*\)|<[a-zA-Z/][^<>]*>", " ", text, flags=re.DOTALL)
    text = "".join(SYMBOLS.get(char, char) for char in text)
    text = unicodedata.normalize("NFKC", text)
    text = re.sub(r"\\\\(?:\[[^\]]*\])?|\\[,;:! ]|~|&", lambda match: "" if match.group() == r"\!" else " ", text)
    text = re.sub(r"\\[()\[\]]|(?<!\\)\$|\\\$", " ", text)
    text = ENVIRONMENT.sub(" ", text)
    text = re.sub(r"\.{3,}", r"\\ldots ", text.replace("{,}", ","))
    text = re.sub(r"(?<![\d,])\d{1,3}(?:, ?\d{3})+(?![\d,])", lambda match: re.sub("[, ]", "", match.group()), text)
    text = re.sub(r"\^ ?\{? ?\\(?:circ|degree)(?![a-z]) ?\}?", r"\\degree ", brace_arguments(text))
    tokens = []
    for token in TOKEN.findall(text):
        if token.startswith("\\") and len(token) > 2:
            name = SAME_COMMAND.get(token[1:], token[1:])
            if name in PRESENTATION:
                continue
            token = "\\" + name if name.isalpha() else name
        tokens.append("\\times" if token == "*" else token.lower())
    return tokens


def asked_tokens(text: str, tokens: list[str]) -> list[str]:
    """The tokens without a request for the answer's form, unless nothing else is there."""
    shorter = ANSWER_FORM.sub(" ", text)
    if len(shorter) == len(text):
        return tokens
    return tokens_of(shorter) if len(shorter) > 0.4 * len(text) else tokens
