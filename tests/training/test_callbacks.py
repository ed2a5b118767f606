"""Callbacks that watch a run."""

import warnings

import pytest
from tiny import make_rows, make_trainer
from transformers import TrainerControl, TrainerState, TrainingArguments

from crop_trl.training.callbacks import EngineGapWatch


def log(watch, gap, is_first=True):
    state = TrainerState(global_step=3, is_world_process_zero=is_first)
    watch.on_log(TrainingArguments("unused", use_cpu=True), state, TrainerControl(), logs={watch.METRIC: gap})


def test_warns_once_of_an_engine_that_samples_from_another_model():
    watch = EngineGapWatch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log(watch, 0.03)
        log(watch, 0.2, is_first=False)
    with pytest.warns(UserWarning, match="0.15 nats apart on average .* at step 3"):
        log(watch, 0.15)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log(watch, 0.5)


def test_console_lines_are_short(tmp_path, capsys):
    for reward_funcs, shown in (([], False), ([lambda completions, **kwargs: [1.0] * len(completions)], True)):
        trainer = make_trainer(tmp_path, reward_funcs=reward_funcs, max_steps=1, logging_steps=1, disable_tqdm=True)
        trainer.train()
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 1/1: loss")]
        (line,) = lines
        assert line.count(",") < 13 and "distillation/gap_kept" in line and "selection/retention_ratio 0." in line
        assert ("reward" in line) == shown
        assert len(trainer.state.log_history[0]) > 30


def test_responses_are_short_at_first(tmp_path):
    """Also in a resumed run; evaluations never are."""
    lengths = {}

    def longest(completion_ids, trainer_state, **kwargs):
        lengths.setdefault(trainer_state.global_step, []).append(max(map(len, completion_ids)))
        return [0.0] * len(completion_ids)

    def train(steps, resume=None):
        trainer = make_trainer(
            tmp_path,
            **{"reward_funcs": [longest], "eval_dataset": make_rows(2), "eval_strategy": "steps", "eval_steps": 1},
            **{"max_steps": steps, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.0},
            completion_length_schedule='{"3": 7, "2": 4}',
        )
        trainer.train(resume_from_checkpoint=resume)

    train(2)
    # An evaluation comes before the rollout of the next step.
    assert lengths == {0: [4], 1: [12, 4], 2: [12]}
    lengths.clear()
    train(4, resume=True)
    assert lengths == {2: [7], 3: [12, 12], 4: [12]}


def test_a_reward_that_judges_nothing_ends_no_run(tmp_path, capsys):
    def silent(completions, **kwargs):
        return [None] * len(completions)

    def loud(completions, **kwargs):
        return [1.0] * len(completions)

    make_trainer(tmp_path, reward_funcs=[silent, loud], max_steps=1, disable_tqdm=True).train()
    assert "rewards/loud/mean 1" in capsys.readouterr().out
