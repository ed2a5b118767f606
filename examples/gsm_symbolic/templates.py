"""The word-problem templates of the `reasoning-gym` package, taken apart.

Each of its `gsm_symbolic` generators is a function with two others inside: one draws the values of a problem, the other
writes question, worked solution and answer from them. Apart, they can do what the package does not offer: write the
same problem with a single value changed.
"""

import importlib
import importlib.machinery
import inspect
import re
import sys
import types
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path
from random import Random

PACKAGE, VERSION = "reasoning-gym", "0.1.25"
MODULES = ("generators_00_49", "generators_50_99")
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"


class Written:
    """A problem as the package writes it: question, worked solution without the last line, answer."""

    def __init__(self, question: str, solution: str, answer: str):
        self.question, self.solution, self.answer = question, solution, answer


class Template:
    """One generator. `draw` gives the values of a problem by name, `write` the texts that belong to them."""

    def __init__(self, number: int, generator: Callable):
        self.number, self.generator = number, generator
        self._parts = _take_apart(generator)
        signature = inspect.signature(self._parts["generate_from_variables"][0])
        self.names = list(signature.parameters)
        self._bind = signature.bind

    def draw(self, rng: Random) -> dict:
        """The values of one problem."""
        example, cells = self._parts["generate_example"]
        write, caught = self._parts["generate_from_variables"][0], {}

        def catch(*args, **kwargs):
            caught.update(self._bind(*args, **kwargs).arguments)
            return write(*args, **kwargs)

        cells["generate_from_variables"].cell_contents = catch
        try:
            example(rng, 1.0)
        finally:
            cells["generate_from_variables"].cell_contents = write
        return caught

    def write(self, values: dict) -> Written | None:
        """The texts for these values; `None` where the generator cannot write them."""
        try:
            result = self._parts["generate_from_variables"][0](**values)
        except (ValueError, ArithmeticError, LookupError, TypeError):
            return None
        solution = result["answer_cot"].split("####")[0]
        answer = re.sub(r"\.0+$", "", str(result["answer"]))
        return Written(tidy(result["question"]), tidy(solution), answer)


def _take_apart(generator: Callable) -> dict:
    """The functions nested in a generator, by name, each with the cells through which they see each other."""
    codes = {c.co_name: c for c in generator.__code__.co_consts if isinstance(c, types.CodeType)}
    cells = {name: types.CellType() for name in generator.__code__.co_cellvars}
    parts = {}
    for name, code in codes.items():
        closure = tuple(cells[free] for free in code.co_freevars)
        function = types.FunctionType(code, generator.__globals__, name, None, closure)
        parts[name] = (function, cells)
        if name in cells:
            cells[name].cell_contents = function
    return parts


def tidy(text: str) -> str:
    """Whole numbers without `.0`, the right article and plural, no white space at the ends of lines, no empty lines."""
    text = re.sub(r"\b([Aa])n? (?=[a-z])(?![aeiou])", r"\1 ", text)
    text = re.sub(r"\b([Aa]) (?=[aeiou])(?!one\b|uni|eu)", r"\1n ", text)
    text = re.sub(r"(ch|sh|x)s\b", r"\1es", text)
    text = re.sub(r"(\d)\.0+(?!\d)", r"\1", text)
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


@cache
def load() -> dict[int, Template]:
    """All templates by number.

    The package's own `__init__` imports every task it has, and with them a dozen packages. Only its folder is used
    here, so that an installation without its dependencies is enough.
    """
    spec = importlib.machinery.PathFinder.find_spec("reasoning_gym")
    if spec is None:
        raise ModuleNotFoundError(f"This world needs {PACKAGE}: pip install --no-deps {PACKAGE}=={VERSION}.")
    folder = Path(spec.submodule_search_locations[0])
    shells = {"reasoning_gym": folder, "reasoning_gym.arithmetic": folder / "arithmetic"}
    shells["reasoning_gym.arithmetic.gsm_symbolic"] = folder / "arithmetic" / "gsm_symbolic"
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "reasoning_gym"}
    for name in before:
        del sys.modules[name]
    try:
        for name, path in shells.items():
            shell = types.ModuleType(name)
            shell.__path__ = [str(path)]
            sys.modules[name] = shell
        modules = [importlib.import_module(f"reasoning_gym.arithmetic.gsm_symbolic.{name}") for name in MODULES]
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "reasoning_gym"]:
            del sys.modules[name]
        sys.modules.update(before)
    found = {}
    for module in modules:
        for name, generator in vars(module).items():
            if name.startswith("generate_"):
                number = int(name.removeprefix("generate_"))
                found[number] = Template(number, generator)
    return dict(sorted(found.items()))


def numbers(text: str) -> list[str]:
    """The numbers in a text, in order."""
    return re.findall(NUMBER, text)


_NOISE = re.compile(r"[$€£]|/(?=[A-Za-z])|(?<=[A-Za-z])-|-(?=[A-Za-z])|\((?![\d\s.+*/x×÷-]+\))|(?<=[A-Za-z])\)")
_BREAK = re.compile(r"[:;]|[.,](?!\d)|\n")
_TOKEN = re.compile(rf"({NUMBER})(%?)|(?<=\d)x(?= ?[-+=]|$)|(?<!['’])\b(?![IAax]\b)([A-Za-z])\b|([-+*/×÷()]|\bx\b)")


def equations(text: str) -> list[tuple[Fraction | None, Fraction | None]]:
    """Both sides of every equation in a text; `None` for a side with an unknown, or without a calculation to read."""
    found = []
    for line in text.splitlines():
        sides = line.lstrip("-•· ").replace("half *", "0.5 *").split("=")
        for left, right in zip(sides, sides[1:]):
            before = _tokens(_BREAK.split(left)[-1])
            after = _tokens(_BREAK.split(right)[0])
            found.append((_value(before, from_end=True), _value(after, from_end=False)))
    return found


def _tokens(text: str) -> list:
    """Numbers, signs, and `None` for an unknown; the words between them are left out."""
    text = re.sub(r"(\d)\((?=\d)", r"\1*(", text)
    text = _NOISE.sub(" ", text)
    tokens = []
    for match in _TOKEN.finditer(text):
        number, percent, letter, sign = match.groups()
        if number:
            value = Fraction(number.replace(",", ""))
            tokens.append(value / 100 if percent else value)
        elif sign:
            tokens.append({"x": "*", "×": "*", "÷": "/"}.get(sign, sign))
        else:
            tokens.append(None)
    return tokens


def _value(tokens: list, from_end: bool) -> Fraction | None:
    """The value of the expression that touches the equals sign."""
    for cut in range(len(tokens)):
        part = tokens[cut:] if from_end else tokens[: len(tokens) - cut]
        value = _evaluate(part)
        if value is not None:
            # An unknown or a sign beside it says that there is more of the expression than could be read.
            beside = tokens[cut - 1 if from_end else len(tokens) - cut] if cut else Fraction(0)
            return value if isinstance(beside, Fraction) or beside in ("(", ")") else None
    return None


def _evaluate(tokens: list) -> Fraction | None:
    """Evaluate a whole list of numbers and signs; `None` if it is no expression."""
    position = 0

    def operand():
        nonlocal position
        token = tokens[position] if position < len(tokens) else None
        position += 1
        if token == "(":
            value = total()
            if value is None or position >= len(tokens) or tokens[position] != ")":
                return None
            position += 1
            return value
        return token if isinstance(token, Fraction) else None

    def product():
        nonlocal position
        value = operand()
        while value is not None and position < len(tokens) and tokens[position] in ("*", "/"):
            sign = tokens[position]
            position += 1
            other = operand()
            if other is None or (sign == "/" and not other):
                return None
            value = value * other if sign == "*" else value / other
        return value

    def total():
        nonlocal position
        value = product()
        while value is not None and position < len(tokens) and tokens[position] in ("+", "-"):
            sign = tokens[position]
            position += 1
            other = product()
            if other is None:
                return None
            value = value + other if sign == "+" else value - other
        return value

    value = total()
    return value if position == len(tokens) else None
