"""What the benchmarks of whole steps share: rollouts with lengths that are given, and a clock round each step."""

import gc
import json
import statistics
import time
from collections.abc import Sequence

import torch
from baseline import synchronize
from torch._dynamo.utils import calculate_time_spent
from transformers import TrainerCallback

from crop_trl.scoring import TopKLogprobs


class GivenResponses:
    """Mixed in before a trainer on TRL's GRPO: its rollouts are `given_responses`, whatever the prompts."""

    given_responses: list[list[int]] = []

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return [list(ids) for ids in self.given_responses[: len(prompt_ids)]], None


class UniformTeacher:
    """A scorer that costs nothing: every entry equally likely. For timing what comes after scoring."""

    def __init__(self, top_k: int, vocab_size: int, device: str):
        self.top_k, self.vocab_size, self.device = top_k, vocab_size, device

    def score(self, prompt_ids, completion_ids) -> TopKLogprobs:
        """See [`~crop_trl.scoring.Scorer`]."""
        lengths = torch.tensor([len(ids) for ids in completion_ids], device=self.device)
        shape = (len(lengths), int(lengths.max()), self.top_k)
        logprobs = torch.full(shape, -float(torch.log(torch.tensor(self.vocab_size))), device=self.device)
        ids = torch.arange(self.top_k, dtype=torch.int32, device=self.device).expand(shape)
        mask = torch.arange(shape[1], device=self.device) < lengths[:, None]
        return TopKLogprobs(ids.contiguous(), logprobs, logprobs[..., 0].clone(), mask)


def given_lengths(llm, lengths: Sequence[int]) -> None:
    """Make a vLLM engine write responses of exactly these lengths, one for each prompt in order."""
    from vllm import SamplingParams

    generate = llm.generate

    def forced(prompts, sampling_params: SamplingParams, **kwargs):
        each = []
        for i in range(len(prompts)):
            params = sampling_params.clone()
            params.min_tokens = params.max_tokens = lengths[i % len(lengths)]
            params.ignore_eos = True
            each.append(params)
        return generate(prompts, sampling_params=each, **kwargs)

    llm.generate = forced


class StepClock(TrainerCallback):
    """
    Seconds of each optimizer step, and of the part of it before the first forward of the update.

    Attach with [`StepClock.attach`]. `methods`, if given, are taken in turns, one a step, by [`StepClock.take`].
    """

    def __init__(self, device: str, methods: Sequence[str] = ()):
        self.device, self.methods, self._turn = device, list(methods), None
        self.rows: list[dict] = []
        self._prepared = 0.0

    def attach(self, trainer) -> None:
        """Clock a trainer's steps."""
        self.trainer, prepare = trainer, trainer._prepare_inputs

        def timed(*args):
            synchronize(self.device)
            started = time.perf_counter()
            prepared = prepare(*args)
            synchronize(self.device)
            self._prepared += time.perf_counter() - started
            return prepared

        trainer._prepare_inputs = timed
        trainer.add_callback(self)

    def take(self, args, method: str) -> None:
        """Let the next step be one of this method."""
        args.method = method

    def on_step_begin(self, args, state, control, **kwargs):
        """Choose the step's method and start the clock."""
        if self.methods:
            self._turn = self.methods[state.global_step % len(self.methods)]
            self.take(args, self._turn)
        self._prepared, self._compiled = 0.0, calculate_time_spent()["total_wall_time"]
        synchronize(self.device)
        self._started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        """Stop the clock."""
        synchronize(self.device)
        step = time.perf_counter() - self._started
        metrics = {k: v[-1] for k, v in self.trainer._metrics["train"].items() if v}
        self.rows.append(
            {
                "method": self._turn or getattr(args, "method", "trl"),
                "step": step,
                "prepare": self._prepared,
                "update": step - self._prepared,
                # Of it, what compiling took: new shapes can ask for another graph in any step.
                "compiling": calculate_time_spent()["total_wall_time"] - self._compiled,
                **{k: float(v) for k, v in metrics.items() if k.startswith(("seconds/", "update/", "scoring/"))},
            }
        )
        # At once, so that a run that is cut off leaves what it had.
        print(json.dumps(self.rows[-1]), flush=True)

    def median(self, what: str, method: str | None = None, skip: int = 1) -> float:
        """Median over a method's steps but the first `skip` and, while others are left, those that compiled."""
        rows = [row for row in self.rows if method is None or row["method"] == method][skip:]
        settled = [row for row in rows if row["compiling"] < 0.01 * row["step"]]
        return statistics.median(row[what] for row in settled or rows)


def forget(*objects) -> None:
    """Give a trainer's memory back before the next one is built; call with what is deleted right after."""
    for trainer in objects:
        trainer.optimizer = trainer.lr_scheduler = trainer.model = trainer.model_wrapped = None
        trainer.accelerator.free_memory()
        trainer.__dict__.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
