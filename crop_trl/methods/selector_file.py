"""A method of a user's own from a file, as `--selector FILE:NAME` names it."""

import hashlib
import importlib.util
import sys
from pathlib import Path

from .table import METHODS, Method


def register_selector(spec: str) -> tuple[str, str]:
    """Add what `FILE:NAME` defines, a [`Method`] or a function `(signals, ctx)` that scores tokens, to the table of
    methods; returns its name there and the SHA-256 of the file. Raises `ValueError`."""
    file, _, name = spec.rpartition(":")
    if not file or not name:
        raise ValueError(f"`selector` {spec!r} is not FILE:NAME, for example mine.py:surprise.")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"`selector` {spec!r}: there is no file {file!r}; name the Python file that defines {name!r}.")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    module_name = f"crop_trl_selector_{digest[:12]}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"`selector` {spec!r}: {file!r} is no Python file; its name has to end in .py.")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"`selector` {spec!r}: {file!r} does not run ({type(error).__name__}: {error}).") from error
    found = getattr(module, name, None)
    if found is None:
        raise ValueError(f"`selector` {spec!r}: {file!r} defines no {name!r}.")
    if not isinstance(found, Method):
        if not callable(found) or isinstance(found, type):
            raise ValueError(f"`selector` {spec!r} must be a function of (signals, ctx) or a `Method`, got {found!r}.")
        found = Method(score=found)
    METHODS[f"{path.name}:{name}"] = found
    return f"{path.name}:{name}", digest
