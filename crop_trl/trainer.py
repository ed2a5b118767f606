"""Selective on-policy distillation on TRL's GRPO trainer.

What GRPO does is left to it: sampling, rewards and their advantages, logging, checkpoints. This file adds three stages
to a step and knows no method by name: score the sampled responses (`scoring/signals.py`), decide what is kept
(`methods/table.py`), and update on the kept tokens (`training/loss.py`).

Departures from GRPOTrainer: rollouts are laid out in one piece and re-cut by length before the update; only kept
tokens are projected onto the vocabulary; the loss is a mean over the kept tokens of the global batch of one
optimizer step.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback
from trl import GRPOTrainer

from . import methods
from .checks import TOPK, check_output_dir
from .config import CROPConfig
from .methods.divergence import target_divergence
from .models.adapters import is_adapter
from .models.distributed import gather_ragged
from .models.graph_sampling import drawing_by, make_sampler
from .prompts import STUDENT, TEACHER, prompt_column, prompt_kinds
from .scoring import Scorer
from .scoring.signals import collect_signals
from .training import data
from .training.ahead import Ahead, check_ahead
from .training.arguments import (
    check_arguments,
    check_kinds,
    check_order,
    check_readers,
    name_teachers,
    no_reward,
    prompt_maker,
    ready_student,
)
from .training.callbacks import (
    AverageKeeper,
    ConsoleLines,
    EngineGapWatch,
    LengthSchedule,
    PlainConsoleLines,
    RolloutRecord,
    StepCounter,
    notify_rollout,
)
from .training.cards import ModelCards, describe_run
from .training.checkpoints import WholeCheckpoints, checkpoint_to_resume
from .training.ends import share_ends
from .training.export import SelectionExport
from .training.loss import opd_terms, token_count
from .training.metrics import StepMetrics
from .training.one_step import OneStep, check_one_step
from .training.prompt_order import PromptSampler
from .training.reporting import place_reports, start_reports
from .training.responses import ScoredResponses
from .training.rollouts import Rollouts, speculating
from .training.scorers import Preflight, connect_teachers, make_scorers
from .training.update import MicroBatch, Rollout, check_finite, cut_rollout, make_micro_batch

# Evaluation looks at the student as it is: no selection, and so no triplet.
_EVALUATION_METHOD = "opd"


class CROPTrainer(StepMetrics, Rollouts, WholeCheckpoints, ModelCards, GRPOTrainer):
    """
    Trainer for selective on-policy distillation: the student samples, a teacher scores its tokens, and only those that
    the method keeps enter the loss.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The student; see [`~trl.GRPOTrainer`].
        teacher (`str` or [`~transformers.PreTrainedModel`] or [`~crop_trl.scoring.Scorer`] or a mapping, *optional*):
            The teacher: a model, where to load it from, or anything that scores token ids; or several of them by name.
            By default what the settings of `args` say that begin with `teacher`.
        reward_funcs (*optional*):
            As in [`~trl.GRPOTrainer`]; none by default. With weight 0 in `args.reward_weights` a reward is logged
            without touching the advantages.
        args ([`CROPConfig`], *optional*): Configuration.
        train_dataset, eval_dataset (*optional*):
            Rows with `prompt` and a `NAME_prompt` for each other kind of prompt that the method reads, such as
            `paraphrase_prompt`: all chat messages or all plain text; of several teachers, `teacher` names the one that
            reads the row. Evaluation needs `prompt` alone.
        teacher_processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The teacher's tokenizer, only to check that it is the student's; by default loaded from where the teacher
            came from.
        run_settings (mapping, *optional*):
            What else describes the run, such as `dataset_name`; for the model card and reports. `teacher` is added.
        kwargs:
            Passed to [`~trl.GRPOTrainer`]: `processing_class`, `callbacks`, `optimizers`, `peft_config`, `tools` and so
            on. With `environment_factory` or `rollout_func` the method reads the original prompt alone.

    Raises:
        `ValueError`: something that cannot work, in one sentence, before any model is loaded where possible.
    """

    _evaluated_first = False

    def __init__(
        self,
        model: str | PreTrainedModel,
        teacher: str | PreTrainedModel | Scorer | Mapping[str, Any] | None = None,
        reward_funcs: Callable | list | None = None,
        args: CROPConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict | None = None,
        teacher_processing_class=None,
        run_settings: Mapping[str, Any] | None = None,
        **kwargs,
    ):
        check_order(teacher, reward_funcs)
        args = CROPConfig("crop") if args is None else args
        teachers = name_teachers(model, teacher, args, kwargs.get("peft_config"))
        check_readers(teachers, args, reward_funcs or kwargs.get("environment_factory"))
        reward_funcs = reward_funcs or no_reward
        check_arguments(model, reward_funcs, args, **kwargs)
        check_ahead(args, teachers, kwargs)
        check_one_step(args, kwargs)
        trust, revision = args.trust_remote_code, (args.model_init_kwargs or {}).get("revision")
        tokenizer = data.tokenizer_of(model, kwargs.get("processing_class"), "model", trust, revision)
        teachers, ends = connect_teachers(teachers, tokenizer, teacher_processing_class, trust)
        if train_dataset is not None:
            train_dataset = data.prepare_prompts(train_dataset, tokenizer, args, kwargs.get("tools"), list(teachers))
        if eval_dataset is not None:
            data.check_eval_dataset(eval_dataset, list(teachers))
        adapter = kwargs.get("peft_config") is not None or is_adapter(model)
        self.prompt_maker = prompt_maker(kwargs)
        checkpoint_to_resume(args.resume_from_checkpoint, args, train_dataset, adapter)
        check_output_dir(args)
        with speculating(args.vllm_speculative_config):
            super().__init__(
                model=ready_student(model, args),
                reward_funcs=reward_funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                **kwargs,
            )
        if self.rollout_func is not None:
            self.rollout_func = partial(self._roll_out, self.rollout_func)
        # The loss has no load-balancing term.
        self.aux_loss_enabled = False
        self.run_settings = describe_run(teachers, run_settings)
        self._start_metrics()
        self._add_callbacks()
        self.scorers = make_scorers(self, teachers, ends)
        self._drawn = nullcontext
        if args.use_cuda_graphs:
            self._drawn = partial(drawing_by, make_sampler(self.model, args), self.model)
        self.ahead = Ahead(self) if args.score_ahead else None
        self._one_step = OneStep(self).step if args.rollout_ahead else nullcontext
        # The update lays responses out as the student's scoring does.
        self._layout = self.scorers[STUDENT].layout
        row = next(iter(self.train_dataset), None) if args.preflight else None
        if row is not None:
            self.add_callback(Preflight(self, row))
        share_ends(self)

    @property
    def teachers(self) -> dict[str, Scorer]:
        """Scorers of the teachers, by name; a single one is called `"teacher"`."""
        return {name: scorer for name, scorer in self.scorers.items() if name != STUDENT}

    def _add_callbacks(self) -> None:
        place_reports(self)
        for standard, own in ((ProgressCallback, ConsoleLines), (PrinterCallback, PlainConsoleLines)):
            if self.pop_callback(standard) is not None:
                self.add_callback(own)
        self.add_callback(StepCounter(self))
        self.add_callback(AverageKeeper(self))
        self.add_callback(LengthSchedule(self, self.args.completion_length_schedule or {}))
        if self.args.use_vllm:
            self.add_callback(EngineGapWatch())
        self.add_callback(SelectionExport(self.args.output_dir, self.args.selection_export_steps))

    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        read = map(prompt_column, prompt_kinds(methods.get_method(self.args.method).needs))
        columns = [name for column in read for name in (column, column + "s")]
        self._signature_columns = list(dict.fromkeys([*self._signature_columns, *columns, TEACHER, "answer"]))

    def _get_train_sampler(self, dataset=None):
        places = self.args.generation_batch_size * self.args.gradient_accumulation_steps
        return PromptSampler(
            super()._get_train_sampler(dataset),
            epoch=lambda: int(self.state.epoch or 0),
            dropped=lambda: self.dropped_steps * places,
        )

    # ---------------------------------------------------------------- rollout and scoring

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        # GRPO asks here for rollout-time log-probabilities in its own padded layout. Scoring makes them, once, together
        # with the other student signals.
        return None, None, None

    def _rolled_out(self, inputs: list[dict[str, Any]], needs: Sequence[str]) -> dict[str, Any]:
        """What GRPO samples and rewards, of which teachers may read some meanwhile."""
        if self.ahead is not None:
            prompt_ids = self._tokenize_prompts([row["prompt"] for row in inputs])[0]
            self.ahead.begin(needs, *self._to_be_read(inputs, prompt_ids, needs))
        return super()._generate_and_score_completions(inputs)

    def _scored(self, inputs: list[dict[str, Any]], output: dict[str, Any], needs: Sequence[str]) -> ScoredResponses:
        """What GRPO sampled and rewarded (`output`), with the signals that are asked for."""
        prompts = zip(output["prompt_ids"].tolist(), output["prompt_mask"].sum(-1).tolist(), strict=True)
        prompt_ids = [ids[len(ids) - length :] for ids, length in prompts]
        completion_ids = [list(ids) for ids in self._completion_ids]
        loss_mask = output["completion_mask"].bool()
        if "tool_mask" in output:
            loss_mask = loss_mask & output["tool_mask"].bool()
        return ScoredResponses(
            self.state.global_step,
            [{**row, "prompt": prompt} for row, prompt in zip(inputs, self._prompts, strict=True)],
            prompt_ids,
            completion_ids,
            loss_mask[:, : max(map(len, completion_ids))],
            self.score_rollout(inputs, prompt_ids, completion_ids, needs),
            self._tokenizer,
            rewards=self._rewards,
            advantages=output["advantages"],
        )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        training = self.model.training
        mode = "train" if training else "eval"
        name = self.args.method if training else _EVALUATION_METHOD
        needs = list(methods.get_method(name).needs)
        reused = self.args.steps_per_rollout_batch > 1
        if training and reused and "student/original" not in needs:
            needs.append("student/original")
        output = self._rolled_out(inputs, needs)
        started = time.perf_counter()
        scored = self._scored(inputs, output, needs)
        signals = scored.signals
        first_row = self.accelerator.process_index * len(inputs)
        selection = methods.select(
            name,
            signals,
            scored.loss_mask,
            methods.settings_of(name, self.args.selection_settings),
            step=self.state.global_step,
            rows=torch.arange(first_row, first_row + len(inputs)),
            gather=lambda values: gather_ragged(values, self.accelerator),
            rewards=scored.rewards,
            advantages=scored.advantages,
        )
        target = signals[methods.get_method(name).target]
        student = signals.get("student/original")
        student_logprobs = None if student is None else student.sampled_logprobs
        engine = output.get("sampling_per_token_logps")
        rollout = Rollout(
            scored.prompt_ids,
            scored.completion_ids,
            base_advantages=scored.advantages,
            selection=selection,
            # On policy those of the update itself serve, with its dropout; a step off, the engine alone knows them.
            old_logprobs=engine if training and self.args.rollout_ahead else student_logprobs if reused else None,
            engine_logprobs=engine,
            target=target if self.args.distillation_loss == TOPK else None,
        )
        check_finite(rollout, self._sum)
        self._log_selection(mode, target, selection, scored.loss_mask, student_logprobs)
        if training:
            notify_rollout(self, RolloutRecord(**vars(scored), first_row=first_row, selection=selection))
        self._metrics[mode]["seconds/scoring"].append(time.perf_counter() - started)
        return {**output, "rollout": rollout}

    def sample(
        self,
        rows: Iterable[Mapping[str, Any]],
        needs: Sequence[str] | None = None,
        num_generations: int | None = None,
    ) -> ScoredResponses:
        """
        Sample responses and score them as a training step does, without the step: nothing is trained or logged.

        Every process has to call it, whatever it does with the result.

        Args:
            rows (iterable of dataset rows): With the prompts that `needs` names.
            needs (sequence of `str`, *optional*): Names of signals; by default those that the method reads.
            num_generations (`int`, *optional*): Responses to each row; by default as many as in training.

        Returns:
            [`~crop_trl.training.responses.ScoredResponses`], those to one row one after the other.
        """
        needs = methods.get_method(self.args.method).needs if needs is None else needs
        check_kinds(self.prompt_maker, needs, "`sample`")
        count = self.num_generations if num_generations is None else num_generations
        inputs = [dict(row) for row in rows for _ in range(count)]
        before = self.model.training, self.num_generations_eval, self._metrics["eval"], self._logs
        self.model.eval()
        self.num_generations_eval, self._metrics["eval"], self._logs = count, defaultdict(list), deepcopy(self._logs)
        try:
            return self._scored(inputs, self._rolled_out(inputs, needs), needs)
        finally:
            self.num_generations_eval, self._metrics["eval"], self._logs = before[1:]
            self.model.train(before[0])

    def score_rollout(
        self,
        inputs: list[dict[str, Any]],
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
        needs: Sequence[str],
    ) -> methods.Signals:
        """Compute signals for responses that were sampled, see [`~crop_trl.scoring.signals.collect_signals`]."""
        prompts, own = self._to_be_read(inputs, prompt_ids, needs)
        scorers = self.scorers if self.ahead is None else {**self.scorers, **self.ahead.scorers}
        with self._as_scored():
            return collect_signals(needs, scorers, prompts, completion_ids, self.args.score_top_k, own)

    # ---------------------------------------------------------------- update

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(values, reduction="sum")

    def _prepare_inputs(self, generation_batch):
        where = (self.accelerator.device, self._layout)
        if not self.model.training:
            rollout = self._generate_and_score_completions(generation_batch)["rollout"]
            rows = range(len(rollout.completion_ids))
            return make_micro_batch(rollout, rows, *where)
        started = time.perf_counter()
        if self._step % (self.args.steps_per_generation * self.num_iterations) == 0 or self._buffered_inputs is None:
            micro_batches = cut_rollout(
                self._generate_and_score_completions(generation_batch)["rollout"],
                self.args.windows_per_generation,
                self.args.gradient_accumulation_steps,
                *where,
                reduce=self._sum,
            )
            padding = sum(m.padding_share for m in micro_batches) / len(micro_batches)
            self._metrics["train"]["update/padding_share"].append(padding)
            self._buffered_inputs = micro_batches
        self._seconds["prepare"] = time.perf_counter() - started
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _compute_loss(self, model, inputs: MicroBatch):
        batch = inputs.batch
        with self.accelerator.autocast():
            output = model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                head_positions=batch.positions,
                head_targets=batch.targets,
                head_ids=None if inputs.target is None else inputs.target.token_ids,
            )
        logprobs, entropy = batch.join_ends(output.logprobs), output.entropy[: len(batch.rows)]
        # On policy and without other student signals, the rollout-time student is the one being trained.
        old_logprobs = logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
        divergence = None
        if inputs.target is not None:
            kind = self.args.topk_divergence
            divergence = target_divergence(inputs.target.logprobs, output.entry_logprobs, kind)

        terms = opd_terms(
            logprobs,
            old_logprobs,
            inputs.teacher_logprobs,
            inputs.base_advantages,
            weights=inputs.weights,
            teacher_advantages=inputs.teacher_advantages,
            lambda_opd=self.args.lambda_opd,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            delta=self.args.delta,
            divergence=divergence,
        )
        self._log_update(inputs, terms, old_logprobs, entropy)
        loss = terms.loss.sum() / token_count(terms.loss, inputs.num_items)
        # Gradients are averaged over processes, and the denominator is already that of all of them.
        return loss if inputs.num_items is None else loss * self.accelerator.num_processes

    def train(self, *args, **kwargs):
        """See [`~transformers.Trainer.train`]. Raises `ValueError` after an evaluation on several processes."""
        if self._evaluated_first and self.accelerator.num_processes > 1:
            processes = self.accelerator.num_processes
            raise ValueError(f"`evaluate` ran before `train` on {processes} processes; set `eval_on_start` instead.")
        return super().train(*args, **kwargs)

    def evaluate(self, *args, **kwargs):
        """See [`~transformers.Trainer.evaluate`]; what the trainer reports to is started, as it is by `train`. All
        evaluations of a run sample with the same random numbers."""
        start_reports(self)
        self._evaluated_first |= not self.is_in_train and self.state.global_step == 0
        with self._evaluation_draws():
            return super().evaluate(*args, **kwargs)
