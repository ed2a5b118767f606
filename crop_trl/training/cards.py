"""What a run keeps, in words: the card of a run's page and the README of the model, both made of [`method_card`]."""

import html
import inspect
import os
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel

from .. import __version__
from ..checks import TOPK
from ..config import CROPConfig
from ..files import looks_like_path
from ..methods import get_method
from ..methods.table import own_settings
from ..prompts import TEACHER
from ..scoring.placement import AVERAGE, INITIAL, MODEL, STUDENT
from ..text import markdown_table, masked

TEMPLATE = Path(__file__).parent / "templates" / "model_card.md.j2"
PAPER = {
    "title": "CROP: Task Relevance via Counterfactuals for Selective On-Policy Distillation",
    "citation": """\
@misc{crop,
  title  = {{CROP}: Task Relevance via Counterfactuals for Selective On-Policy Distillation},
  author = {Li, Enhan and He, Junhao and Du, Hongyang},
  note   = {Preprint, The University of Hong Kong}
}""",
}
# What each loss reads of the target.
_READ = {
    "sampled": "log-probability of the sampled token",
    TOPK: "top {0.score_top_k} and the rest as one, by {0.topk_divergence} divergence",
}
_SOURCES = {
    STUDENT: "the student itself",
    INITIAL: "the student before training",
    AVERAGE: "an average of the student (decay {0.teacher_decay:g})",
}
_PACKAGES = ("trl", "transformers", "torch", "datasets", "tokenizers")


def public_name(name: Any) -> Any:
    """A name for others to read: of an absolute path the last part, since the rest tells only where a user keeps it."""
    name = os.fspath(name) if isinstance(name, os.PathLike) else name
    is_path = isinstance(name, str) and (os.path.isabs(name) or name.startswith("~"))
    return Path(name).name if is_path else masked(name)


def hub_name(name: Any) -> str | None:
    """A name as metadata may hold it: `None` unless it can be that of a model or data set on the hub."""
    name = str(name or "")
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return None if os.path.exists(name) or looks_like_path(name) else name


def code_span(text: Any) -> str | None:
    """Text as code in Markdown, in one line and whatever is in it."""
    text = " ".join(str(text or "").split())
    marks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{marks}{space}{text}{space}{marks}" if text else None


def describe_run(
    teachers: Mapping[str, tuple[Any, CROPConfig]], settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What describes a run beside its configuration, the teachers first, without what must not be published."""
    described = {}
    for name, (teacher, args) in teachers.items():
        name = TEACHER if name == TEACHER else f"{TEACHER}_{name}"
        if args.teacher_source != MODEL:
            teacher = _SOURCES[args.teacher_source].format(args)
        elif isinstance(teacher, PreTrainedModel):
            teacher = teacher.name_or_path or type(teacher).__name__
        elif not isinstance(teacher, str):
            teacher = args.teacher_model_name_or_path or type(teacher).__name__
        described |= {name: teacher, **({f"{name}_revision": args.teacher_revision} if args.teacher_revision else {})}
    return {name: public_name(value) for name, value in {**described, **(settings or {})}.items()}


def in_words(function) -> str | None:
    """What a function of a method computes, by the first paragraph of its docstring; `None` for `None`."""
    if function is None:
        return None
    return " ".join((inspect.getdoc(function) or function.__name__).split("\n\n")[0].split())


def method_card(args: CROPConfig, settings: Mapping[str, Any] | None = None) -> dict[str, str]:
    """What a run keeps, in words by heading; `settings` are what else describes it, such as the dataset's name."""
    method = get_method(args.method)
    budget = f"{args.retention_ratio:g} of each response, at least {args.min_tokens}"
    card = {
        "Method": args.method,
        "Kept tokens": "; ".join(filter(None, (in_words(method.keep), method.score and budget))) or "all",
        "Ranked by": in_words(method.score) or "nothing",
        "Weighted by": in_words(method.weight) or "nothing",
        "Teacher's target": in_words(method.teacher_target or method.advantage)
        or f"{_READ[args.distillation_loss].format(args)}, {method.target}",
        "Signals": ", ".join(method.needs),
        "Vocabulary entries scored (K)": str(args.score_top_k),
        "Strength of the teacher (lambda)": f"{args.lambda_opd:g}",
        "Clipping": f"{1 - args.epsilon:g} to {1 + args.epsilon_high:g}",
    }
    if method.settings:
        own = own_settings(args.method, args.method_settings or {})
        card["Settings of the method"] = ", ".join(f"{name} {value}" for name, value in own.items())
    described = {name: value for name, value in (settings or {}).items() if value not in (None, "")}
    return {**card, **{name.replace("_", " ").capitalize(): str(value) for name, value in described.items()}}


def training_card(trainer) -> dict[str, str]:
    """How a run trains, in words by heading, during it or after."""
    args, state = trainer.args, trainer.state
    responses = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    rewards = zip(trainer.reward_func_names, trainer.reward_weights.tolist())
    adapters = trainer.model.peft_config.values() if is_peft_model(trainer.model) else ()
    return {
        "Steps": f"{state.global_step} of {state.max_steps}",
        "Prompts per step": f"{responses / args.num_generations:g}",
        "Responses per prompt": str(args.num_generations),
        "Longest prompt, response (tokens)": f"{args.max_prompt_length}, {args.max_completion_length}",
        "Temperature of sampling": f"{args.temperature:g}",
        "Rewards (weight)": ", ".join(f"{name} ({weight:g})" for name, weight in rewards if name != "no_reward")
        or "none",
        "Learning rate": f"{args.learning_rate:g}, {getattr(args.lr_scheduler_type, 'value', args.lr_scheduler_type)}, "
        f"{args.warmup_steps:g} warmup",
        "Optimizer": f"{getattr(args.optim, 'value', args.optim)}, betas {args.adam_beta1:g} and {args.adam_beta2:g}, "
        f"weight decay {args.weight_decay:g}, gradient norm at most {args.max_grad_norm:g}",
        "Weights": ", ".join(sorted({f"{config.peft_type.value} adapter" for config in adapters})) or "all",
        "Precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "Seed": str(args.seed),
        "Processes": str(args.world_size),
    }


def card_table(rows: Mapping[str, str]) -> str:
    """A card as a Markdown table of two columns."""
    return markdown_table(("", ""), rows.items())


def model_card(trainer, model_name: str | None, dataset_name: str | None = None, tags: set[str] | None = None):
    """The README of a trained model: method, data, teacher, settings, versions and citation."""
    settings = dict(trainer.run_settings)
    if dataset_name is not None:
        settings["dataset_name"] = public_name(dataset_name)
    student, dataset = trainer.model.config._name_or_path, settings.get("dataset_name")
    model_name = " ".join((model_name or Path(trainer.args.output_dir).resolve().name).split())
    adapter = is_peft_model(trainer.model)
    return ModelCard.from_template(
        ModelCardData(
            base_model=hub_name(student),
            datasets=hub_name(dataset),
            library_name="peft" if adapter else "transformers",
            pipeline_tag="text-generation",
            model_name=model_name,
            tags=sorted({"generated_from_trainer", *trainer._tag_names, *(["lora"] if adapter else []), *(tags or ())}),
        ),
        template_path=str(TEMPLATE),
        name=html.escape(model_name, quote=False),
        hub_id=trainer.hub_model_id or model_name,
        student=code_span(public_name(student)),
        teacher=code_span(settings.get("teacher")),
        dataset=code_span(dataset),
        method_table=card_table(method_card(trainer.args, settings)),
        training_table=card_table(training_card(trainer)),
        versions={"crop_trl": __version__, **{name: version(name) for name in _PACKAGES}},
        paper=PAPER,
    )


class ModelCards:
    """Part of a [`~crop_trl.CROPTrainer`]: every model that is saved has a README beside it, checkpoints included."""

    _tag_names = ["trl", "crop"]
    run_settings: dict[str, Any]

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write the README of the output folder; see [`model_card`] and [`~trl.GRPOTrainer.create_model_card`]."""
        self._write_model_card(
            self.args.output_dir, model_name, dataset_name, {tags} if isinstance(tags, str) else tags
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, then its README: an adapter is saved with one of another library."""
        super().save_model(output_dir, _internal_call)
        # After it, since an adapter is saved with a README of another library.
        self._write_model_card(
            output_dir or self.args.output_dir, self.hub_model_id and self.hub_model_id.split("/")[-1]
        )

    def _write_model_card(self, folder: str, *describe) -> None:
        if self.is_world_process_zero():
            Path(folder).mkdir(parents=True, exist_ok=True)
            model_card(self, *describe).save(Path(folder) / "README.md")
