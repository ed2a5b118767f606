"""Checkpoints that are whole or not there at all."""

import os
import shutil
from pathlib import Path

from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

from .resuming import checkpoint_to_resume

# Not the form of a name that is looked for when a run is resumed.
UNFINISHED = "checkpoint-unfinished"


class WholeCheckpoints:
    """
    Part of a [`~transformers.Trainer`]: a checkpoint is written under another name and renamed once every process has
    written its share.

    A full disk or a killed process then leaves the last whole checkpoint as the one that a run resumes from, and older
    ones are deleted only afterwards.
    """

    state: TrainerState
    _staging: str | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs):
        """See [`~transformers.Trainer.train`]. Raises `ValueError` for a checkpoint that cannot be gone on from."""
        return super().train(checkpoint_to_resume(resume_from_checkpoint, self.args), **kwargs)

    def _get_output_dir(self, trial) -> str:
        return self._staging or super()._get_output_dir(trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a whole model that can be loaded, also where checkpoints are shards."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is None or _internal_call:
            return super().save_model(output_dir, _internal_call)
        # A checkpoint may be in shards, but what a user asks for is a model to load; of shards nothing would be saved.
        usual = plugin.state_dict_type
        plugin.set_state_dict_type("FULL_STATE_DICT")
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            plugin.set_state_dict_type(usual)

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
            if self.state.best_model_checkpoint == str(written):
                self.state.best_model_checkpoint = str(final)
                if self.args.should_save:
                    self.state.save_to_json(str(written / "trainer_state.json"))
        except Exception as error:
            free = shutil.disk_usage(run_dir).free / 2**30
            shutil.rmtree(staging, ignore_errors=True)
            last = get_last_checkpoint(str(run_dir)) if run_dir.is_dir() else None
            remedy = "there is none before it" if last is None else f"{last} is whole, resume from it"
            raise RuntimeError(
                f"Process {self.args.process_index} could not save {final.name} "
                f"with {free:.1f} GiB free "
                f"({str(error).splitlines()[0] if str(error) else type(error).__name__}); {remedy} once there is room."
            ) from error
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
