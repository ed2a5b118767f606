"""Callbacks of [`~crop_trl.CROPTrainer`]."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from ..methods import Selection
from .responses import ScoredResponses


class StepCounter(TrainerCallback):
    """Puts the trainer's count of forward passes back where a checkpoint left it."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        steps = state.global_step + self.trainer.dropped_steps
        self.trainer._step = steps * args.gradient_accumulation_steps
        self.trainer._buffered_inputs = None

    def on_train_end(self, args, state, control, **kwargs):
        if state.global_step == 0:
            raise ValueError("No step was made: the dataset has fewer usable prompts than one step takes.")


class AverageKeeper(TrainerCallback):
    """Takes the weights after each optimizer step into the averages that teachers read with."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.start_averages()

    def on_step_end(self, args, state, control, **kwargs):
        for average in self.trainer.averages.values():
            average.update()


class LengthSchedule(TrainerCallback):
    """Limits the responses sampled in a step as `completion_length_schedule` says; evaluations come after it."""

    def __init__(self, trainer, schedule: Mapping[str, int]):
        self.trainer, self.longest = trainer, trainer.max_completion_length
        self.limits = sorted((int(step), limit) for step, limit in schedule.items())

    def _limit(self, tokens: int) -> None:
        self.trainer.max_completion_length = tokens
        if self.trainer.args.use_vllm:
            self.trainer.vllm_generation.max_completion_length = tokens
        else:
            self.trainer.generation_config.max_new_tokens = tokens

    def on_step_begin(self, args, state, control, **kwargs):
        self._limit(next((limit for step, limit in self.limits if state.global_step < step), self.longest))

    def on_step_end(self, args, state, control, **kwargs):
        self._limit(self.longest)


class EngineGapWatch(TrainerCallback):
    """Warns, once, when the sampling engine and the trainer disagree on the tokens that were sampled."""

    # Nats. In bf16 the two differ by 0.002 to 0.03 on average; stale weights or wrong positions by far more.
    LIMIT = 0.1
    METRIC = "sampling/sampling_logp_difference/mean"

    def __init__(self):
        self._warned = False

    def on_log(self, args, state, control, logs=None, **kwargs):
        gap = (logs or {}).get(self.METRIC) or 0.0
        stale = (logs or {}).get("off_policy/staleness")  # the update between is then a part of it
        if gap > self.LIMIT and not stale and not self._warned and state.is_world_process_zero:
            self._warned = True
            said = f"nats apart on average (`{self.METRIC}` at step {state.global_step}), more than precision explains"
            warnings.warn(f"vLLM and the trainer are {gap:.2f} {said}: do both load the same weights?", stacklevel=2)


# Of some fifty metrics, those that tell whether a run is well. What a run reports to gets all of them.
_CONSOLE = (
    *("loss", "grad_norm", "learning_rate", "distillation/gap_kept", "selection/retention_ratio", "entropy"),
    *("completions/mean_length", "completions/clipped_ratio", "seconds/rollout", "seconds/scoring", "seconds/update"),
    *("eval_loss", "eval_completions/mean_length", "train_loss", "train_runtime"),
)


def console_line(logs: Mapping[str, Any], state) -> str:
    """A log entry for reading: a dozen metrics, rewards among them where there are any."""
    rewards = [n for n in logs if n.endswith("/mean") and "rewards/" in n and not n.endswith("no_reward/mean")]
    shown = [f"{name} {logs[name]:.4g}" for name in (*_CONSOLE, *rewards) if logs.get(name) is not None]
    return f"step {state.global_step}/{state.max_steps}: {', '.join(shown)}"


class ConsoleLines(ProgressCallback):
    """The progress bar of transformers, with short lines between its steps."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            tqdm.write(console_line(logs, state))


class PlainConsoleLines(PrinterCallback):
    """The same lines without a progress bar (`disable_tqdm`)."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_local_process_zero and logs:
            print(console_line(logs, state))


@dataclass
class RolloutRecord(ScoredResponses):
    """
    One process's batch of rollouts, as it was sampled and scored, with what is kept of it.

    Args:
        step, rows, prompt_ids, completion_ids, loss_mask, signals, tokenizer, rewards, advantages:
            See [`~crop_trl.training.responses.ScoredResponses`].
        first_row (`int`): Place of the first response in the rollout batch of all processes.
        selection ([`~crop_trl.methods.Selection`]): What enters the loss, `[B, T]`.
    """

    first_row: int
    selection: Selection


class RolloutCallback(TrainerCallback):
    """A callback that also sees every batch of rollouts that is trained on; each process sees its own."""

    def on_rollout(self, args, state, control, rollout: RolloutRecord, **kwargs):
        """
        Event called once a batch of rollouts is scored and its kept tokens are known, before the update.

        Args:
            args ([`~crop_trl.CROPConfig`]), state, control: As for every callback.
            rollout ([`RolloutRecord`]): To be read, not changed.
        """


def notify_rollout(trainer, rollout: RolloutRecord) -> None:
    """Call `on_rollout` of the trainer's callbacks that have it."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, RolloutCallback):
            callback.on_rollout(trainer.args, trainer.state, trainer.control, rollout=rollout)
