"""Equality of expressions by computer algebra. Slow, and can run away: only for processes that can be killed.

math-verify's LaTeX parser reads the expressions. Its comparison rounds to six places and lower-cases symbols, which
accepts 0.0000671 for 0.0000672 and X + Y for x + y; so values are compared here, to 40 significant digits, and symbols
keep their case. What remains (equations, sets) is left to `math_verify.verify`.
"""

import math
import random
import re

import sympy
from latex2sympy2_extended import latex2sympy
from math_verify import LatexExtractionConfig, parse, verify

from .latex import braced

DIGITS = 60
TOLERANCE = sympy.Float("1e-40", 50)
GREEK = "beta gamma delta zeta eta kappa lambda mu nu xi rho sigma tau upsilon chi psi omega".split()
DRAWS = 6


def keep_case(*texts: str) -> list[str]:
    """Rename capital letters, alike in all texts: the parser would make `X` and `x` the same symbol."""
    bare = [re.sub(r"\\[a-zA-Z]+", " ", text) for text in texts]
    capitals = sorted(set(re.findall("[A-Z]", " ".join(bare))))
    free = [name for name in GREEK if not any(re.search(rf"\\{name}(?![a-zA-Z])", text) for text in texts)]
    if len(capitals) > len(free):
        return list(texts)
    names = dict(zip(capitals, free))
    return [
        re.sub(r"\\[a-zA-Z]+|[A-Z]", lambda m: m.group() if len(m.group()) > 1 else f"\\{names[m.group()]} ", text)
        for text in texts
    ]


def prepare(text: str) -> str:
    """Decimals as fractions (floats round), degrees as radians, `exp(...)` as a power."""
    text = re.sub(r"(?<![\w.])(\d*)\.(\d+)(?![\d.])", _decimal, text)
    text = re.sub(r"(\d+|\))\s*\\degree ?", r"\1\\cdot\\frac{\\pi}{180}", text)
    in_degrees = r"(\\(?:sin|cos|tan|cot|sec|csc)) ?(\d+)\\cdot\\frac\{\\pi\}\{180\}"
    text = re.sub(in_degrees, r"\1(\2\\cdot\\frac{\\pi}{180})", text)
    text = re.sub(r"(?<![a-zA-Z\\])exp ?\(([^()]*)\)", r"e^{\1}", text)
    text = re.sub(r"(?<=[\d)}a-z]) ?\* ?(?=[\d({\\a-z])|(?<=\)) ?(?=\()", r"\\cdot ", text)
    text = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", re.sub(r"\\pi ?(?=\()", r"\\pi\\cdot ", text))
    return re.sub(r"\\?(gcd|lcm) ?\(((?: ?\d+ ?,)+ ?\d+ ?)\)", _divisor, text)


def _divisor(match: re.Match) -> str:
    numbers = [int(number) for number in match.group(2).split(",")]
    return str(math.gcd(*numbers) if match.group(1) == "gcd" else math.lcm(*numbers))


def _decimal(match: re.Match) -> str:
    whole, rest = match.groups()
    return f"\\frac{{{whole}{rest}}}{{1{'0' * len(rest)}}}"


def to_sympy(text: str):
    """Parse an expression; raises what the parser raises."""
    expression = latex2sympy(prepare(text), is_real=False, convert_degrees=False, normalization_config=None)
    if isinstance(expression, sympy.MatrixExpr):
        expression = expression.doit().as_explicit()
    if isinstance(expression, sympy.Basic):
        if expression.has(sympy.Integral):
            expression = expression.doit()  # quadrature to 60 digits takes a minute
        imaginary = [symbol for symbol in expression.free_symbols if symbol.name == "i"]
        expression = expression.subs({symbol: sympy.I for symbol in imaginary}) if imaginary else expression
    return expression


def numeric(expression):
    """Its value to `DIGITS` digits, or `None` when it has none."""
    value = sympy.N(expression, DIGITS, maxn=400)
    finite = value.is_number and not value.has(sympy.nan, sympy.zoo, sympy.oo)
    return value if finite and all(part.is_number for part in value.as_real_imag()) else None


def close(left, right) -> bool:
    """Whether two numbers agree to the relative tolerance."""
    size = max(abs(left), abs(right))
    if size == 0:
        return True
    return bool(abs(left - right) <= TOLERANCE * size)


def same_number(left, right) -> bool:
    """Whether two numbers, exact or not, are equal as far as can be told."""
    first, second = numeric(left), numeric(right)
    if first is None or second is None:
        return left == right
    if close(first, second):
        # Agreement to many digits is not equality (10^100 and 10^100 + 1): the difference must vanish as far as it can
        # be told. One that has any significant digit does not.
        parts = sympy.N(left - right, 15, maxn=2000).as_real_imag()
        return not any(part.is_comparable and part != 0 for part in parts)
    # A sum that cancels to zero has no significant digits to compare.
    if abs(first) < 1e-30 or abs(second) < 1e-30:
        return sympy.simplify(left - right) == 0
    return False


def same_function(left, right) -> bool:
    """Agreement at random points, on both sides of zero; at whole numbers where nothing else has a real value."""
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    if left.free_symbols != right.free_symbols:
        left, right = sympy.simplify(left), sympy.simplify(right)
        if left.free_symbols != right.free_symbols:
            return False
    draw = random.Random(0)
    agreed = 0
    for attempt in range(3 * DRAWS):
        whole = attempt >= 2 * DRAWS
        point = {
            symbol: sympy.Integer(draw.randint(2, 9))
            if whole
            else sympy.Rational(draw.randint(101, 3999), 1009) * (draw.choice((1, -1)) if attempt % 2 else 1)
            for symbol in symbols
        }
        first, second = numeric(left.subs(point)), numeric(right.subs(point))
        if first is None or second is None or (attempt % 2 and not (first.is_real and second.is_real)):
            continue
        if not close(first, second):
            if max(abs(first), abs(second)) > 1e-30:
                return False
        agreed += 1
        if agreed >= DRAWS:
            return True
    return agreed >= 3


def same_expression(left, right) -> bool:
    """Whether two expressions, or matrices entry by entry, are equal."""
    if isinstance(left, sympy.MatrixBase) or isinstance(right, sympy.MatrixBase):
        return (
            isinstance(left, sympy.MatrixBase)
            and isinstance(right, sympy.MatrixBase)
            and left.shape == right.shape
            and all(same_expression(a, b) for a, b in zip(left.doit(), right.doit()))
        )
    if left == right:
        return True
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
        return False
    if left.free_symbols or right.free_symbols:
        return same_function(left, right)
    return same_number(left, right)


def same_equation(left, right) -> bool:
    """Two equations are the same when their differences are multiples of each other."""
    first, second = (side.lhs - side.rhs for side in (left, right))
    if not first.free_symbols or first.free_symbols != second.free_symbols:
        return False
    ratio = sympy.simplify(first / second)
    return bool(ratio.is_number and ratio.is_finite and ratio != 0)


def scalars(gold: str, prediction: str) -> bool:
    """Whether two normalised expressions or equations are equal; what cannot be parsed is not."""
    if not _well_formed(gold) or not _well_formed(prediction):
        return False
    if _PRIMED.findall(gold) != _PRIMED.findall(prediction):
        return False  # the parser drops primes
    if re.search(r"(?<![_^\d])\d+ \d", gold + " and " + prediction):
        return False  # two numbers side by side are neither a product nor one number
    gold, prediction = keep_case(gold, prediction)
    try:
        left, right = to_sympy(gold), to_sympy(prediction)
    except (MemoryError, TimeoutError):
        raise
    except Exception:
        return False
    if isinstance(left, sympy.Eq) and isinstance(right, sympy.Eq):
        if same_equation(left, right):
            return True
    elif isinstance(left, sympy.Expr | sympy.MatrixBase) and isinstance(right, sympy.Expr | sympy.MatrixBase):
        return same_expression(left, right)
    elif isinstance(left, sympy.Expr | sympy.MatrixBase) or isinstance(right, sympy.Expr | sympy.MatrixBase):
        return False
    config = [LatexExtractionConfig()]
    parsed = [parse(f"${prepare(text)}$", config, parsing_timeout=None) for text in (gold, prediction)]
    return bool(all(parsed) and verify(*parsed, timeout_seconds=None))


_PRIMED = re.compile(r"[\w)}]'+")


def _well_formed(text: str) -> bool:
    """Braces pair up: the parser guesses at the rest, and guesses wrong."""
    return braced("{" + text + "}", 0) == len(text) + 1
