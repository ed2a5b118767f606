"""Callbacks that watch a run."""

import warnings

import pytest
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
