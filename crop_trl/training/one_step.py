"""One step off: an engine on cards of its own samples the next batch while this one is scored and trained."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, NamedTuple

from accelerate.utils import gather_object

from ..checks import NEUTRAL_SAMPLING
from ..config import CROPConfig
from ..prompts import TokenIds


class Begun(NamedTuple):
    """A batch that the server is asked for, with the weights of which step."""

    step: int
    prompts: list[TokenIds]
    answer: Future


class OneStep:
    """Looks one step ahead in a run's prompts, and asks its server for those responses in a thread."""

    def __init__(self, trainer):
        self.trainer, engine = trainer, trainer.vllm_generation
        self._following: Sequence[Mapping[str, Any]] | None = None  # rows of the next step
        self._read: tuple[Iterator, tuple] | None = None
        self._begun: Begun | None = None
        self._collect, trainer.get_batch_samples = trainer.get_batch_samples, self._look_ahead
        self._push, engine.sync_weights = engine.sync_weights, self._push_when_written
        self.client = engine.vllm_client if trainer.accelerator.is_main_process else None
        if self.client is not None:
            self._ask = self.client.generate

    def _look_ahead(self, batches: Iterator, *several) -> tuple:
        """See [`~transformers.Trainer.get_batch_samples`]; an epoch's last step has none after it."""
        if self._read is None or self._read[0] is not batches:
            self._read = batches, self._collect(batches, *several)
        now, following = self._read[1], self._collect(batches, *several)
        self._read = batches, following
        self._following = next(iter(following[0]), None)
        return now

    def _push_when_written(self) -> None:
        """Send the weights to the server once it has written what it was asked for with those that it has."""
        if self._begun is not None:
            wait([self._begun.answer])
        self._push()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within, training asks the engine for a step's responses; behind it, the next step's are begun."""
        if self.client is not None:
            self.client.generate = self._take
        try:
            yield
        finally:
            if self.client is not None:
                self.client.generate = self._ask
        self._begin()

    def _take(self, prompts: list[TokenIds], **asked) -> dict[str, list]:
        """What was begun a step before, if it was this, else what the server answers now."""
        step, begun = self.trainer.state.global_step, self._begun
        self._begun, self._asked = None, asked
        stale = begun is not None and (begun.step, begun.prompts) == (step - 1, prompts)
        self.trainer._metrics["train"]["off_policy/staleness"].append(int(stale))
        return begun.answer.result() if stale else self._ask(prompts=prompts, **asked)

    def _begin(self) -> None:
        """Ask for the next step's responses, with the weights that the server has just got."""
        state = self.trainer.state
        if self._following is None or state.global_step + 1 >= state.max_steps:
            return
        prompts = gather_object(self.trainer._tokenize_prompts([row["prompt"] for row in self._following])[0])
        if self.client is None:
            return
        self._begun = Begun(state.global_step, prompts[:: self.trainer.num_generations], Future())
        # A daemon: a server that hangs must not keep the program from ending.
        threading.Thread(target=self._work, args=(self._begun,), name="sampling ahead", daemon=True).start()

    def _work(self, begun: Begun) -> None:
        try:
            begun.answer.set_result(self._ask(prompts=begun.prompts, **self._asked))
        except BaseException as error:  # raised again by the thread that takes it
            begun.answer.set_exception(error)


def check_one_step(args: CROPConfig, given: Mapping[str, Any]) -> None:
    """Raise `ValueError` for `rollout_ahead` where a batch cannot be sampled ahead, or its ratio not be known."""
    if not args.rollout_ahead:
        return
    if not args.use_vllm or args.vllm_mode != "server":
        raise ValueError(
            "`rollout_ahead` needs an engine with cards of its own (`use_vllm` and `vllm_mode` 'server'); set both, or "
            "leave it at 0."
        )
    turns = next((name for name in ("tools", "environment_factory", "rollout_func") if given.get(name)), None)
    if turns:
        raise ValueError(f"`rollout_ahead` does not work with `{turns}`, which may go on after a turn; leave it at 0.")
    if args.score_ahead:
        raise ValueError("`rollout_ahead` and `score_ahead` are two ways to fill the same wait; leave one of them off.")
    if args.steps_per_rollout_batch > 1:
        raise ValueError(
            f"`rollout_ahead` needs batches of rollouts that feed one optimizer step each, and these feed "
            f"{args.steps_per_rollout_batch}; set `num_iterations` to 1 and `steps_per_generation` to "
            f"`gradient_accumulation_steps` ({args.gradient_accumulation_steps}), or leave it at 0."
        )
    sampling = {**vars(args), **(args.generation_kwargs or {})}
    changed = [name for name, same in NEUTRAL_SAMPLING.items() if sampling[name] != same]
    changed += ["stop_token_ids"] * (args.stop_token_ids is not None)
    if changed:
        raise ValueError(
            f"`rollout_ahead` compares with the engine's log-probabilities, which with `{changed[0]}` "
            f"{sampling[changed[0]]!r} are not the student's own; leave one of the two at its default."
        )
