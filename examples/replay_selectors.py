"""Sample one batch of responses, score it every way there is, and see what each method would train of it.

    python examples/replay_selectors.py --config examples/configs/tiny_math.yaml --use_cpu true \
        --num_counterfactuals 4 --bank runs/bank.safetensors

With a bank that exists the models are not loaded: it is read and the methods are applied to it again.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from train_crop import ScriptArguments, TrainConfig, make_trainer, read_arguments
from transformers import AutoTokenizer
from trl import ModelConfig

from crop_trl.analysis.bank import RolloutBank, caught_share, collect_bank, kept_overlap
from crop_trl.methods import get_method


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


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns in Markdown, right-aligned but for the first."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]

    def line(cells):
        first, *others = (str(cell) for cell in cells)
        aligned = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True))]
        return f"| {' | '.join(aligned)} |"

    return "\n".join([line(header), "|" + "|".join("-" * (w + 2) for w in widths) + "|", *map(line, rows)])


def fixed(value: float) -> str:
    """Three places, and no minus before a zero."""
    return f"{round(value, 3) + 0.0:.3f}"


def report(bank: RolloutBank, settings, threshold: float, tokenizer=None) -> str:
    """Budgets, scores, catches and overlaps of every method that the bank has signals for."""
    names = bank.runnable_methods()
    pieces = None
    if tokenizer is not None:
        # A digit or an operator tells what the token says of the problem better than any word.
        ids = bank.completion_ids.unique().tolist()
        numeric = [i for i in ids if any(ch.isdigit() or ch in "+-*/=" for ch in tokenizer.decode([i]))]
        pieces = torch.isin(bank.completion_ids, torch.tensor(numeric, dtype=torch.long))
    rows = []
    for name in names:
        selection = bank.select(name, settings)
        share = selection.mask.sum().item() / bank.loss_mask.sum().item()
        caught = caught_share(bank, name, threshold, settings)
        score = selection.scores
        values = score[bank.loss_mask].float() if score is not None else None
        numeric_kept = None if pieces is None else (selection.mask & pieces).sum() / selection.mask.sum()
        rows.append(
            [
                name,
                f"{share:.3f}",
                "-" if caught is None else f"{caught:.2f}",
                "-" if numeric_kept is None else f"{numeric_kept.item():.2f}",
                "-" if values is None else fixed(values.mean().item()),
                "-" if values is None else fixed(values.median().item()),
                "-" if values is None else fixed(values.max().item()),
            ]
        )
    columns = ["method", "kept", f"gap > {threshold:g} caught", "digits, operators", "score mean", "median", "max"]
    everything = (
        "" if pieces is None else f" ({(bank.loss_mask & pieces).sum() / bank.loss_mask.sum():.2f} of all tokens)"
    )
    meanings = (
        f"kept: share of all tokens that is trained. gap > {threshold:g} caught: of the tokens that the student finds "
        f"likelier than the teacher by more than {threshold:g} nats, the share that the method keeps; a blind choice "
        f"catches about as much as it keeps. digits, operators: their share of the kept tokens{everything}. score: "
        "what ranks tokens, on a scale of each method's own."
    )
    selectors = [name for name in names if get_method(name).score]
    overlap = kept_overlap(bank, selectors, settings)
    overlap_rows = [[name, *(f"{value:.2f}" for value in line)] for name, line in zip(selectors, overlap.tolist())]
    large = (bank.loss_mask & (bank.gap > threshold)).sum().item()
    return (
        f"{len(bank.prompts)} responses, {bank.loss_mask.sum().item()} tokens, {large} with a student-teacher gap "
        f"above {threshold:g} nats; retention ratio {settings.retention_ratio}.\n\n{table(columns, rows)}\n\n"
        f"{meanings}\n\n"
        f"Share of the tokens kept by the row's method that the column's keeps too:\n\n"
        f"{table(['', *selectors], overlap_rows)}"
    )


def main() -> None:
    """Parse, sample or read, report."""
    try:
        replay, script, args, model = read_arguments((ReplayArguments, ScriptArguments, TrainConfig, ModelConfig))
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
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
    print(report(bank, args.selection_settings, replay.gap_threshold, tokenizer))


if __name__ == "__main__":
    main()
