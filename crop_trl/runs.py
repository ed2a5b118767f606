"""A training run from its settings to its result: what `crop-trl train` is made of, for programs of your own too."""

import importlib.util
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from trl import ModelConfig, get_peft_config

from .config import CROPConfig, documented, option
from .evaluation.grading import accuracy_reward
from .evaluation.metrics import share_interval
from .files import check_local
from .methods import METHODS, get_method
from .methods.selector_file import register_selector
from .planning.memory import warn_of_memory
from .prompts import (
    DEFAULT_PROMPT_TEMPLATE,
    EMPTY,
    HINTS,
    NEGATIVE,
    REWORDINGS,
    check_template,
    empty_prompt,
    hinted_prompt,
    needs_negatives,
    prompt_column,
    prompt_kinds,
    prompt_variants,
    split_signal,
    wrap_problem,
)
from .scoring.placement import MODEL
from .trainer import CROPTrainer
from .training.cards import hub_name
from .training.reporting import send_page
from .training.results import RunResult, current_commit, statistics_of
from .triplets import load_triplets
from .triplets.record import is_local

REWARDS = {"accuracy": accuracy_reward, "none": None}
LOOKED_AT = 8  # rows that the picture and the page of a run are made of
ACCURACY = "eval_rewards/accuracy_reward/mean"


@documented
@dataclass
class ScriptArguments:
    """What a run takes beside [`TrainConfig`] and [`~trl.ModelConfig`]."""

    dataset_name: str | None = option(None, "File (JSONL, JSON, CSV, Parquet) or hub dataset of triplet records.")
    dataset_split: str = option("train", "Split of a hub dataset.")
    dataset_config: str | None = option(None, "Configuration of a hub dataset.")
    dataset_revision: str | None = option(None, "Branch, tag or commit of a hub dataset.")
    eval_dataset_name: str | None = option(None, "The same for held-out problems; without it nothing is evaluated.")
    eval_dataset_split: str = option("test", "Split of a hub dataset.")
    eval_dataset_config: str | None = option(None, "Configuration of a hub dataset.")
    eval_dataset_revision: str | None = option(None, "Branch, tag or commit of a hub dataset.")
    prompt_template: str = option(
        DEFAULT_PROMPT_TEMPLATE, "Answer-format wrapper put around every problem; holds {problem} once."
    )
    conversational: bool = option(True, "Whether prompts are chat messages or plain text.")
    num_counterfactuals: int = option(
        1, "How many a prompt may have; beyond the first they come from the record's `alternates`."
    )
    num_paraphrases: int = option(1, "The same of paraphrases.")
    reward: str = option("none", "accuracy or none; with `--reward_weights 0` it is watched without being trained on.")
    heatmap: bool | None = option(
        None,
        "Whether to end with a picture of the tokens kept in one held-out response; by default where matplotlib is "
        "installed.",
    )
    view: bool | None = option(
        None,
        "Whether to end with a page of answers to held-out problems, in which to see what every method would keep; by "
        "default unless `--heatmap false`.",
    )
    world: str | None = option(
        None, "Name of models and data in the tables of a study; by default that of the --config file."
    )

    def __post_init__(self):
        check_template(self.prompt_template)
        if self.reward not in REWARDS:
            raise ValueError(f"`reward` {self.reward!r} is not known: choose one of {', '.join(REWARDS)}.")
        if self.heatmap and not self.can_draw:
            raise ValueError("`heatmap` needs matplotlib; install crop-trl[viz], or set `--heatmap false`.")

    @property
    def can_draw(self) -> bool:
        """Whether matplotlib is installed."""
        return importlib.util.find_spec("matplotlib") is not None

    def load(self, args: "TrainConfig") -> tuple[Dataset, Dataset | None]:
        """The training rows, and the held-out ones if there are any."""
        adapter = {
            "template": self.prompt_template,
            "conversational": self.conversational,
            "counterfactuals": self.num_counterfactuals,
            "paraphrases": self.num_paraphrases,
        }
        found = []
        for kind, prefix in (("Training", ""), ("Held-out", "eval_")):
            name, split, config, revision = (
                getattr(self, f"{prefix}dataset_{what}") for what in ("name", "split", "config", "revision")
            )
            if not name:
                found.append(None)
                continue
            hub = {"split": split, "config": config, "revision": revision, "setting": f"{prefix}dataset_name"}
            dataset, report = load_triplets(name, **hub, **adapter)
            if args.process_index == 0:
                print(f"{kind} data: {report}.")
            found.append(self._with_made(dataset, prompt_kinds(get_method(args.method).needs)))
        return tuple(found)

    def _with_made(self, rows: Dataset, kinds: list[str]) -> Dataset:
        """Rows with those kinds of prompt that follow from what they hold, each where it has none of its own."""
        wrapper = wrap_problem("", self.prompt_template).strip()

        def prompt_of(row: dict, kind: str, column: str):
            if row.get(column) is not None or row.get(f"{column}s"):
                return row.get(column)
            return empty_prompt(row["prompt"], wrapper) if kind == EMPTY else hinted_prompt(row, kind)

        for kind in [kind for kind in kinds if kind in (EMPTY, *HINTS)]:
            column = prompt_column(kind)
            found = [prompt_of(row, kind, column) for row in rows]
            if any(found):
                rows = rows.remove_columns([column] if column in rows.column_names else []).add_column(column, found)
        return rows

    def describe(self) -> dict:
        """What the model card and the trackers are told of the data."""
        names = ("dataset_name", "eval_dataset_name", "prompt_template", "num_counterfactuals", "num_paraphrases")
        hub = (f"{part}dataset_{what}" for part in ("", "eval_") for what in ("config", "revision"))
        pinned = {name: value for name in hub if (value := getattr(self, name))}
        return {**{name: getattr(self, name) for name in names}, **pinned}


@documented
@dataclass
class TrainConfig(CROPConfig):
    """[`CROPConfig`] that also knows `base`, the student as it is, and methods from a user's file."""

    selector: str | None = option(None, "FILE:NAME of a method or score function of your own, in place of `method`.")
    # The file's hash.
    selector_sha256: str | None = field(default=None, init=False)

    def __post_init__(self):
        # A deprecation inside the libraries, which nobody who trains can act on.
        warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*deprecated", category=FutureWarning)
        super().__post_init__()

    def check_settings(self) -> None:
        """See [`CROPConfig`]."""
        if self.selector is not None:
            self.method, self.selector_sha256 = register_selector(self.selector)
        self.train = self.method != "base"
        if self.method not in (*METHODS, "base"):
            known = ", ".join(sorted([*METHODS, "base"]))
            raise ValueError(f"Unknown method {self.method!r}: choose one of {known}.")
        if not self.train:
            self.method = "opd"
        super().check_settings()

    def to_dict(self):
        """See [`CROPConfig`]; in a log, too, `base` is called so."""
        return super().to_dict() if self.train else {**super().to_dict(), "method": "base"}

    def describe(self) -> dict:
        """What the model card and the trackers are told of a method from a file."""
        return {name: value for name in ("selector", "selector_sha256") if (value := getattr(self, name))}


class _NotLaunched(TrainConfig):
    """A configuration that looks at no device."""

    def __post_init__(self):
        self.check_settings()


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise `ValueError` or `OSError` for what is wrong with a run, as far as no device, row or model says so."""
    kinds = (ScriptArguments, _NotLaunched, ModelConfig)
    given = ({f.name: settings[f.name] for f in fields(kind) if f.init and f.name in settings} for kind in kinds)
    script, args, model = (kind(**own) for kind, own in zip(kinds, given))
    _check_together(script, args, model)
    for name in ("dataset", "eval_dataset"):
        source, *of_hub = (getattr(script, f"{name}_{what}") for what in ("name", "config", "revision"))
        if source:
            is_local(source, f"{name}_name", *of_hub)
    models = [("model_name_or_path", model.model_name_or_path)]
    models += [
        ("teacher_model_name_or_path", one.teacher_model_name_or_path)
        for one in args.each_teacher.values()
        if one.teacher_source == MODEL and not one.teacher_server_urls
    ]
    for name, path in models:
        if not os.path.exists(path or "") and hub_name(path) is None:
            raise ValueError(f"`{name}` {path!r} is no folder here, and cannot be the name of a model on the hub.")


def _check_together(script: ScriptArguments, args: TrainConfig, model: ModelConfig) -> None:
    """Settings that are missing or do not go together."""
    teacher = args.teacher_model_name_or_path or args.teacher_server_urls or args.teachers
    for name, value in (
        ("model_name_or_path", model.model_name_or_path),
        ("teacher_model_name_or_path", teacher or args.teacher_source != MODEL),
        ("dataset_name", script.dataset_name),
    ):
        if not value:
            raise ValueError(f"`--{name}` is not set; give it on the command line or in the --config file.")
    for name in ("load_in_8bit", "load_in_4bit"):
        if getattr(model, name):
            raise ValueError(
                f"`{name}` is for the student, which stays whole; for the teacher set `teacher_quantization`."
            )
    if not args.train and (not script.eval_dataset_name or script.reward == "none"):
        raise ValueError("`--method base` evaluates only; it needs `--eval_dataset_name` and `--reward accuracy`.")
    if args.shared_sampler and model.use_peft:
        raise ValueError("`shared_sampler` is for students whose weights are trained themselves; turn `use_peft` off.")
    if model.model_revision != "main":
        check_local(model.model_name_or_path, model_revision=model.model_revision)
    adapter = [f.name for f in fields(ModelConfig) if f.name.startswith(("lora_", "use_rslora", "use_dora"))]
    changed = [name for name in adapter if getattr(model, name) != getattr(ModelConfig(), name)]
    if changed and not model.use_peft:
        raise ValueError(
            f"`{changed[0]}` is for an adapter, and without `use_peft` all weights would be trained; add `--use_peft "
            "true`, or leave it out."
        )


def check_run(script: ScriptArguments, args: TrainConfig, model: ModelConfig) -> None:
    """Raise `ValueError`, with one sentence, for settings that are missing or do not go together; mend what may be."""
    _check_together(script, args, model)
    targets = model.lora_target_modules
    if isinstance(targets, str) and targets.isidentifier():
        # TRL makes a text of a single name, which Peft then takes for a pattern of whole paths.
        model.lora_target_modules = [targets]
    if script.view is None:
        script.view = script.heatmap is not False
    if script.heatmap is None:
        script.heatmap = script.can_draw
        if not script.heatmap and args.process_index == 0:
            print("No heat map will be drawn: matplotlib is not installed (crop-trl[viz]).")
    if script.eval_dataset_name and script.reward == "none" and args.process_index == 0:
        print("Held-out accuracy is not measured: set `--reward accuracy` (`--reward_weights 0`: watch only).")
    # Inside `train`, so that every reporting backend has the starting point in the same log.
    args.eval_on_start |= bool(args.train and script.eval_dataset_name and script.reward != "none")
    args.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(args.model_init_kwargs or {}),
    }
    if args.process_index == 0:
        warn_of_memory(args, model.model_name_or_path, vars(model))


def make_trainer(script: ScriptArguments, args: TrainConfig, model: ModelConfig) -> CROPTrainer:
    """Check the settings, read the data, then the models. Raises `ValueError` for what a user got wrong."""
    check_run(script, args, model)
    current_commit()  # of the code that trains, whatever becomes of it meanwhile
    train_dataset, eval_dataset = script.load(args)
    reward = REWARDS[script.reward]
    return CROPTrainer(
        model=model.model_name_or_path,
        reward_funcs=[] if reward is None else [reward],
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=get_peft_config(model),
        run_settings={**script.describe(), **args.describe()},
    )


def measure_accuracy(trainer: CROPTrainer) -> float | None:
    """Accuracy of the student on the held-out problems, as it samples in training; `None` without any or a reward."""
    if trainer.eval_dataset is None or accuracy_reward not in trainer.reward_funcs:
        return None
    if trainer.accelerator.is_main_process:
        print(f"Evaluating the student on {len(trainer.eval_dataset)} held-out problems.")
    return trainer.evaluate()[ACCURACY]


def _verdicts(trainer: CROPTrainer, step: int) -> np.ndarray:
    """Rewards of an evaluation that this process has measured, `[problems, samples]`; empty for any other."""
    return np.array(trainer.evaluated_rewards.get(step, {}).get(accuracy_reward.__name__, []))


def accuracy_interval(trainer: CROPTrainer, step: int) -> tuple[float, float] | None:
    """95 % confidence interval of an accuracy that this process has measured; `None` for any other."""
    problems = _verdicts(trainer, step)
    # An answer without a verdict has no reward.
    judged = problems[~np.isnan(problems).any(-1)] if problems.size else problems
    return share_interval(judged) if judged.size else None


def _shown(accuracy: float, interval: tuple[float, float] | None) -> str:
    return f"{accuracy:.3f}" + (f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else "")


def _rows_to_show(trainer: CROPTrainer) -> tuple[list[dict], list[dict]]:
    """Rows worth a look, held-out ones first: those with all prompts of a picture, and those of a page."""
    sources = [dataset for dataset in (trainer.eval_dataset, trainer.train_dataset) if dataset is not None]
    method = get_method(trainer.args.method)
    kinds = prompt_kinds(method.needs)
    wanted = [[*REWORDINGS, *kinds], *([kinds] if method.score and not needs_negatives(method.needs) else [])]
    whole = []
    for kinds in wanted:
        for dataset in sources:
            rows = (dataset[i] for i in range(min(LOOKED_AT, len(dataset))))
            whole = whole or [row for row in rows if all(prompt_variants(row, kind) for kind in kinds)]
    return whole, whole or [sources[0][i] for i in range(min(LOOKED_AT, len(sources[0])))]


def save_heatmap(trainer: CROPTrainer, folder: Path) -> None:
    """Draw what the method keeps in one held-out response."""
    from .analysis.heatmap import save_png
    from .analysis.inspect import inspect_response

    rows, _ = _rows_to_show(trainer)
    if not rows:
        if trainer.accelerator.is_main_process:
            print("No heat map is drawn: it shows a triplet, and the data hold prompts alone.")
        return
    heatmap = inspect_response(trainer, *rows)
    if trainer.accelerator.is_main_process:
        save_png(heatmap, folder / "heatmap.png")
        print(f"Tokens kept in one response: {folder / 'heatmap.png'}")


def save_view(trainer: CROPTrainer, folder: Path) -> None:
    """Write the page of some held-out responses, and hand it to what the run reports to."""
    from .analysis.bank import collect_bank
    from .viewer.page import bank_page, save_page

    bank = collect_bank(trainer, _rows_to_show(trainer)[1])
    if not trainer.accelerator.is_main_process:
        return
    args = trainer.args
    bank.settings = {"method": args.method, **trainer.run_settings, "seed": args.seed}
    title = f"What {args.method} keeps after {trainer.state.global_step} steps, and what others would"
    path = folder / "view.html"
    save_page(bank_page(bank, trainer.processing_class, args.selection_settings, title=title, method=args.method), path)
    print(f"Look inside {len(bank.rows)} answers, token by token, under every method: open {path} in a browser.")
    send_page(trainer, path)


def _scoring_passes(trainer: CROPTrainer) -> int:
    """Times that a response to the first row is read by teacher and student for its scores."""
    row, count = next(iter(trainer.train_dataset)), 0
    for need in get_method(trainer.args.method).needs:
        _, kind = split_signal(need)
        count += trainer.args.credit_num_negatives if kind == NEGATIVE else len(prompt_variants(row, kind))
    return count


def finish_run(
    trainer: CROPTrainer, heatmap: bool = False, started: float | None = None, view: bool = False
) -> RunResult:
    """Measure the accuracy, write `result.json`, draw; the seconds of the run count from `started`."""
    args, state, folder = trainer.args, trainer.state, Path(trainer.args.output_dir)
    trained = state.global_step > 0
    before = next((entry[ACCURACY] for entry in state.log_history if ACCURACY in entry), None)
    measured = measure_accuracy(trainer)
    verdicts = _verdicts(trainer, state.global_step)
    result = RunResult(
        method=args.method if trained else "base",
        accuracy_before=before if trained else measured,
        accuracy_after=measured if trained else None,
        interval_before=accuracy_interval(trainer, 0),
        interval_after=accuracy_interval(trainer, state.global_step) if trained else None,
        retention_ratio=args.retention_ratio,
        seed=args.seed,
        steps=state.global_step,
        selector=getattr(args, "selector", None),
        selector_sha256=getattr(args, "selector_sha256", None),
        # An answer without a verdict is not right.
        problems_after=np.nan_to_num(verdicts).mean(-1).tolist() if trained and verdicts.size else None,
        passes=_scoring_passes(trainer) if trained else None,
        seconds=None if started is None else round(time.time() - started, 1),
        commit=current_commit(),
        statistics=statistics_of(state.log_history),
    )
    if trainer.accelerator.is_main_process:
        result.write(folder)
        if result.accuracy_before is not None:
            print(
                f"Accuracy on {len(trainer.eval_dataset)} held-out problems, {trainer.num_generations_eval} sampled "
                f"answers each: {_shown(result.accuracy_before, result.interval_before)} before"
                + (f", {_shown(measured, result.interval_after)} after" if trained else "")
                + (f" {state.global_step} steps ({args.method})." if trained else ".")
            )
    # Last, so that numbers and model are safe whatever becomes of a picture.
    if heatmap and trained:
        save_heatmap(trainer, folder)
    if view and trained:
        save_view(trainer, folder)
    return result
