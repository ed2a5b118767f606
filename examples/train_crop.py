"""Train a student with CROP, or with any other method of `crop_trl`, on triplet records.

    accelerate launch --config_file accelerate_configs/cpu.yaml examples/train_crop.py \
        --config examples/configs/tiny_math.yaml

Every field of the YAML file can be overridden on the command line, for instance `--method random --seed 1`. The method
`base` evaluates the student and trains nothing.
"""

import importlib.util
import json
import os
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

# A library that looks for its optional parts on the hub at every start would wait for it on a machine without one.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import yaml
from trl import ModelConfig, TrlParser, get_peft_config

from crop_trl import CROPConfig, CROPTrainer
from crop_trl.evaluation.grading import accuracy_reward
from crop_trl.planning.memory import warn_of_memory
from crop_trl.training.checkpoints import SaveError
from crop_trl.training.reporting import start_reports
from crop_trl.triplets import DEFAULT_PROMPT_TEMPLATE, load_triplets

REWARDS = {"accuracy": accuracy_reward, "none": None}
# What the model card and the trackers are told of the data.
DESCRIBED = ("dataset_name", "eval_dataset_name", "prompt_template", "num_counterfactuals", "num_paraphrases")


@dataclass
class ScriptArguments:
    r"""
    What this script needs beside [`CROPConfig`] and [`~trl.ModelConfig`].

    Args:
        dataset_name (`str`): JSONL file or hub dataset of triplet records.
        dataset_split (`str`): Split of a hub dataset.
        eval_dataset_name (`str`, *optional*): The same for held-out problems; without it nothing is evaluated.
        eval_dataset_split (`str`): Split of a hub dataset.
        prompt_template (`str`): Answer-format wrapper put around every problem; holds `{problem}` once.
        conversational (`bool`): Whether prompts are chat messages or plain text.
        num_counterfactuals, num_paraphrases (`int`): How many of each a prompt may have; beyond the first they come
            from the record's `alternates`.
        reward (`str`): `accuracy` or `none`; with `--reward_weights 0` it is watched without being trained on.
        heatmap (`bool`): Whether to end with a picture of the tokens chosen in one held-out response.
    """

    dataset_name: str | None = field(default=None, metadata={"help": "JSONL file or hub dataset of triplet records."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a hub dataset."})
    eval_dataset_name: str | None = field(default=None, metadata={"help": "The same for held-out problems."})
    eval_dataset_split: str = field(default="test", metadata={"help": "Split of a hub dataset."})
    prompt_template: str = field(
        default=DEFAULT_PROMPT_TEMPLATE, metadata={"help": "Wrapper put around every problem; holds {problem} once."}
    )
    conversational: bool = field(default=True, metadata={"help": "Prompts as chat messages, or as plain text."})
    num_counterfactuals: int = field(default=1, metadata={"help": "Counterfactuals to use of each record."})
    num_paraphrases: int = field(default=1, metadata={"help": "Paraphrases to use of each record."})
    reward: str = field(default="none", metadata={"help": "accuracy or none; see reward_weights of the trainer."})
    heatmap: bool = field(default=True, metadata={"help": "End with a picture of the tokens chosen in a response."})

    def __post_init__(self):
        if self.reward not in REWARDS:
            raise ValueError(f"`reward` {self.reward!r} is not known: choose one of {', '.join(REWARDS)}.")


@dataclass
class TrainConfig(CROPConfig):
    """[`CROPConfig`] that also knows `base`, the student as it is."""

    def __post_init__(self):
        self.train = self.method != "base"
        if not self.train:
            self.method = "opd"
        super().__post_init__()

    def to_dict(self):
        """See [`CROPConfig`]; in a log, too, `base` is called so."""
        return super().to_dict() if self.train else {**super().to_dict(), "method": "base"}


def read_arguments(kinds: tuple[type, ...], argv: list[str] | None = None) -> tuple:
    """Instances of dataclasses from the command line and its `--config` file. Raises `ValueError` for what is wrong."""
    try:
        return TrlParser(kinds).parse_args_and_config(argv)
    except yaml.YAMLError as error:
        raise ValueError(f"The --config file is no YAML ({' '.join(str(error).split())}); mend it.") from None


def make_trainer(script: ScriptArguments, args: TrainConfig, model: ModelConfig) -> CROPTrainer:
    """Read the data, then the models. Raises `ValueError` with one sentence for what a user got wrong."""
    for name, value in (
        ("model_name_or_path", model.model_name_or_path),
        ("teacher_model_name_or_path", args.teacher_model_name_or_path),
        ("dataset_name", script.dataset_name),
    ):
        if not value and not (name == "teacher_model_name_or_path" and args.teacher_server_urls):
            raise ValueError(f"`--{name}` is not set; give it on the command line or in the --config file.")
    targets = model.lora_target_modules
    if isinstance(targets, str) and targets.isidentifier():
        # TRL makes a text of a single name, which Peft then takes for a pattern of whole paths.
        model.lora_target_modules = [targets]
    for name in ("load_in_8bit", "load_in_4bit"):
        if getattr(model, name):
            raise ValueError(
                f"`{name}` is for the student, whose quantised weights are not supported; set `dtype` to bfloat16 with "
                "`use_peft`, or for the teacher `teacher_quantization`."
            )
    talk = args.process_index == 0
    if script.heatmap and args.train and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("`heatmap` needs matplotlib; install crop-trl[viz], or set `--heatmap false`.")
    adapter = {
        "template": script.prompt_template,
        "conversational": script.conversational,
        "counterfactuals": script.num_counterfactuals,
        "paraphrases": script.num_paraphrases,
    }
    train_dataset, report = load_triplets(script.dataset_name, script.dataset_split, **adapter)
    if talk:
        print(f"Training triplets: {report}.")
    eval_dataset = None
    if script.eval_dataset_name:
        eval_dataset, report = load_triplets(script.eval_dataset_name, script.eval_dataset_split, **adapter)
        if talk:
            print(f"Held-out triplets: {report}.")
        if script.reward == "none" and talk:
            print("Held-out accuracy is not measured: set `--reward accuracy` (`--reward_weights 0`: watch only).")
    if not args.train and (eval_dataset is None or script.reward == "none"):
        raise ValueError("`--method base` evaluates only; it needs `--eval_dataset_name` and `--reward accuracy`.")
    # Inside `train`, so that every reporting backend has the starting point in the same log.
    args.eval_on_start = args.train and eval_dataset is not None and script.reward != "none"
    if talk:
        warn_of_memory(args, model.model_name_or_path, args.teacher_model_name_or_path, vars(model))
    reward = REWARDS[script.reward]
    args.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(args.model_init_kwargs or {}),
    }
    return CROPTrainer(
        model=model.model_name_or_path,
        reward_funcs=[] if reward is None else [reward],
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=get_peft_config(model),
        run_settings={name: getattr(script, name) for name in DESCRIBED},
    )


ACCURACY = "eval_rewards/accuracy_reward/mean"


def evaluate(trainer: CROPTrainer) -> float | None:
    """Accuracy of the student on the held-out problems, as it samples in training; `None` without any or a reward."""
    if trainer.eval_dataset is None or accuracy_reward not in trainer.reward_funcs:
        return None
    if trainer.accelerator.is_main_process:
        print(f"Evaluating the student on {len(trainer.eval_dataset)} held-out problems.")
    return trainer.evaluate()[ACCURACY]


def save_heatmap(trainer: CROPTrainer, folder: Path) -> None:
    """Draw what the method keeps in one held-out response."""
    from crop_trl.analysis.heatmap import save_html, save_png
    from crop_trl.analysis.inspect import inspect_response

    rows = trainer.train_dataset if trainer.eval_dataset is None else trainer.eval_dataset
    heatmap = inspect_response(trainer, rows[0])
    if trainer.accelerator.is_main_process:
        save_png(heatmap, folder / "heatmap.png")
        save_html(heatmap, folder / "heatmap.html")
        print(f"Tokens chosen in one held-out response: {folder / 'heatmap.png'} and {folder / 'heatmap.html'}")


def train_and_save(trainer: CROPTrainer) -> None:
    """Train, then save the model and the log of the run, where evaluation looks for the last truncation share."""
    try:
        trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_state()
    except SaveError as error:
        sys.exit(f"error: {error}")


def main(argv: list[str] | None = None) -> None:
    """Parse, train, evaluate, draw."""
    # Deprecations inside the libraries, which nobody who runs this script can act on.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*deprecated", category=FutureWarning)
    try:
        script, args, model = read_arguments((ScriptArguments, TrainConfig, ModelConfig), argv)
        trainer = make_trainer(script, args, model)
        start_reports(trainer)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")

    after = None
    if not args.train:
        before = evaluate(trainer)
    else:
        if args.eval_on_start and trainer.accelerator.is_main_process:
            print(f"Evaluating the student on {len(trainer.eval_dataset)} held-out problems, then training.")
        train_and_save(trainer)
        before = next((entry[ACCURACY] for entry in trainer.state.log_history if ACCURACY in entry), None)
        after = evaluate(trainer)
    if trainer.accelerator.is_main_process:
        result = {
            "method": args.method if args.train else "base",
            "retention_ratio": args.retention_ratio,
            "seed": args.seed,
            "steps": trainer.state.global_step,
            "accuracy_before": before,
            "accuracy_after": after,
        }
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        (Path(args.output_dir) / "result.json").write_text(json.dumps(result, indent=2) + "\n")
        if before is not None:
            print(
                f"Accuracy on {len(trainer.eval_dataset)} held-out problems, {trainer.num_generations_eval} sampled "
                f"answers each: {before:.3f} before"
                + ("." if after is None else f", {after:.3f} after {trainer.state.global_step} steps ({args.method}).")
            )

    # Last, so that numbers and model are safe whatever becomes of a picture.
    if script.heatmap and args.train:
        save_heatmap(trainer, Path(args.output_dir))


if __name__ == "__main__":
    main()
