"""What a training step and an evaluation log, beside what GRPO logs: means over tokens, wherever they were."""

import math
import time
import warnings

import torch
from transformers.trainer_utils import has_length

from ..methods import TopKLogprobs
from ..methods.divergence import residual_mass
from ..models.distributed import RunningMeans
from ..models.sampling import SameDraws
from ..prompts import TEACHER
from .arguments import no_reward
from .loss import LossTerms
from .update import MicroBatch


class StepMetrics:
    """Mixed in before [`~trl.GRPOTrainer`]: metrics of the selection, the update and the seconds they take."""

    def _start_metrics(self) -> None:
        self._means = {"train": RunningMeans(), "eval": RunningMeans()}
        self._evaluation_draws = SameDraws()
        self._warned_of_zeros = False
        self._to_evaluate: float | None = None  # responses that an evaluation has still to count; None: it is none
        # By step and reward function: for each problem of an evaluation the rewards of its responses.
        self.evaluated_rewards: dict[int, dict[str, list[list[float]]]] = {}
        self._seconds = {"prepare": 0.0, "update": 0.0}

    def evaluation_loop(self, dataloader, *args, **kwargs):
        """See [`~transformers.Trainer.evaluation_loop`]; every response counts once."""
        known = has_length(dataloader.dataset)
        self._to_evaluate = len(dataloader.dataset) * self.num_generations_eval if known else math.inf
        self.evaluated_rewards[self.state.global_step] = {name: [] for name in self.reward_func_names}
        try:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self._to_evaluate = None

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        # As they are trained, whatever a subclass did to them. Lengths come from these lists, never from ids: the pad
        # token may be the EOS token.
        self._completion_ids, self._prompts = completion_ids_list, prompts
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        mine = torch.arange(len(prompts), device=rewards.device) + self.accelerator.process_index * len(prompts)
        named = zip(self.reward_func_names, rewards[mine].unbind(1), strict=True)
        self._rewards = {name: values for name, values in named if name != no_reward.__name__}
        if self.model.training or self._to_evaluate is None:
            return rewards
        # Several processes begin once more with the first prompts, until their shares are even.
        self._evaluated = mine < self._to_evaluate
        counted = rewards[: max(0, min(len(rewards), self._to_evaluate))]
        for name, values in zip(self.reward_func_names, counted.unbind(1), strict=True):
            by_problem = values.view(-1, self.num_generations_eval)
            self.evaluated_rewards[self.state.global_step][name] += by_problem.tolist()
        self._to_evaluate -= len(prompts) * self.accelerator.num_processes
        means = self._means["eval"]
        for name, values in zip(self.reward_func_names, rewards[mine].unbind(1), strict=True):
            means.add(f"rewards/{name}/mean", values, self._evaluated & ~values.isnan())
        weighted = (rewards[mine] * self.reward_weights.to(rewards.device)).nansum(1)
        means.add("reward", weighted, self._evaluated & ~rewards[mine].isnan().all(1))
        means.add("completions/mean_length", torch.tensor(self._lengths, device=rewards.device), self._evaluated)
        return rewards

    def _log_selection(self, mode: str, target: TopKLogprobs, selection, loss_mask, student_logprobs) -> None:
        means = self._means[mode]
        if mode == "train":
            # Evaluation keeps every token; a share of 1 there would look as if the method did not work.
            means.add("selection/retention_ratio", selection.mask.float(), loss_mask)
            means.add("selection/tokens_per_response", selection.mask.sum(-1))
            if selection.scores is not None:
                means.add("selection/nonzero_scores", (selection.scores != 0).float(), loss_mask)
            for name, value in selection.measures.items():
                means.add(f"selection/{name}", value, loss_mask)
        else:
            loss_mask = loss_mask & self._evaluated[:, None]
        means.add("scoring/residual_mass", residual_mass(target), loss_mask)
        if student_logprobs is not None:
            gap = student_logprobs - selection.teacher_logprobs
            means.add("distillation/gap_dropped", gap, loss_mask & ~selection.mask)
        if mode == "train":
            self._flush(mode)
            if self._metrics[mode]["selection/nonzero_scores"][-1:] == [0.0] and not self._warned_of_zeros:
                self._warned_of_zeros = True
                said = f"Every score of step {self.state.global_step} is 0, so each response's first tokens are kept"
                warnings.warn(f"{said}: are the prompts of a row the same text?", stacklevel=2)
        for teacher, scorer in self.teachers.items():
            whose = "" if teacher == TEACHER else f"{teacher}/"
            if getattr(scorer, "stats", None) is not None:
                for name, value in scorer.stats.metrics().items():
                    self._metrics[mode][f"scoring/{whose}{name}"].append(value)
                scorer.stats.reset()

    def _flush(self, mode: str) -> None:
        for name, value in self._means[mode].flush(self.accelerator).items():
            if not math.isnan(value):
                self._metrics[mode][name].append(value)

    def _log_update(self, inputs: MicroBatch, terms: LossTerms, old_logprobs, entropy) -> None:
        mode = "train" if self.model.training else "eval"
        means = self._means[mode]
        counted = torch.ones_like(entropy, dtype=torch.bool)
        if mode == "eval":
            counted = self._evaluated[inputs.batch.rows]
        ratio, advantages = terms.ratio, terms.advantages
        if mode == "train":
            low = (ratio < 1 - self.epsilon_low) & (advantages < 0)
            high = (ratio > 1 + self.epsilon_high) & (advantages > 0)
            means.add("clip_ratio/low_mean", low.float())
            means.add("clip_ratio/high_mean", high.float())
            means.add("clip_ratio/region_mean", (low | high).float())
            if inputs.old_logprobs is not None:
                means.add("off_policy/ratio", ratio)
        means.add("distillation/gap_kept", old_logprobs - inputs.teacher_logprobs, counted)
        if terms.divergence is None:
            means.add("distillation/advantage", advantages, counted)
        else:
            means.add("distillation/divergence", terms.divergence, counted)
        means.add("entropy", entropy, counted)
        # 0 where tokens are drawn from the student's own distribution.
        means.add("sampling/logprob_plus_entropy", old_logprobs + entropy, counted)
        if inputs.engine_logprobs is not None:
            # Of the student that is scored: a step off, `old_logprobs` are the engine's own.
            student = old_logprobs + ratio.log() if self.args.rollout_ahead else old_logprobs
            gap = (student - inputs.engine_logprobs).abs()
            # The engine knows the sampled end token alone.
            compared = (torch.isfinite(gap) & counted).index_fill(0, inputs.batch.stops, False)
            means.add("sampling/sampling_logp_difference/mean", gap, compared)
        if mode == "eval":
            # Evaluation logs means over all its tokens: summed here, reduced once in `log`.
            means.add("loss", terms.loss, counted)
        else:
            means.add("selection/selected_tokens", inputs.num_items.reshape(1))
            if self.accelerator.sync_gradients:
                self._flush(mode)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """See [`~transformers.Trainer.log`]; an evaluation's means are those over all of its responses or tokens."""
        if not self.model.training:
            for name, value in self._means["eval"].flush(self.accelerator).items():
                if name != "loss":
                    # In place of GRPO's, which is one over batches, however few responses the last one has.
                    self._metrics["eval"][name] = [value]
                    continue
                # Trainer weighs batches by prompts, of which a batch of responses holds fewer than it counts.
                logs.update({key: value for key in logs if key.endswith("_loss")})
        super().log(logs, start_time)

    def training_step(self, model, inputs, num_items_in_batch):
        """See [`~transformers.Trainer.training_step`]; the seconds of the update are logged too."""
        started = time.perf_counter()
        self._seconds["prepare"] = 0.0
        output = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients and self.accelerator.device.type == "cuda":
            # Once an optimizer step, so that the seconds below belong to the update and not to the next rollout.
            torch.cuda.synchronize()
        self._seconds["update"] += time.perf_counter() - started - self._seconds["prepare"]
        if self.accelerator.sync_gradients:
            self._metrics["train"]["seconds/update"].append(self._seconds["update"])
            self._seconds["update"] = 0.0
        return output
