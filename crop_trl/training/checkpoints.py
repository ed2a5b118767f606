"""Checkpoints that are whole or not there at all."""

import json
import os
import shutil
from pathlib import Path

from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

from ..models.adapters import is_adapter
from .prompt_order import PROMPT_ORDER, prompt_order
from .resuming import checkpoint_to_resume

# Not the form of a name that is looked for when a run is resumed.
UNFINISHED = "checkpoint-unfinished"


class SaveError(RuntimeError):
    """A model or a checkpoint could not be written, for instance to a full disk."""


class WholeCheckpoints:
    """
    Part of a [`~transformers.Trainer`]: a checkpoint is written under another name and renamed once every process has
    written its share.

    A full disk or a killed process then leaves the last whole checkpoint as the one that a run resumes from, and older
    ones are deleted only afterwards.
    """

    state: TrainerState
    _staging: str | None = None
    _order: dict | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs):
        """See [`~transformers.Trainer.train`]. Raises `ValueError` for a checkpoint that cannot be gone on from."""
        adapter = is_adapter(self.model)
        checkpoint = checkpoint_to_resume(resume_from_checkpoint, self.args, self.train_dataset, adapter)
        self._order = None
        return super().train(checkpoint, **kwargs)

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
            said = self._failed_to_save(f"the model to {folder!r}", Path(folder), error)
            then = self._resume_from(Path(self.args.output_dir))
            raise SaveError(f"{said}, and one there may be cut off; mend that, then {then}.") from error
        finally:
            if plugin is not None:
                plugin.set_state_dict_type(usual)

    def save_state(self) -> None:
        """See [`~transformers.Trainer.save_state`]. Raises [`SaveError`]."""
        try:
            super().save_state()
        except OSError as error:
            said = self._failed_to_save("trainer_state.json", Path(self.args.output_dir), error)
            raise SaveError(f"{said}; mend that, then {self._resume_from(Path(self.args.output_dir))}.") from error

    def _failed_to_save(self, what: str, folder: Path, error: Exception) -> str:
        """Who failed to save what, with how much room, and why."""
        while not folder.exists():
            folder = folder.absolute().parent
        free = shutil.disk_usage(folder).free / 2**30
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"Process {self.args.process_index} could not save {what} with {free:.1f} GiB free ({reason})"

    @staticmethod
    def _resume_from(run_dir: Path) -> str:
        last = get_last_checkpoint(str(run_dir)) if run_dir.is_dir() else None
        return "start anew, since there is no checkpoint" if last is None else f"resume from {last}, which is whole"

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
            if self.args.should_save:
                if self._order is None:
                    self._order = prompt_order(self.args, self.train_dataset)
                (written / PROMPT_ORDER).write_text(json.dumps(self._order, indent=2) + "\n")
            if self.state.best_model_checkpoint == str(written):
                self.state.best_model_checkpoint = str(final)
                if self.args.should_save:
                    self.state.save_to_json(str(written / "trainer_state.json"))
        except Exception as error:
            said = self._failed_to_save(final.name, run_dir, error)
            shutil.rmtree(staging, ignore_errors=True)
            raise SaveError(f"{said}; mend that, then {self._resume_from(run_dir)}.") from error
        finally:
            self._staging = None
        self._rename(written, final)
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(run_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def _rename(self, written: Path, final: Path) -> None:
        """Rename once all processes are here; on machines that share no disk, each does so for itself."""
        for turn in (self.is_world_process_zero(), self.is_local_process_zero()):
            self.accelerator.wait_for_everyone()
            if turn and written.exists():
                if final.exists():
                    os.replace(final, written.parent / "replaced")
                os.replace(written, final)
                shutil.rmtree(written.parent, ignore_errors=True)
        self.accelerator.wait_for_everyone()
