"""Checkpoints when something goes wrong while they are written, and resuming after it."""

import json
import os
import resource
from pathlib import Path

import pytest
import torch
from tiny import flat_weights, make_trainer, metric
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

SAVING = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}


class NoRoom(TrainerCallback):
    """From the third step on no file can grow beyond `largest` bytes, as on a disk that is all but full."""

    def __init__(self, largest: int):
        self.largest = largest
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.largest, self.limits[1]))

    def lift(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)


@pytest.mark.parametrize("broken", ["model.safetensors", "optimizer.pt"])
def test_a_full_disk_leaves_the_last_whole_checkpoint(tmp_path, broken):
    whole = make_trainer(tmp_path / "whole", max_steps=4, **SAVING)
    whole.train()
    assert [path.name for path in (tmp_path / "whole").glob("checkpoint-*")] == ["checkpoint-4"]
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "whole" / "checkpoint-4").iterdir()}
    assert sizes["model.safetensors"] < sizes["optimizer.pt"]

    no_room = NoRoom(sizes[broken] - 1000)
    stopped = make_trainer(tmp_path / "stopped", max_steps=4, callbacks=[no_room], **SAVING)
    try:
        with pytest.raises(
            RuntimeError, match="could not save checkpoint-4 with .* GiB free.*checkpoint-2 is whole, resume from it"
        ):
            stopped.train()
    finally:
        no_room.lift()
    assert [path.name for path in (tmp_path / "stopped").glob("checkpoint-*")] == ["checkpoint-2"]

    resumed = make_trainer(tmp_path / "stopped", max_steps=4, **SAVING)
    resumed.train(resume_from_checkpoint=True)
    assert metric(resumed, "selection/selected_tokens") == metric(whole, "selection/selected_tokens")
    torch.testing.assert_close(flat_weights(resumed.model), flat_weights(whole.model), rtol=0, atol=0)
    assert [path.name for path in (tmp_path / "stopped").glob("checkpoint-*")] == ["checkpoint-4"]


def test_what_a_killed_process_left_is_no_checkpoint(tmp_path):
    left = tmp_path / "checkpoint-unfinished" / "checkpoint-2"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    assert get_last_checkpoint(str(tmp_path)) is None
    # One that is there already, as after resuming from an older one, is replaced.
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "old").touch()
    make_trainer(tmp_path, max_steps=2, **SAVING).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert not (tmp_path / "checkpoint-2" / "old").exists()
    assert (tmp_path / "checkpoint-2" / "trainer_state.json").exists()


def test_the_best_checkpoint_is_known_by_its_final_name(tmp_path):
    trainer = make_trainer(
        tmp_path,
        max_steps=4,
        eval_dataset=make_trainer(tmp_path / "rows").train_dataset.select(range(2)),
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        **SAVING,
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.is_dir() and best.parent == tmp_path
    saved = json.loads((Path(get_last_checkpoint(str(tmp_path))) / "trainer_state.json").read_text())
    assert saved["best_model_checkpoint"] in {os.fspath(path) for path in tmp_path.glob("checkpoint-*")}
