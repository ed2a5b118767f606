"""Sample one batch of responses, score it every way there is, and see what each method would train of it.

    crop-trl replay --config examples/configs/tiny_math.yaml --use_cpu true \
        --num_counterfactuals 4 --bank runs/bank.safetensors

With a bank that exists the models are not loaded: it is read and the methods are applied to it again. `--selector` adds
a method of your own.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoTokenizer
from trl import ModelConfig

from ..analysis.bank import RolloutBank, caught_share, collect_bank, kept_overlap
from ..methods import get_method
from ..runs import ScriptArguments, TrainConfig, make_trainer
from ..text import markdown_table
from .errors import told
from .options import SettingsParser


@dataclass
class ReplayArguments:
    """
    Where the bank lies and what to show of it.

    Args:
        bank (`str`): File to write, or to read when it exists.
        bank_prompts (`int`): Prompts to sample from.
        gap_threshold (`float`): Student-teacher gap, in nats, from which a token counts as a large one.
    """

    bank: str = field(default="runs/bank.safetensors", metadata={"help": "File to write, or to read if it exists."})
    bank_prompts: int = field(default=64, metadata={"help": "Prompts to sample from."})
    gap_threshold: float = field(default=2.0, metadata={"help": "Gap in nats from which a token is a large one."})


def fixed(value: float) -> str:
    """Three places, and no minus before a zero."""
    return f"{round(value, 3) + 0.0:.3f}"


def numeric_tokens(bank: RolloutBank, tokenizer) -> torch.Tensor:
    """Tokens with a digit or an operator, `[B, T]`: they tell what a token says of the problem better than any word."""
    ids = bank.completion_ids.unique().tolist()
    numeric = [i for i in ids if any(ch.isdigit() or ch in "+-*/=" for ch in tokenizer.decode([i]))]
    return bank.loss_mask & torch.isin(bank.completion_ids, torch.tensor(numeric, dtype=torch.long))


def method_row(bank: RolloutBank, name: str, settings, threshold: float, numeric: torch.Tensor | None) -> list[str]:
    """What one method keeps: share of all tokens, of the large gaps, of digits; and its score, all as texts."""
    selection = bank.select(name, settings)
    mask, scores = selection.mask, selection.scores
    caught = caught_share(bank, name, threshold, settings)
    values = None if scores is None else scores[bank.loss_mask].float()
    return [
        name,
        f"{(mask.sum() / bank.loss_mask.sum()).item():.3f}",
        "-" if caught is None else f"{caught:.2f}",
        "-" if numeric is None else f"{((mask & numeric).sum() / mask.sum()).item():.2f}",
        *["-" if values is None else fixed(f(values).item()) for f in (torch.mean, torch.median, torch.max)],
    ]


def report(bank: RolloutBank, settings, threshold: float, tokenizer=None) -> str:
    """Budgets, scores, catches and overlaps of every method that the bank has signals for."""
    names, tokens = bank.runnable_methods(), bank.loss_mask.sum()
    numeric = None if tokenizer is None else numeric_tokens(bank, tokenizer)
    columns = ["method", "kept", "gaps caught", "digits, operators", "score mean", "median", "max"]
    rows = [method_row(bank, name, settings, threshold, numeric) for name in names]
    selectors = [name for name in names if get_method(name).score]
    overlap = kept_overlap(bank, selectors, settings).tolist()
    shares = [[name, *(f"{value:.2f}" for value in line)] for name, line in zip(selectors, overlap)]
    large = (bank.loss_mask & (bank.gap > threshold)).sum()
    everything = "" if numeric is None else f" ({(numeric.sum() / tokens).item():.2f} of all tokens)"
    return (
        f"{len(bank.prompts)} responses, {tokens} tokens, {large} with a student-teacher gap above {threshold:g} nats; "
        f"retention ratio {settings.retention_ratio}.\n\n"
        f"{markdown_table(columns, rows, right=True, padded=True)}\n"
        "kept: share of all tokens that is trained. gaps caught: of the tokens that the student finds likelier than "
        f"the teacher by more than {threshold:g} nats, the share that the method keeps; a blind choice catches about "
        f"as much as it keeps. digits, operators: their share of the kept tokens{everything}. score: what ranks "
        "tokens, on a scale of each method's own.\n\n"
        "Share of the tokens kept by the row's method that the column's keeps too:\n\n"
        f"{markdown_table(['', *selectors], shares, right=True, padded=True)}"
    )


def main(argv: list[str] | None = None) -> None:
    """Parse, sample or read, report."""
    with told():
        kinds = (ReplayArguments, ScriptArguments, TrainConfig, ModelConfig)
        replay, script, args, model = SettingsParser("replay", kinds, __doc__).read(argv)
        path = Path(replay.bank)
        if path.exists():
            print(f"Reading {path}.")
            bank = RolloutBank.load(path)
        else:
            if replay.bank_prompts < 1:
                raise ValueError(f"`bank_prompts` must be at least 1, got {replay.bank_prompts}.")
            path.parent.mkdir(parents=True, exist_ok=True)
            args.method = "crop"
            trainer = make_trainer(script, args, model)
            rows = trainer.train_dataset.select(range(min(replay.bank_prompts, len(trainer.train_dataset))))
            bank = collect_bank(trainer, rows)
            bank.settings = {
                "model_name_or_path": model.model_name_or_path,
                "teacher_model_name_or_path": args.teacher_model_name_or_path,
                "dataset_name": script.dataset_name,
                "seed": args.seed,
            }
            bank.save(path)
            print(f"Wrote {path}.")
        tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path) if model.model_name_or_path else None
    print(report(bank, args.selection_settings, replay.gap_threshold, tokenizer))


if __name__ == "__main__":
    main()
