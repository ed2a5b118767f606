"""Configuration of [`~crop_trl.CROPTrainer`]: GRPO's, with the paper's values as defaults."""

import inspect
import textwrap
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from . import checks
from .files import json_object
from .methods import SelectionSettings
from .methods.budget import response_budget
from .methods.table import own_settings
from .models.sharding import zero_stage
from .prompts import TEACHER
from .scoring.placement import MODEL
from .text import is_secret, masked


def option(default: Any, help: str) -> Any:
    """A field of a dataclass, with the text that both its docstring and `--help` show."""
    return field(default=default, metadata={"help": help})


def documented(cls: type) -> type:
    """List a dataclass's own fields, with their `help`, in its docstring."""
    own = [cls.__dataclass_fields__[name] for name in vars(cls)["__annotations__"]]
    lines = ["", "", "Args:"]
    for f in own:
        if "help" in f.metadata:
            kind = f.type.__name__ if f.type in (str, int, float, bool) else str(f.type)
            lines += [f"    {f.name} (`{kind}`, *optional*, defaults to `{f.default!r}`):"]
            lines += textwrap.wrap(f.metadata["help"], 110, initial_indent=" " * 8, subsequent_indent=" " * 8)
    cls.__doc__ = inspect.cleandoc(cls.__doc__) + "\n".join(lines)
    return cls


@documented
@dataclass
class CROPConfig(GRPOConfig):
    """Configuration class for the [`CROPTrainer`].

    Only the parameters that CROP adds, or whose default it changes, are listed here; for the others see
    [`~trl.GRPOConfig`] and [`~transformers.TrainingArguments`]. The defaults are the paper's values (its appendix on
    training hyperparameters), but for the size of a step and of a run: there 144 prompts (`prompts_per_step`) and 115
    steps (`max_steps`), here what `per_device_train_batch_size` and the data come to, with a checkpoint every 500."""

    # Whether anything is learned; evaluations alone ask less of a teacher.
    train = True

    # Given as JSON on a command line.
    _OWN_DICT_FIELDS = (
        *("teacher_init_kwargs", "teachers", "method_settings", "vllm_speculative_config"),
        "completion_length_schedule",
    )

    # Defaults that differ from GRPOConfig's.
    learning_rate: float = option(1e-6, "Initial learning rate for AdamW.")
    adam_beta1: float = option(0.9, "Beta1 of AdamW.")
    adam_beta2: float = option(0.999, "Beta2 of AdamW.")
    weight_decay: float = option(0.01, "Weight decay of AdamW.")
    lr_scheduler_type: str = option("constant", "Learning rate schedule.")
    warmup_steps: float = option(0, "Warmup steps, or their share when below 1.")
    max_grad_norm: float = option(1.0, "Gradient clipping norm.")
    num_train_epochs: float = option(1.0, "Passes over the prompts.")
    num_generations: int | None = option(4, "Responses sampled for each prompt.")
    max_completion_length: int | None = option(4096, "Longest response in tokens.")
    completion_length_schedule: dict[str, int] | str | None = option(
        None,
        'Shorter responses at first, a dict or JSON: with {"50": 1024, "100": 2048} those of the first 50 steps have '
        "at most 1,024 tokens, of the next 50 at most 2,048, and all later ones `max_completion_length`. Evaluations "
        "stay as they are. The paper does without.",
    )
    epsilon_high: float | None = option(0.28, "Upper clipping radius of the ratio.")
    shuffle_dataset: bool | None = option(False, "Whether to shuffle the prompts.")
    vllm_importance_sampling_correction: bool = option(
        False, "Must stay off: it would drop whole responses. The engine gap is logged."
    )
    remove_unused_columns: bool | None = option(
        False, "Whether to drop dataset columns that no part of the training uses."
    )
    pad_to_multiple_of: int | None = option(
        None,
        "Length to whose multiples forwards are padded; by default 8 with `compile_layers`, whose kernels differ for "
        "other lengths and would be compiled once more, and 1 without.",
    )

    # What CROP adds.
    method: str = option("crop", "Which tokens of a response are kept: a name in `crop_trl.METHODS`.")
    retention_ratio: float = option(0.2, "Nominal share of each response that is kept, in (0, 1].")
    min_tokens: int = option(1, "Fewest tokens kept in a response.")
    method_settings: dict[str, Any] | str | None = option(
        None, "Settings that the method declares itself, by name: a dict or JSON; its defaults hold for the others."
    )
    score_top_k: int = option(
        16,
        "Vocabulary entries the scorers return at each position (K of the paper). Not to be confused with `top_k`, "
        "which restricts sampling.",
    )
    lambda_opd: float = option(1.0, "Strength of the teacher in the loss.")
    distillation_loss: str = option(
        "sampled",
        "sampled: the teacher's log-probability of each sampled token corrects its advantage, as in the paper; topk: a "
        "divergence of the student from the teacher's `score_top_k` entries and the rest as one is minimised.",
    )
    topk_divergence: str = option(
        "forward", "Which one: forward, KL(teacher || student); reverse, KL(student || teacher); or jsd."
    )
    iw_max_weight: float = option(1.5, "Largest weight of importance-weighted distillation.")
    selector_seed: int = option(42, "Seed of methods that draw at random, with the step; `seed` does not move it.")
    credit_lambda: float | None = option(
        None, "Strength of the contrast with unrelated prompts; None takes the method's own."
    )
    credit_num_negatives: int = option(1, "Unrelated prompts a response is contrasted with.")
    credit_seed: int = option(42, "Seed of their draw, with the step; `seed` does not move it.")
    max_prompt_length: int | None = option(
        1024,
        "Longest rendered prompt in tokens, of all the prompts a row has; longer rows are left out. None: no limit.",
    )
    max_prompt_length_kinds: list[str] | None = option(
        None,
        "Kinds of prompt that this limit looks at, such as `original counterfactual`; by default all that a row has, "
        "so that all methods train on the same rows.",
    )
    prompts_per_step: int | None = option(
        None, "Prompts of one optimizer step over all processes; `gradient_accumulation_steps` follows from it."
    )
    teacher_source: str = option(
        MODEL,
        "What the teacher is: model, one of its own; student, the weights in training; initial, those from before it, "
        "which a new LoRA adapter leaves as they were, so that it is only switched off; or average, an exponential "
        "average of the weights in training.",
    )
    teacher_decay: float = option(
        0.99, "Share of the average that stays in each optimizer step, where `teacher_source` is average."
    )
    teachers: dict[str, Any] | str | None = option(
        None,
        "Several teachers by name, a dict or JSON: of each its path, or settings of its own, named as those that begin "
        "with `teacher_` but without that; what it leaves out is as for a single one. The dataset column `teacher` "
        "says which of them reads a row.",
    )
    teacher_model_name_or_path: str | None = option(
        None, "Teacher, when it is not passed to the trainer; with `teacher_server_urls` the name it is served under."
    )
    teacher_revision: str | None = option(None, "Branch, tag or commit of a teacher from the hub.")
    teacher_init_kwargs: dict[str, Any] | str | None = option(
        None,
        "Keyword arguments of `from_pretrained` for the teacher, a dict or JSON; `dtype` defaults to that of training.",
    )
    teacher_placement: str = option(
        "resident",
        "Where a local teacher lives: resident, whole on each training device; offload, in CPU memory, and on the "
        "device while it scores; or sharded, spread over the devices as ZeRO-3 or FSDP2 spreads the student.",
    )
    teacher_quantization: str | None = option(
        None,
        "8bit (LLM.int8) or 4bit (NF4) loads the teacher quantised by bitsandbytes; fp8 computes its decoder layers in "
        "fp8, on GPUs from Ada and Hopper on.",
    )
    teacher_server_urls: list[str] | None = option(
        None,
        "Base URLs of OpenAI-compatible vLLM servers that hold the teacher, such as http://localhost:8000/v1. A key is "
        "read from the environment variable TEACHER_API_KEY.",
    )
    teacher_server_timeout: float = option(
        600.0, "Seconds that training waits for a teacher server that fails before it ends with an error."
    )
    stop_token_ids: list[int] | str | None = option(
        None,
        "Token ids that end a response beside the student's own; declared: those that the teacher's generation_config "
        "and tokenizer name. All of them count as one: where a response ends, both models' log-probability is that of "
        "any of them. Not with `teacher_server_urls`. By default the student's own alone, each by itself.",
    )
    use_cuda_graphs: bool = option(
        False,
        "Sample by CUDA graphs where there is no engine: several times faster than plain generation for small models. "
        "For whole weights on each GPU, full attention and plain sampling with a temperature.",
    )
    shared_sampler: str | None = option(
        None,
        "With `use_cuda_graphs`: beginning of the socket of a process that samples for all runs of a GPU at once, as "
        "`crop-trl study --sample_together` starts it. For students whose weights are trained themselves.",
    )
    vllm_speculative_config: dict[str, Any] | str | None = option(
        None,
        "Speculative decoding of a colocated vLLM, of n-grams alone: its `speculative_config`, a dict or JSON such as "
        '`{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}`.',
    )
    preflight: bool = option(True, "Check teacher, prompts and settings together on one row before training.")
    score_tokens_per_batch: int = option(16384, "Tokens of one scoring forward, padding included.")
    score_ahead: bool = option(
        False,
        "Let teachers read each response as soon as the engine has finished it, while others are still written. Needs "
        "`use_vllm` and teachers that share no card with the engine, as those on servers.",
    )
    rollout_ahead: int = option(
        0,
        "1: an engine on cards of its own (`vllm_mode` server) samples the next batch while this one is scored and "
        "trained, so with the weights of the step before; the ratio divides by the engine's log-probabilities. 0, as "
        "in the paper: each batch is sampled with the weights that it trains.",
    )
    compile_layers: bool = option(
        False,
        "Compile the decoder layers of student and local teacher, and with `use_cuda_graphs` the sampling of a token; "
        "needs one of `use_vllm` and `use_cuda_graphs`. The first start costs a minute or two, the next seconds.",
    )
    selection_export_steps: int = option(
        0,
        "Write token ids, scores and masks of every n-th step to `selection/` in the output folder; 0: never. What an "
        "earlier run left there of the same steps is deleted.",
    )

    def __post_init__(self):
        self.check_settings()
        limits = (self.max_prompt_length, self.max_completion_length)
        if self.use_vllm and self.vllm_max_model_length is None and None not in limits:
            self.vllm_max_model_length = sum(limits)
        super().__post_init__()
        if self.pad_to_multiple_of is None:
            self.pad_to_multiple_of = 8 if self.compile_layers else 1
        checks.check_number("pad_to_multiple_of", self.pad_to_multiple_of, 1, whole=True)
        checks.check_launch(self)
        checks.check_windows(self)
        if self.vllm_speculative_config:
            checks.check_speculation(vars(self))
        if self.compile_layers:
            for one in self.each_teacher.values():
                plain = not (self.use_vllm or self.use_cuda_graphs)
                checks.check_compilation(plain, zero_stage(self), one.teacher_placement)

    def check_settings(self) -> None:
        """Raise `ValueError` for what is wrong with the settings on any device, and bring them into one form."""
        for name in (*self._OWN_DICT_FIELDS, "chat_template_kwargs", "model_init_kwargs", "generation_kwargs"):
            if isinstance(getattr(self, name), str):
                setattr(self, name, json_object(name, getattr(self, name), '{"name": "value"}'))
        if isinstance(self.teacher_server_urls, str):
            self.teacher_server_urls = [self.teacher_server_urls]
        if isinstance(self.report_to, str) and "," in self.report_to:
            # A command line cannot give a list here.
            self.report_to = [name.strip() for name in self.report_to.split(",") if name.strip()]
        if self.teachers is not None:
            self.teachers = checks.named_teachers(vars(self))
        self.stop_token_ids = checks.stop_tokens(self.stop_token_ids)
        if self.epsilon_high is None:
            self.epsilon_high = self.epsilon
        self._check_own_fields()
        if self.shared_sampler and not self.use_cuda_graphs:
            raise ValueError("`shared_sampler` needs `use_cuda_graphs`, which samples by it; turn that on.")
        if self.use_cuda_graphs:
            checks.check_graphs(vars(self))
        if self.prompts_per_step is not None:
            self.gradient_accumulation_steps = checks.accumulation_steps(
                self.prompts_per_step, self.num_generations, self.per_device_train_batch_size
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields, for logs: as in [`~transformers.TrainingArguments`], secrets are masked, nested ones too."""
        return {name: masked(value) for name, value in super().to_dict().items()}

    def __getstate__(self) -> dict[str, Any]:
        # What is pickled is the `training_args.bin` that transformers puts beside every model, to be given away.
        return {k: None if is_secret(k) and isinstance(v, str) else masked(v) for k, v in vars(self).items()}

    def __deepcopy__(self, memo: dict) -> "CROPConfig":
        # A copy within the process keeps what a file must not.
        copy = memo[id(self)] = object.__new__(type(self))
        vars(copy).update(deepcopy(vars(self), memo))
        return copy

    @property
    def each_teacher(self) -> dict[str, "CROPConfig"]:
        """The configuration as it is for each teacher, by its name; of a single one that is `"teacher"`."""
        if not self.teachers:
            return {TEACHER: self}
        found = {}
        for name, own in self.teachers.items():
            found[name] = object.__new__(type(self))
            own = {f"teacher_{setting}": value for setting, value in own.items()}
            vars(found[name]).update({**vars(self), **own, "teachers": None})
        return found

    @property
    def teacher_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of `from_pretrained` for the teacher, its revision among them."""
        own = self.teacher_source == MODEL
        revision = self.teacher_revision if own else (self.model_init_kwargs or {}).get("revision")
        pinned = {"revision": revision} if revision else {}
        return {**pinned, **(self.teacher_init_kwargs or {})}

    @property
    def windows_per_generation(self) -> int:
        """Optimizer steps that one batch of rollouts feeds, before it is reused."""
        return self.steps_per_generation // self.gradient_accumulation_steps

    @property
    def steps_per_rollout_batch(self) -> int:
        """Optimizer steps that one batch of rollouts feeds, with every time that it is reused."""
        return self.windows_per_generation * self.num_iterations

    @property
    def on_policy(self) -> bool:
        """Whether each batch of rollouts feeds one update, whose student is the one that sampled them."""
        return self.steps_per_rollout_batch == 1 and not self.rollout_ahead

    @property
    def selection_settings(self) -> SelectionSettings:
        """The part of the configuration that [`~crop_trl.methods.select`] takes."""
        return SelectionSettings(
            retention_ratio=self.retention_ratio,
            min_tokens=self.min_tokens,
            seed=self.selector_seed,
            iw_max_weight=self.iw_max_weight,
            credit_lambda=self.credit_lambda,
            method_settings=self.method_settings or {},
        )

    def _check_own_fields(self) -> None:
        def values(*names: str) -> dict[str, Any]:
            return {name: getattr(self, name) for name in names}

        if not isinstance(self.method, str):
            raise ValueError(f"`method` must be the name of a method, got {self.method!r}.")
        own_settings(self.method, self.method_settings or {})
        checks.check_loss(self.method, self.distillation_loss, self.topk_divergence)
        checks.check_number("retention_ratio", self.retention_ratio, 0)
        checks.check_number("min_tokens", self.min_tokens, 1, whole=True)
        response_budget(0, self.retention_ratio, self.min_tokens)
        batches = ("num_generations", "num_iterations", "per_device_train_batch_size", "gradient_accumulation_steps")
        own = ("score_top_k", "score_tokens_per_batch", "credit_num_negatives")
        checks.check_numbers(values(*batches, *own), 1, whole=True)
        optional = ("max_prompt_length", "max_completion_length", "prompts_per_step", "steps_per_generation")
        checks.check_numbers(values(*optional), 1, whole=True, optional=True)
        checks.check_length_schedule(self.completion_length_schedule or {}, self.max_completion_length)
        checks.check_numbers(values("seed", "selector_seed", "credit_seed", "selection_export_steps"), 0, whole=True)
        if self.seed >= 2**32:  # NumPy takes no other
            raise ValueError(f"`seed` must be below 2**32, got {self.seed}.")
        checks.check_numbers(values("lambda_opd", "epsilon", "epsilon_high"), 0)
        checks.check_numbers(values("learning_rate", "max_grad_norm", "credit_lambda"), 0, optional=True)
        checks.check_numbers(values("iw_max_weight"), 1)
        for name, one in self.each_teacher.items():
            with checks.told_of(name):
                checks.check_teacher(vars(one))
                checks.check_init_kwargs("teacher_init_kwargs", one.teacher_init_kwargs)
        checks.check_init_kwargs("model_init_kwargs", self.model_init_kwargs)
        checks.check_fixed(vars(self))
        if self.rollout_ahead not in (0, 1):
            raise ValueError(f"`rollout_ahead` must be 0 or 1, got {self.rollout_ahead!r}.")
        checks.warn_of_sampling(vars(self))
