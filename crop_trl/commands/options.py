"""Command lines of all commands: what is wrong in one is said in a sentence, with the nearest option."""

import argparse
import ast
import difflib
import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import wraps
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from trl import TrlParser

from ..files import read_yaml

# What takes the place of a teacher that a file names.
_TEACHERS = ("teacher_source", "teachers")


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """The end of a sentence about a name that is not known."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"did you mean `{near[0]}`?" if near else otherwise


class SentenceParser(argparse.ArgumentParser):
    """A parser whose errors are `ValueError`s of one sentence."""

    def error(self, message: str):
        raise ValueError(f"{message[:1].upper()}{message[1:]}; `{self.prog} --help` lists the options.")

    def refuse(self, unknown: list[str]) -> None:
        """Raise `ValueError` for the first of some options that there are not, naming one that is near."""
        if unknown:
            name = unknown[0].partition("=")[0]
            known = [option for action in self._actions for option in action.option_strings]
            remedy = nearest(name, known, f"`{self.prog} --help` lists them.")
            raise ValueError(f"`{name}` is no option of `{self.prog}`; {remedy}")


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


class OptionParser(SentenceParser):
    """For a command whose options are listed in it; `doc` is its module's text."""

    def __init__(self, name: str, doc: str):
        super().__init__(f"crop-trl {name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse_args(self, args=None, namespace=None):
        """See [`~argparse.ArgumentParser.parse_args`]; hyphens count as underscores. Raises `ValueError`."""
        words = sys.argv[1:] if args is None else args
        spelled = {name.replace("_", "-"): name for name in self._option_string_actions}
        parts = (word.partition("=") for word in words)
        found, unknown = self.parse_known_args(["".join((spelled.get(n, n), *more)) for n, *more in parts], namespace)
        self.refuse(unknown)
        return found


def _reading(convert: Callable[[str], Any], kinds: tuple, many: bool) -> Callable[[str], Any]:
    """`convert` for a setting of some types that also reads what a sweep makes of None, of a list and of a dict."""

    @wraps(convert, updated=())
    def read(text: str) -> Any:
        if text == "None" and NoneType in kinds:
            return None
        if many and text.startswith("[") or text.startswith("{") and any(dict in (k, get_origin(k)) for k in kinds):
            with suppress(ValueError, SyntaxError):
                value = ast.literal_eval(text)
                return [convert(str(one)) for one in value] if many else json.dumps(value)
        return convert(text)

    return read


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings whose value is one word where that is a list or None, and not a list of it."""
    return {
        name: value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list | None) else value
        for name, value in settings.items()
    }


class SettingsParser(SentenceParser, TrlParser):
    """For a command whose options are the fields of dataclasses, which a `--config` file may set as well."""

    def __init__(self, name: str, kinds: tuple[type, ...], doc: str):
        usage = f"crop-trl {name} [--config FILE] [--OPTION VALUE ...]"
        super().__init__(kinds, prog=f"crop-trl {name}", usage=usage, description=doc, formatter_class=_Help)
        hints = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}
        for action in self._actions:
            if action.dest in hints:
                action.type = _reading(action.type or str, get_args(hints[action.dest]), action.nargs == "+")
        self.add_argument("--config", help="YAML file of settings; the command line wins over it.")

    def settings(self, argv: list[str] | None) -> dict[str, Any]:
        """What the command line (`None`: of this process) and its `--config` file set, and nothing else."""
        file, given = self.layers(argv)
        given.pop("config", None)
        return {**file, **given}

    def layers(self, argv: list[str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the `--config` file sets, and what the command line sets over it; once for each parser."""
        argv = sys.argv[1:] if argv is None else argv
        if {"-h", "--help"} & set(argv):
            super().parse_known_args(["--help"])
        for action in self._actions:
            action.default = argparse.SUPPRESS
        given, unknown = self.parse_known_args(argv)
        self.refuse(unknown)
        file = vars(given).get("config")
        config = read_yaml(file) if file else {}
        for name, value in (config.pop("env", None) or {}).items():
            os.environ[name] = str(value)
        for source in (vars(given), config):
            if source.get("method") and source.get("selector"):
                one, other = source["method"], source["selector"]
                raise ValueError(f"`method` {one!r} and `selector` {other!r} exclude each other; give one.")
        # A file excludes nothing that the command line asks for.
        replaced = [("method", "selector"), ("selector", "method")]
        replaced += [(name, f"teacher_{what}") for name in _TEACHERS for what in ("model_name_or_path", "server_urls")]
        for one, other in replaced:
            if getattr(given, one, None) not in (None, "model"):
                config.pop(other, None)
        left = self.set_defaults_with_config(**config)
        if left:
            name = left[0].removeprefix("--")
            known = [action.dest for action in self._actions]
            raise ValueError(f"`{name}` in {file!r} is no setting; {nearest(name, known, 'remove it.')}")
        return _flat(vars(self.parse_known_args([])[0])), _flat(vars(given))

    def defaults(self) -> dict[str, Any]:
        """Values of the settings that nobody sets."""
        known = [field for kind in self.dataclass_types for field in fields(kind) if field.init]
        return {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in known}

    def read(self, argv: list[str] | None) -> tuple:
        """The dataclasses, filled."""
        return self.parse_dict(self.settings(argv))
