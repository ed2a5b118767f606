"""The settings of a run as the training script reads them: a YAML file, and options that win over it."""

import difflib
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import yaml
from trl import ModelConfig

from crop_trl import CROPConfig

ROOT = Path(__file__).resolve().parents[1]


def read_yaml(path: Path) -> dict:
    """A YAML file of settings. Raises `ValueError` when there is none, or it holds something else."""
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ValueError(f"{str(path)!r} cannot be read ({reason}); name a YAML file of settings.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{str(path)!r} holds no settings; write lines such as `name: value`.")
    return found


def read_options(options: Sequence[str]) -> dict:
    """`--name value`, `--name=value`, `--name` for true, several values for a list; values are read as YAML."""
    found, name = {}, None
    for option in options:
        if option.startswith("--"):
            name, equals, value = option[2:].partition("=")
            found[name] = [value] if equals else []
        elif name is None:
            raise ValueError(f"{option!r} belongs to no option; give settings as `--name value`.")
        else:
            found[name].append(option)
    read = {name: [yaml.safe_load(value) for value in values] for name, values in found.items()}
    return {name: True if not values else values[0] if len(values) == 1 else values for name, values in read.items()}


def read_settings(path: Path | None, options: Sequence[str]) -> dict:
    """
    Settings of `examples/train_crop.py`.

    Args:
        path (`Path`, *optional*): YAML file; by default nothing is set.
        options (sequence of `str`): Of the command line.

    Returns:
        `dict`

    Raises:
        `ValueError`: a file that cannot be read, or a name that the training script does not know.
    """
    if str(ROOT / "examples") not in sys.path:
        sys.path.append(str(ROOT / "examples"))
    from train_crop import ScriptArguments

    known = {field.name for kind in (CROPConfig, ModelConfig, ScriptArguments) for field in fields(kind)} | {"env"}
    found = {**(read_yaml(path) if path else {}), **read_options(options)}
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            raise ValueError(
                f"`{name}` is no setting of a run; {f'did you mean `{near[0]}`?' if near else 'remove it.'}"
            )
    return found
