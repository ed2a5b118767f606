"""Checkpoints that are whole or not there, and say what they hold: a resumed run compares that with itself."""

import json
import os
import shutil
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import IterableDataset
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

from ..files import read_object, write_json
from ..models.adapters import is_adapter
from ..models.averaging import AverageWeights
from ..models.sharding import is_sharded, launch_name
from ..scoring.placement import AVERAGE
from .prompt_order import order_trouble, prompt_order

# Not the form of a name that is looked for when a run is resumed.
UNFINISHED = "checkpoint-unfinished"
MANIFEST = "manifest.json"
_WHOLE = "give the folder of a whole checkpoint"
_NEW_RUN = "or start a new run from its weights (`model_name_or_path`)"
# These split the same parts, and go on from each other's.
_ALIKE = {"ZeRO-1", "ZeRO-2"}
# By the name of the teacher that reads with it, and the process whose part it is.
_AVERAGE = "average_{}_{}.safetensors"


class SaveError(RuntimeError):
    """A model or a checkpoint could not be written, for instance to a full disk."""


def checkpoint_to_resume(given: str | bool | None, args, rows=None, adapter: bool | None = None) -> str | None:
    """The checkpoint that a run goes on from, `None` for a start; raises `ValueError` where it cannot."""
    if given is None or str(given).lower() == "false":
        return None
    if str(given).lower() == "true":
        given = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
        if given is None:
            raise ValueError(f"`resume_from_checkpoint` finds no checkpoint in `output_dir` {args.output_dir!r}.")
        if (Path(given) / MANIFEST).exists():
            _check_one_run(Path(given))
    trouble = _trouble(Path(given), args, rows, adapter)
    if trouble is not None:
        raise ValueError(f"`resume_from_checkpoint` {str(given)!r} {trouble}.")
    return str(given)


def last_with_steps_left(folder: Path, max_steps: int) -> str | None:
    """The last checkpoint of a run that is not at its end; `None` where there is none."""
    steps = {step: path for path in folder.glob("checkpoint-*") if (step := _step(path)) is not None}
    left = [step for step in steps if max_steps <= 0 or step < max_steps]
    return str(steps[max(left)]) if left else None


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself; empty where it says nothing. Raises `ValueError` for half of it."""
    path = folder / MANIFEST
    return read_object(path, _WHOLE) if path.exists() else {}


def write_manifest(folder: Path, args, **run) -> None:
    """Write down what a checkpoint holds on this disk, once all is there, and of which run it is."""
    # A model's page may be edited.
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".md")
    manifest = {
        **run,
        "launch": launch_name(args),
        "processes": args.world_size,
        "method": args.method,
        "optim": args.optim.value,
        "selector_sha256": getattr(args, "selector_sha256", None),
        "files": {path.relative_to(folder).as_posix(): path.stat().st_size for path in files},
    }
    write_json(folder / MANIFEST, manifest)


def _step(folder: Path) -> int | None:
    """The step of a checkpoint; `None` where it holds no state that can be read."""
    try:
        return json.loads((folder / "trainer_state.json").read_text())["global_step"] + 0
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_one_run(last: Path) -> None:
    """Raise `ValueError` for another run's checkpoint beside the last: a new run in an old folder has lower numbers."""
    runs = read_manifest(last).get("runs", [])
    for other in sorted(last.parent.glob("checkpoint-*")):
        theirs = read_manifest(other).get("runs", [])
        # Each start of a run adds a name, so those in an earlier checkpoint begin the list of a later one.
        if runs[: len(theirs)] != theirs:
            raise ValueError(
                f"`resume_from_checkpoint` true would take {str(last)!r}, but {other.name} beside it is of another "
                "run; give the folder of the one to go on from, or delete the other's."
            )


def _trouble(folder: Path, args, rows, adapter: bool | None) -> str | None:
    """What keeps a run from going on from a folder, and what to do; the first of it."""
    if not folder.is_dir():
        return "is no folder; give a checkpoint's, or true for the last"
    step = _step(folder)
    if step is None:
        return f"holds no trainer_state.json that can be read; {_WHOLE}"
    manifest = read_manifest(folder)
    if not manifest:
        return f"holds no {MANIFEST}; {_WHOLE}"
    was, now, processes = manifest["launch"], launch_name(args), manifest["processes"]
    if was != now and not {was, now} <= _ALIKE:
        return f"was written under {was}, and this run launches {now}; launch as it was written, {_NEW_RUN}"
    if processes != args.world_size:
        return (
            f"holds the states of {processes} process{'es' * (processes > 1)}, and this run has {args.world_size}; "
            f"launch as many, {_NEW_RUN}"
        )
    if adapter is not None and adapter != manifest["adapter"]:
        was, now = ("an adapter" if so else "a whole model" for so in (manifest["adapter"], adapter))
        return f"holds {was}, and this run trains {now}; set `peft_config` (`use_peft`) as it was, {_NEW_RUN}"
    if args.method == manifest["method"] and getattr(args, "selector_sha256", None) != manifest["selector_sha256"]:
        return f"was written with another version of {args.method!r}; put the file back, {_NEW_RUN}"
    was, now = manifest["optim"], args.optim.value
    if was.removesuffix("_fused") != now.removesuffix("_fused"):  # one algorithm with the same state
        return f"was written with `optim` {was}, and this run has {now}; set what it had, {_NEW_RUN}"
    trouble = None if args.ignore_data_skip else order_trouble(manifest["prompts"], prompt_order(args, rows))
    if trouble is not None:
        return trouble
    for name, size in manifest["files"].items():
        if not (folder / name).is_file():
            return f"holds no {name}, which is a part of it; {_WHOLE}"
        found = (folder / name).stat().st_size
        if found != size:
            return f"is damaged, {name} has {found} bytes and had {size}; {_WHOLE}"
    for name, teacher in args.each_teacher.items():
        if teacher.teacher_source == AVERAGE and not any(folder.glob(_AVERAGE.format(name, "*"))):
            return f"holds no average of the student's weights (`teacher_source` {AVERAGE!r}); {_NEW_RUN[3:]}"
    if not any(folder.glob("rng_state*.pth")):
        # A saved model, or what `save_only_model` leaves: the optimizer would start anew in silence.
        return f"holds no states of optimizer and random numbers; {_WHOLE}"
    if 0 < args.max_steps <= step:
        return f"is at step {step}, and `max_steps` {args.max_steps} leaves none to make; raise it"
    return None


class WholeCheckpoints:
    """Part of a [`~transformers.Trainer`]: a checkpoint is written under another name and renamed once all is there."""

    state: TrainerState
    # Optimizer steps that batches of rollouts still had to feed when a run ended: its prompts are further on by them.
    dropped_steps = 0
    # Averages of the weights in training, by the name of the teacher that reads with them.
    averages: Mapping[str, AverageWeights] = {}
    _staging: str | None = None
    _order: dict[str, Any] | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs):
        """See [`~transformers.Trainer.train`]. Raises `ValueError` for a checkpoint that cannot be gone on from."""
        adapter = is_adapter(self.model)
        checkpoint = checkpoint_to_resume(resume_from_checkpoint, self.args, self.train_dataset, adapter)
        self._runs, self._order, self._held, self.dropped_steps = [], None, set(), 0
        if checkpoint is not None:
            self._go_on_from(Path(checkpoint))
        self._runs.append(uuid.uuid4().hex[:12])
        self._goes_on_from = checkpoint
        return super().train(checkpoint, **kwargs)

    def _go_on_from(self, checkpoint: Path) -> None:
        """Take over what the manifest knows of the run, and say what is not as if it had never stopped."""
        manifest = read_manifest(checkpoint)
        self._runs, self.dropped_steps = manifest["runs"], manifest["dropped_steps"]
        rest = -(_step(checkpoint) + self.dropped_steps) % self.args.steps_per_rollout_batch
        self.dropped_steps += rest
        if rest and self.is_world_process_zero():
            a_stream = "their prompts are sampled anew, which a stream cannot skip"
            goes_on = a_stream if isinstance(self.train_dataset, IterableDataset) else "the next prompts follow"
            warnings.warn(
                f"{str(checkpoint)!r} lies inside a batch of rollouts, which is not saved: the {rest} optimizer "
                f"step{'s' * (rest > 1)} that it was still to feed {'are' if rest > 1 else 'is'} dropped, and "
                f"{goes_on}.",
                stacklevel=3,
            )

    def start_averages(self) -> None:
        """Begin the averages anew, or where the checkpoint left off, once the model is wrapped and has its weights."""
        for name, average in self.averages.items():
            average.start(self._goes_on_from and self._average_file(self._goes_on_from, name))

    def _average_file(self, folder: str | Path, name: str) -> Path:
        part = self.args.process_index if is_sharded(self.accelerator) else 0
        return Path(folder) / _AVERAGE.format(name, part)

    def _maybe_log_save_evaluate(self, *args, **kwargs) -> None:
        # Rollouts are not saved, so a checkpoint waits for the last step of a batch of them, or of the run; and so
        # does the evaluation that says whether it is the best.
        inside = (self.state.global_step + self.dropped_steps) % self.args.steps_per_rollout_batch > 0
        measured = self.args.save_strategy == "best" or self.args.load_best_model_at_end
        for name in ("should_save", "should_evaluate") if measured else ("should_save",):
            asked = getattr(self.control, name) or name in self._held
            waits = asked and inside and not self.control.should_training_stop
            (self._held.add if waits else self._held.discard)(name)
            setattr(self.control, name, asked and not waits)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _get_output_dir(self, trial) -> str:
        return self._staging or super()._get_output_dir(trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a whole model that can be loaded, also where checkpoints are shards. Raises [`SaveError`]."""
        if _internal_call:
            return super().save_model(output_dir, _internal_call)
        folder = output_dir or self.args.output_dir
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        usual = getattr(plugin, "state_dict_type", None)
        try:
            if plugin is not None:
                # A checkpoint may be in shards, but a user asks for a model to load; of shards nothing would be saved.
                plugin.set_state_dict_type("FULL_STATE_DICT")
            super().save_model(output_dir, _internal_call)
        except Exception as error:
            self._fail(f"the model to {folder!r} or upload it", error, ", and one there may be cut off")
        finally:
            if plugin is not None:
                plugin.set_state_dict_type(usual)

    def save_state(self) -> None:
        """See [`~transformers.Trainer.save_state`]. Raises [`SaveError`]."""
        try:
            super().save_state()
        except OSError as error:
            self._fail("trainer_state.json", error)

    def _fail(self, what: str, error: Exception, also: str = "") -> None:
        """Raise `SaveError`: who failed to save what, with how much room, why, and what to resume from."""
        free = shutil.disk_usage(self.args.output_dir).free / 2**30
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        last = get_last_checkpoint(self.args.output_dir)
        then = "start anew, since there is no checkpoint" if last is None else f"resume from {last}, which is whole"
        raise SaveError(
            f"Process {self.args.process_index} could not save {what} with {free:.1f} GiB free ({reason}){also}; mend "
            f"that, then {then}."
        ) from error

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # Uploads go on in the background, and the folder is about to be renamed.
        if self._staging is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_checkpoint(self, model, trial) -> None:
        run_dir = Path(self._get_output_dir(trial))
        staging = run_dir / UNFINISHED
        written, final = (folder / f"checkpoint-{self.state.global_step}" for folder in (staging, run_dir))
        if self.is_local_process_zero():
            shutil.rmtree(staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._staging = str(staging)
        try:
            super()._save_checkpoint(model, trial)
            for name, average in self.averages.items():
                if is_sharded(self.accelerator) or self.args.should_save:
                    average.save(self._average_file(written, name))
            if self.state.best_model_checkpoint == str(written):
                self.state.best_model_checkpoint = str(final)
                if self.args.should_save:
                    self.state.save_to_json(str(written / "trainer_state.json"))
            self._finish(written, final)
        except Exception as error:
            shutil.rmtree(staging, ignore_errors=True)
            self._fail(final.name, error)
        finally:
            self._staging = None
        if self.args.should_save:
            best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
            rotate_checkpoints(str(run_dir), limit, best, use_mtime=True)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def _finish(self, written: Path, final: Path) -> None:
        """Describe and rename once all processes are here; on machines that share no disk, each does so for itself."""
        for turn in (self.is_world_process_zero(), self.is_local_process_zero()):
            self.accelerator.wait_for_everyone()
            if turn and written.exists():
                if self._order is None:
                    self._order = prompt_order(self.args, self.train_dataset)
                run = {"runs": self._runs, "adapter": is_adapter(self.model), "prompts": self._order}
                write_manifest(written, self.args, **run, dropped_steps=self.dropped_steps)
                if final.exists():
                    os.replace(final, written.parent / "replaced")
                os.replace(written, final)
                shutil.rmtree(written.parent, ignore_errors=True)
        self.accelerator.wait_for_everyone()
