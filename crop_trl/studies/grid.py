"""W&B sweep files with `method: grid`: the commands that an agent would start, one by one."""

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import read_yaml

_KNOWN = {"value", "values", "distribution"}
_TRAIN = (("crop-trl", "train"), ("-m", "crop_trl.commands", "train"), ("-m", "crop_trl.commands.train"))


@dataclass(frozen=True)
class Grid:
    """A sweep file: the command with its macros, and the values of each parameter."""

    path: Path
    command: list[str]
    program: str
    parameters: dict[str, list[Any]]
    run_cap: int | None = None

    def commands(self) -> Iterator[list[str]]:
        """The command of every run, the last parameter varying fastest."""
        for values in itertools.islice(itertools.product(*self.parameters.values()), self.run_cap):
            yield expand(self.command, dict(zip(self.parameters, values)), self.program)


def read_grid(path: str | Path) -> Grid:
    """Read a sweep file. Raises `ValueError` for one that is no grid over `crop-trl train`."""
    content = read_yaml(path)
    if content.get("method") != "grid":
        raise ValueError(f"{str(path)!r} has `method` {content.get('method')!r}; a study runs `method: grid`.")
    command = content.get("command")
    if not isinstance(command, list):
        raise ValueError(
            f"{str(path)!r} has no `command`; write [crop-trl, train, --config, FILE, ${{args}}] with your FILE."
        )
    parameters = content.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"{str(path)!r}: `parameters` names none; write lines such as `seed: {{values: [0, 1]}}`.")
    if parameters and not any(str(word).startswith("${args") for word in command):
        raise ValueError(f"{str(path)!r}: `command` takes none of the `parameters`; write ${{args}} where they go.")
    parameters = {name: _values(given) for name, given in parameters.items()}
    for name, values in parameters.items():
        if not isinstance(values, list) or not values:
            raise ValueError(
                f"{str(path)!r}: `{name}` needs `values`, a list that is not empty, or `value`; a grid takes nothing "
                "else."
            )
    run_cap = content.get("run_cap")
    if run_cap is not None and (type(run_cap) is not int or run_cap < 1):
        raise ValueError(f"{str(path)!r} has `run_cap` {run_cap!r}; give a whole number of at least 1.")
    return Grid(Path(path), [str(word) for word in command], str(content.get("program", "")), parameters, run_cap)


def _values(given: Any) -> Any:
    one = isinstance(given, dict) and not set(given) - _KNOWN and len({"value", "values"} & set(given)) == 1
    return given.get("values", [given.get("value")]) if one else None


def expand(command: list[str], values: Mapping[str, Any], program: str = "") -> list[str]:
    """
    A command with its macros replaced as a W&B agent replaces them. Raises `ValueError` for a macro that there is not.
    """
    macros = {
        "env": ["/usr/bin/env"],
        "interpreter": ["python"],
        "program": [program],
        "args": [f"--{name}={value}" for name, value in values.items()],
        "args_no_equals": [word for name, value in values.items() for word in (f"--{name}", str(value))],
        "args_no_hyphens": [f"{name}={value}" for name, value in values.items()],
        "args_no_boolean_flags": [
            f"--{name}" if value is True else f"--{name}={value}"
            for name, value in values.items()
            if value is not False
        ],
        "args_json": [json.dumps(dict(values))],
    }
    words = []
    for word in command:
        word = re.sub(r"\$\{envvar:([A-Z0-9_]*)\}", lambda found: os.environ.get(found[1], found[1]), word)
        if not (word.startswith("${") and word.endswith("}")):
            words.append(word)
        elif word[2:-1] in macros:
            words += macros[word[2:-1]]
        else:
            raise ValueError(f"`command` has {word}, which a study does not know; choose among {', '.join(macros)}.")
    return words


def train_arguments(command: list[str]) -> tuple[list[str], list[str]]:
    """What stands before `crop-trl train` in a command, and what follows. Raises `ValueError` for another command."""
    for start, program in itertools.product(range(len(command)), _TRAIN):
        if tuple(command[start : start + len(program)]) == program:
            before = command[:start] if program[0] == "crop-trl" else command[: start - 1]
            return before, command[start + len(program) :]
    raise ValueError(f"`command` starts {' '.join(command[:3])!r}; a study runs `crop-trl train`.")
