"""How responses are sampled: from the student's own distribution, in one turn or in several."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from accelerate.utils import gather_object
from trl.generation import vllm_generation
from trl.models.utils import disable_gradient_checkpointing

from ..models.sampling import own_distribution
from ..prompts import (
    NEGATIVE,
    ORIGINAL,
    draw_negatives,
    needs_negatives,
    normal_prompt,
    prompt_kinds,
    tokenize_variants,
)
from .data import reads_own_teacher, teacher_of


@contextmanager
def speculating(config: Mapping[str, Any] | None) -> Iterator[None]:
    """Let an engine that TRL starts within speculate; TRL itself has no setting that reaches it."""
    if not config:
        yield
        return
    plain = vllm_generation.LLM
    vllm_generation.LLM = partial(plain, speculative_config=dict(config))
    try:
        yield
    finally:
        vllm_generation.LLM = plain


class Rollouts:
    """Mixed in before [`~trl.GRPOTrainer`], which samples; tools, environments and rollout functions write to it."""

    def _generate(self, prompts: list):
        started = time.perf_counter()
        output = super()._generate(prompts)
        _, completion_ids, written, *_ = output
        # What tools and environments wrote is no part of a response's length.
        self._lengths = [len(ids) for ids in completion_ids] if written is None else [sum(mask) for mask in written]
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["seconds/rollout"].append(time.perf_counter() - started)
        return output

    def _tokenize_prompts(self, prompts: list):
        return super()._tokenize_prompts([normal_prompt(prompt, self._tokenizer) for prompt in prompts])

    def _tokens(self, row: Mapping[str, Any], prompts: Sequence) -> list[list[int]]:
        """Token ids of a row's prompts, with the tools of its environment."""
        if self.environment_factories is not None:
            environment = row.get("environment") if self._multi_environment else None
            if environment not in self.environment_factories:
                known = ", ".join(self.environment_factories)
                raise ValueError(
                    f"A row's `environment` is {environment!r}, and `environment_factory` has {known}; name one."
                )
            self._batch_environments = [environment] * len(prompts)
        return self._tokenize_prompts(prompts)[0]

    def _to_be_read(self, inputs: Sequence[Mapping[str, Any]], prompt_ids: list[list[int]], needs: Sequence[str]):
        """The prompts after which responses are read, by kind for each row those it has, and the row's own teacher."""
        prompts = {ORIGINAL: [[ids] for ids in prompt_ids]}
        for kind in prompt_kinds(needs)[1:]:
            prompts[kind] = tokenize_variants(inputs, kind, lambda several: self._tokenize_prompts(several)[0])
        if needs_negatives(needs):
            first_row = self.accelerator.process_index * len(inputs)
            prompts[NEGATIVE] = draw_negatives(
                gather_object(prompt_ids),
                range(first_row, first_row + len(inputs)),
                self.args.credit_num_negatives,
                self.args.credit_seed,
                self.state.global_step,
            )
        names = list(self.teachers)
        return prompts, [teacher_of(row, names) if reads_own_teacher(needs) else names[0] for row in inputs]

    def _generate_single_turn(self, *args, **kwargs):
        ahead = self._one_step if self.model.training else nullcontext
        with ahead(), self._as_scored(), own_distribution(self.model), self._drawn():
            return super()._generate_single_turn(*args, **kwargs)

    def _roll_out(self, rollout_func: Callable, prompts: list, trainer) -> Mapping[str, Any]:
        """What a rollout function returns, which may sample with the model itself."""
        with self._as_scored(), own_distribution(self.model):
            output = rollout_func(prompts, trainer)
        lengths, mask = [len(ids) for ids in output.get("completion_ids", ())], output.get("env_mask")
        if lengths and len(lengths) != len(prompts):
            raise ValueError(
                f"`rollout_func` returned {len(lengths)} responses to {len(prompts)} prompts; give one each."
            )
        if mask is not None and [len(row) for row in mask] != lengths:
            raise ValueError("`env_mask` of `rollout_func` must have a 1 or 0 for each of `completion_ids`; give them.")
        return output

    @contextmanager
    def _as_scored(self) -> Iterator[None]:
        """Without dropout: tokens are drawn from the very distributions that scoring sees."""
        was_training = self.model.training
        self.model.eval()
        try:
            with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
                yield
        finally:
            self.model.train(was_training)
