"""Where a run of a study lies: a folder named by the settings in which it differs from its `--config` file."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import read_object, write_json
from ..text import masked
from ..training.results import FILE

SETTINGS, LOCK = "settings.json", ".lock"
# Checkpoints that a run keeps at least: from one of its last step nothing goes on.
KEPT = 2
# What changes nothing of what is trained and measured: where a run lies, what it saves and tells.
_APART = ("config", "output_dir", "runs_dir", "run_name", "project", "world", "heatmap", "view", "use_cpu")
_APART += ("disable_tqdm", "resume_from_checkpoint", "report_to", "selection_export_steps", "ddp_timeout")
_APART += ("compile_layers", "use_liger_kernel")  # nothing but rounding
_APART += ("shared_sampler",)  # the same distribution, from the same random numbers in another way
_APART_PREFIXES = ("logging_", "log_", "save_", "hub_", "push_to_hub", "trackio_", "dataloader_")
# What is asked of a student before it is trained: on benchmarks, and on the held-out problems of training.
OF_STUDENT = ("model_name_or_path", "model_revision", "prompt_template", "chat_template_kwargs", "conversational")
_OF_HELD_OUT = ("reward", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OF_HELD_OUT += ("generation_kwargs", "model_init_kwargs", "max_completion_length", "max_prompt_length")
_OF_HELD_OUT += ("max_prompt_length_kinds",)
# Settings that may name a file; its hash is a setting too.
_FILES, _HASH = ("selector", "dataset_name", "eval_dataset_name"), "_sha256"
# Names of files have at most 255 bytes.
_LONGEST_VALUE, _LONGEST_NAME = 40, 180


def is_apart(name: str) -> bool:
    """Whether a setting is none of those that make one run another."""
    return name in _APART or name.startswith(_APART_PREFIXES)


def is_of_untrained(name: str, held_out: bool) -> bool:
    """Whether a setting changes what the untrained student comes to, `held_out` problems included or not."""
    return name in OF_STUDENT or held_out and (name in _OF_HELD_OUT or name.startswith("eval_dataset_"))


def is_finished(folder: Path) -> bool:
    """Whether a run's folder has its result."""
    return (folder / FILE).is_file()


def settings_in(folder: Path) -> dict[str, Any]:
    """The settings of the run that a folder is of. Raises `ValueError` where they are gone or cut off."""
    if not (folder / SETTINGS).is_file():
        raise ValueError(f"{str(folder / SETTINGS)!r} is gone; delete the folder and train again.")
    return read_object(folder / SETTINGS, "delete the folder and train again")


def _as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: _in_one_spelling(name, value) for name, value in settings.items()}
    return json.loads(json.dumps(masked(found), default=str))


def _in_one_spelling(name: str, value: Any) -> Any:
    """A value that a text may hold in several: JSON, or a path."""
    if isinstance(value, str) and value.startswith(("{", "[")):
        with suppress(ValueError):
            return json.loads(value)
    is_path = isinstance(value, str) and value and name.endswith(("_path", "dataset_name", "selector"))
    return os.path.normpath(value) if is_path else value


def _cut(text: str, whole: str, length: int) -> str:
    return f"{text[:length].strip('-')}~{hashlib.sha256(whole.encode()).hexdigest()[:6]}"


def shown(value: Any) -> str:
    """A value as part of a file's name; what cannot stand there is left out and told apart by a hash."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    if len(text) <= _LONGEST_VALUE and re.fullmatch(r"[\w.+-]+", text, re.ASCII) and text.strip("."):
        return text
    # Of a path the last part says most.
    end = text if text[:1] in "{[" else text.rstrip("/").rpartition("/")[2]
    return _cut(re.sub(r"[^\w.+-]+", "-", end, flags=re.ASCII).strip("-"), text, _LONGEST_VALUE)


def joined(method: str, settings: Mapping[str, Any]) -> str:
    """A name of a method and settings."""
    name = ",".join([method, *(f"{name}={shown(value)}" for name, value in settings.items())])
    return name if len(name) <= _LONGEST_NAME else _cut(name, name, _LONGEST_NAME)


def is_unknown(name: str, value: Any) -> bool:
    """Whether a value tells nothing: the hash of a file that was not there or is not yet written down."""
    return value is None and name.endswith(_HASH)


def short(name: str, value: Any) -> Any:
    """A value to be read: of a hash the beginning."""
    return value[:8] if name.endswith(_HASH) and value else value


class OtherRunError(ValueError):
    """What stands under a run's name is another's."""


@dataclass(frozen=True)
class NamedRun:
    """A run of a study: `settings` are what its `--config` file and command line set, as JSON holds them."""

    world: str
    name: str
    settings: dict[str, Any]
    defaults: dict[str, Any]

    @property
    def key(self) -> str:
        """Its folder within the study's."""
        return f"{self.world}/{self.name}"

    @property
    def own_settings(self) -> dict[str, Any]:
        """Those that make it this run."""
        return {name: value for name, value in self.settings.items() if not is_apart(name)}

    def check_same(self, stored: Mapping[str, Any], where: str, here: str = "this one") -> None:
        """Raise [`OtherRunError`] where the settings stored under its name are another run's."""
        own, theirs = (_as_json({**self.defaults, **each}) for each in (self.settings, stored))
        for name in sorted({*own, *theirs}):
            values = theirs.get(name), own.get(name)
            if values[0] != values[1] and not is_apart(name) and not any(is_unknown(name, each) for each in values):
                its, here_it = (repr(short(name, each)) for each in values)
                raise OtherRunError(
                    f"{where} is of a run with `{name}` {its}, and in {here} it is {here_it}; give another folder, "
                    "another `world`, or take one of them away."
                )

    def check_folder(self, folder: Path) -> None:
        """[`check_same`] for what a run left in its folder: a result, or what one could go on from."""
        if is_finished(folder) or any(folder.glob("checkpoint-*")):
            self.check_same(settings_in(folder), repr(str(folder)))

    def claim(self, folder: Path) -> None:
        """Write down whose folder it is."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SETTINGS, self.own_settings)


def named_run(defaults: Mapping[str, Any], file: Mapping[str, Any], given: Mapping[str, Any]) -> NamedRun:
    """
    Name a run by method, by what the command line (`given`) changes of its `--config` file, and by seed.

    Args:
        defaults, file, given (`dict`): Settings; `given` may name the `config`.
    """
    defaults, file, given = _as_json(defaults), _as_json(file), _as_json(given)
    settings = {**file, **{name: value for name, value in given.items() if name != "config"}}
    for name in _FILES:
        source = str(settings.get(name) or "")
        path = Path(source.rpartition(":")[0] if name == "selector" else source).expanduser()
        if path.is_file():  # or it is on the hub, or the run will be refused
            settings[name.removesuffix("_name") + _HASH] = hashlib.sha256(path.read_bytes()).hexdigest()
    before, after = {**defaults, **file}, {**defaults, **settings}
    first = "selector" if after.get("selector") else "method"
    changed = [n for n in sorted(given) if not is_apart(n) and before.get(n) != after[n] and n not in (first, "seed")]
    name = joined(f"{first}={shown(after.get(first))}", {n: after.get(n) for n in (*changed, "seed")})
    world = after.get("world") or Path(given.get("config") or "run").stem
    return NamedRun(shown(world), name, settings, defaults)
