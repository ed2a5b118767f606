"""Checkpoints when something goes wrong while they are written, and resuming after it."""

import json
import os
import re
import resource
import shutil
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from tiny import flat_weights, make_rows, make_trainer, metric
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from crop_trl.training.callbacks import RolloutCallback
from crop_trl.training.checkpoints import SaveError, checkpoint_to_resume

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


class Prompts(RolloutCallback):
    """The rows whose prompts were sampled from, two in each step."""

    def __init__(self):
        self.ids = []

    def on_rollout(self, args, state, control, rollout, **kwargs):
        self.ids += dict.fromkeys(row["id"] for row in rollout.rows)


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
            SaveError, match="could not save checkpoint-4 with .* GiB free.*resume from .*checkpoint-2, which is whole"
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


def test_the_last_model_on_a_full_disk(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2, **SAVING)
    trainer.train()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for save, size, what in ((trainer.save_model, 50_000, "the model to "), (trainer.save_state, 500, "trainer_state")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with pytest.raises(
                SaveError, match=f"could not save {what}.* GiB free .*too large.*resume from .*checkpoint-2, which is w"
            ):
                save()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


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


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of two steps with its checkpoint, its model and its state."""
    folder = tmp_path_factory.mktemp("saved")
    trainer = make_trainer(folder, max_steps=2, **SAVING)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    return folder


def edit(name: str, change):
    def write(folder):
        (folder / name).write_text(json.dumps(change(json.loads((folder / name).read_text()))))

    return write


def cut(name: str):
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 100)


def remove(name: str):
    return lambda folder: (folder / name).unlink()


DAMAGE = [
    (remove("optimizer.pt"), "holds no optimizer.pt, which is a part of it; give the folder of a whole checkpoint"),
    (remove("scheduler.pt"), "holds no scheduler.pt, which is a part of it"),
    (remove("model.safetensors"), "holds no model.safetensors, which"),
    (remove("rng_state.pth"), "holds no rng_state.pth, which"),
    (remove("trainer_state.json"), "holds no trainer_state.json that can be read; give the folder of a whole"),
    (cut("trainer_state.json"), "holds no trainer_state.json that can be read"),
    (edit("trainer_state.json", lambda state: {**state, "global_step": "2"}), "holds no trainer_state.json that can"),
    (edit("trainer_state.json", lambda state: [state]), "holds no trainer_state.json that can be read"),
    (edit("trainer_state.json", lambda state: {"global_step": 2}), "is damaged, trainer_state.json has 18 bytes and "),
    (cut("model.safetensors"), "is damaged, model.safetensors has"),
    (cut("optimizer.pt"), "is damaged, optimizer.pt has"),
    (cut("manifest.json"), "is not whole JSON (cut off, perhaps); give the folder of a whole checkpoint"),
    (
        edit("manifest.json", lambda manifest: {**manifest, "processes": 2}),
        "holds the states of 2 processes, and this run has 1; launch as many, or start a new run from its weights",
    ),
    (
        edit("manifest.json", lambda manifest: {**manifest, "launch": "ZeRO-3"}),
        "was written under ZeRO-3, and this run launches no sharding; launch as it was written, or start a new run",
    ),
    (
        edit("manifest.json", lambda manifest: {**manifest, "optim": "sgd"}),
        "was written with `optim` sgd, and this run has adamw",
    ),
    (
        edit("manifest.json", lambda manifest: {**manifest, "selector_sha256": "0"}),
        "was written with another version of 'crop'; put the file back, or start a new run from its weights",
    ),
]


def test_a_checkpoint_that_cannot_be_gone_on_from(saved, tmp_path):
    args = make_trainer(tmp_path, max_steps=4, **SAVING).args
    folder, wrong = tmp_path / "checkpoint-2", []
    for change, sentence in DAMAGE:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(saved / "checkpoint-2", folder)
        (folder / "README.md").write_text("A page that was edited is no damage.")
        assert checkpoint_to_resume(True, args) == str(folder)
        change(folder)
        with pytest.raises(ValueError) as refused:
            checkpoint_to_resume("true", args)
        if f"{str(folder)!r} {sentence}" not in str(refused.value).replace("/manifest.json", ""):
            wrong.append((sentence, str(refused.value)))
    assert not wrong


def test_a_finished_run_makes_no_step_more(saved):
    """And a run's own folder is no checkpoint, though a model and its state may lie in it."""
    trainer = make_trainer(saved, max_steps=2, **SAVING)
    with pytest.raises(ValueError, match="is at step 2, and `max_steps` 2 leaves none to make; raise it"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="holds no manifest.json; give the folder of a whole checkpoint"):
        trainer.train(resume_from_checkpoint=str(saved))
    with pytest.raises(ValueError, match="'nowhere' is no folder; give a checkpoint's, or true for the last"):
        trainer.train(resume_from_checkpoint="nowhere")
    assert checkpoint_to_resume(None, trainer.args) is checkpoint_to_resume("False", trainer.args) is None


def test_a_new_run_in_an_old_folder_does_not_go_on_from_the_old_one(tmp_path):
    saving = {**SAVING, "save_total_limit": None}
    make_trainer(tmp_path, max_steps=4, **saving).train()
    make_trainer(tmp_path, max_steps=6, **saving).train(resume_from_checkpoint=True)
    # First one that went on from an earlier step than the last, to try something else; then one from the start.
    for beginning, until in ((str(tmp_path / "checkpoint-2"), 4), (None, 2)):
        again = make_trainer(tmp_path, max_steps=until, learning_rate=1e-3, **saving)
        again.train(resume_from_checkpoint=beginning)
        # A copy may have any times.
        os.utime(tmp_path / "checkpoint-6")
        with pytest.raises(
            ValueError, match=f"true would take .*-6', but checkpoint-{until} beside it is of another run; give the fo"
        ):
            checkpoint_to_resume(True, again.args)
    args = make_trainer(tmp_path, max_steps=8, **saving).args
    for remedy in (str(tmp_path / "checkpoint-2"), True):
        assert checkpoint_to_resume(remedy, args) == str(tmp_path / "checkpoint-2")
        for other in (4, 6):
            shutil.rmtree(tmp_path / f"checkpoint-{other}", ignore_errors=True)


ORDERS = [
    (
        {"num_generations": 2},
        r"was written with `num_generations` 4 \(now 2\); set",
    ),
    (
        {"per_device_train_batch_size": 4},
        r"was written with `per_device_train_batch_size` 8 \(now 4\); set",
    ),
    ({"steps_per_generation": 2}, r"was written with `steps_per_generation` 1 \(now 2\);"),
    ({"num_iterations": 2}, r"was written with `num_iterations` 1 \(now 2\);"),
    (
        {"shuffle_dataset": True, "seed": 7},
        r"was written with `shuffle_dataset` False \(now True\), `seed` \d+ \(now 7\); set",
    ),
    ({"rows": make_rows(20)}, r"was written with 16 prompts \(now 20 other ones, or in another order\); set"),
    (
        {"rows": make_rows(16, seed=1)},
        r"was written with 16 prompts \(now 16 other ones, or in another order\); set",
    ),
    ({"rows": make_rows(16).select(range(15, -1, -1))}, r".*now 16 other ones, or in another order\); set"),
]


def test_other_prompts_than_the_run_would_have_taken(saved, tmp_path):
    shutil.copytree(saved / "checkpoint-2", tmp_path / "checkpoint-2")
    wrong = []
    for changed, sentence in ORDERS:
        trainer = make_trainer(tmp_path, max_steps=4, **changed, **SAVING)
        # Before a model is loaded, where the settings say it already.
        early = {**changed, "student": "nowhere", "resume_from_checkpoint": "true"}
        for attempt in (
            partial(trainer.train, resume_from_checkpoint=True),
            partial(make_trainer, tmp_path, max_steps=4, **early, **SAVING),
        ):
            with pytest.raises(ValueError) as refused:
                attempt()
            if not re.search(f"checkpoint-2' {sentence}", str(refused.value)):
                wrong.append((sentence, str(refused.value)))
    assert not wrong


def test_what_may_change_when_a_run_goes_on(saved, tmp_path):
    """Half the micro-batch in twice as many, another schedule, a seed that nothing is drawn with, rows made anew."""
    shutil.copytree(saved / "checkpoint-2", tmp_path / "checkpoint-2")
    parts = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = make_trainer(tmp_path, rows=make_rows(16), max_steps=3, learning_rate=1e-3, seed=9, **parts, **SAVING)
    trainer.train(resume_from_checkpoint=True)
    whole = make_trainer(tmp_path / "whole", max_steps=3)
    whole.train()
    assert trainer.state.global_step == 3 and list(trainer._logs["prompt"]) == list(whole._logs["prompt"])


def test_an_adapter_and_a_whole_model_are_not_gone_on_from_alike(saved, tmp_path):
    lora = {"peft_config": LoraConfig(r=2, target_modules="all-linear")}
    shutil.copytree(saved / "checkpoint-2", tmp_path / "whole" / "checkpoint-2")
    make_trainer(tmp_path / "adapter", max_steps=2, **lora, **SAVING).train()
    for held, other, sentence in (
        ("whole", lora, "holds a whole model, and"),
        ("adapter", {}, "holds an adapter, and"),
    ):
        trainer = make_trainer(tmp_path / held, max_steps=4, **other, **SAVING)
        with pytest.raises(ValueError, match=f"checkpoint-2' {sentence} this run trains .*`peft_config`"):
            trainer.train(resume_from_checkpoint=True)
        with pytest.raises(ValueError, match=sentence):
            make_trainer(tmp_path / held, student="nowhere", max_steps=4, resume_from_checkpoint="true", **other)
    again = make_trainer(tmp_path / "adapter", max_steps=3, **lora, **SAVING)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3


def test_a_run_goes_on_in_a_later_epoch_with_the_order_of_that_epoch(tmp_path):
    """Four steps make an epoch; saved within the second and resumed, within the third and at its beginning."""
    settings = {"rows": make_rows(8), "shuffle_dataset": True, **SAVING, "save_steps": 1, "save_total_limit": None}
    whole = make_trainer(tmp_path, max_steps=10, callbacks=[seen := Prompts()], **settings)
    whole.train()
    assert sorted(seen.ids[:8]) == sorted(seen.ids[8:16]) and seen.ids[:8] != seen.ids[8:16]
    for step in (4, 6, 9):
        resumed = make_trainer(tmp_path, max_steps=10, callbacks=[again := Prompts()], **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert again.ids == seen.ids[2 * step :]
        torch.testing.assert_close(flat_weights(resumed.model), flat_weights(whole.model), rtol=0, atol=0)


class Asks(TrainerCallback):
    """Asks for a checkpoint after some steps, and ends the run after one."""

    def __init__(self, saves: tuple[int, ...], stop: int | None = None):
        self.saves, self.stop = saves, stop

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save |= state.global_step in self.saves
        control.should_training_stop |= state.global_step == self.stop


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))


def test_a_checkpoint_waits_for_the_end_of_a_batch_of_rollouts_or_of_the_run(tmp_path):
    asked = {"save_strategy": "no", "max_steps": 6}
    by_default = {"save_strategy": "steps", "save_steps": 500}
    cases = [
        ([2, 3], {"num_iterations": 2, "max_steps": 3, "save_strategy": "steps", "save_steps": 2}, None),
        ([3], {"num_iterations": 2, "max_steps": 3, "save_strategy": "steps", "save_steps": 0.99}, None),
        ([4, 6], {"num_iterations": 2, "max_steps": 6, "save_strategy": "steps", "save_steps": 3}, None),
        ([3], {"num_iterations": 3, "max_steps": 3, **by_default}, None),
        ([1], {"num_iterations": 3, "max_steps": 1, "save_strategy": "epoch"}, None),
        ([2, 4], {"num_iterations": 2, **asked}, Asks((1, 4))),
        ([4], {"per_device_train_batch_size": 2, "steps_per_generation": 4, **asked}, Asks((1, 2, 3))),
        ([3], {"num_iterations": 4, **asked}, Asks((1,), stop=3)),
        ([], {"num_iterations": 4, **asked}, Asks((), stop=3)),
    ]
    wrong = []
    for number, (expected, settings, callback) in enumerate(cases):
        folder = tmp_path / str(number)
        trainer = make_trainer(folder, **settings)
        if callback is not None:
            trainer.add_callback(callback)
        trainer.train()
        if steps_of(folder) != expected:
            wrong.append((settings, expected, steps_of(folder)))
    assert not wrong


@pytest.mark.parametrize("strategy", [{"save_strategy": "best"}, {**SAVING, "load_best_model_at_end": True}])
def test_what_is_best_is_measured_where_it_can_be_saved(tmp_path, strategy):
    trainer = make_trainer(
        tmp_path,
        max_steps=7,
        num_iterations=2,
        eval_dataset=make_rows(2),
        eval_strategy="steps",
        metric_for_best_model="eval_loss",
        **{**strategy, "save_total_limit": None, "eval_steps": 1, "save_steps": 1},
    )
    trainer.train()
    measured = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert measured == [2, 4, 6, 7] and 2 in steps_of(tmp_path) and set(steps_of(tmp_path)) <= set(measured)
    best = min((entry["eval_loss"], entry["step"]) for entry in trainer.state.log_history if "eval_loss" in entry)[1]
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")


@pytest.mark.parametrize("shuffle", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_that_ended_inside_a_batch_of_rollouts_goes_on_at_the_next_prompts(tmp_path, shuffle):
    """Three batches of rollouts make an epoch of six steps; the second batch and the one after the next are cut."""
    settings = {"rows": make_rows(6), "num_iterations": 2, "shuffle_dataset": shuffle, **SAVING}
    settings |= {"save_total_limit": None, "learning_rate": 1e-2}
    make_trainer(tmp_path / "whole", max_steps=18, callbacks=[whole := Prompts()], **settings).train()
    batches = [whole.ids[i : i + 2] for i in range(0, len(whole.ids), 2)]
    assert len(batches) == 9 and (batches[:3] == batches[3:6]) is not shuffle
    make_trainer(tmp_path, max_steps=3, **settings).train()

    resumed = make_trainer(tmp_path, max_steps=6, callbacks=[seen := Prompts()], **settings)
    said = "checkpoint-3' lies inside .*: the 1 optimizer step that it was still to feed is dropped, and the next promp"
    with pytest.warns(UserWarning, match=said):
        resumed.train(resume_from_checkpoint=True)
    # Steps 4 and 5, and the first of two from the next epoch.
    assert seen.ids == batches[2] + batches[3] and steps_of(tmp_path) == [2, 3, 5, 6]
    again = make_trainer(tmp_path / "again", max_steps=6, callbacks=[seen := Prompts()], **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lies inside")
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert seen.ids == batches[3]
    torch.testing.assert_close(flat_weights(again.model), flat_weights(resumed.model), rtol=0, atol=0)

    last = make_trainer(tmp_path, max_steps=14, callbacks=[seen := Prompts()], **settings)
    with pytest.warns(UserWarning, match="checkpoint-6' lies inside"):
        last.train(resume_from_checkpoint=True)
    assert seen.ids == sum(batches[4:8], []) and last.state.global_step == 14


def test_a_stream_that_ended_inside_a_batch_of_rollouts_goes_on(tmp_path):
    settings = {"rows": make_rows(16).to_iterable_dataset(), "num_iterations": 2, **SAVING}
    make_trainer(tmp_path, max_steps=3, **settings).train()
    resumed = make_trainer(tmp_path, max_steps=7, callbacks=[seen := Prompts()], **settings)
    with pytest.warns(UserWarning, match="is dropped, and their prompts are sampled anew, which a stream cannot skip"):
        resumed.train(resume_from_checkpoint=True)
    assert seen.ids == ["2", "3", "4", "5"] and resumed.state.global_step == 7
