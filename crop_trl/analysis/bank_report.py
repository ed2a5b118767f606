"""What every method keeps of the responses in a rollout bank, as Markdown."""

import torch

from ..methods import get_method
from ..text import markdown_table
from .bank import RolloutBank, caught_share, kept_overlap

LARGE_GAP = 2.0  # nats between student and teacher


def fixed(value: float) -> str:
    """Three places, and no minus before a zero."""
    return f"{round(value, 3) + 0.0:.3f}"


def numeric_tokens(bank: RolloutBank, tokenizer) -> torch.Tensor:
    """Tokens with a digit or an operator, `[B, T]`: they tell what a token says of the problem better than any word."""
    ids = bank.completion_ids.unique().tolist()
    numeric = [i for i in ids if any(ch.isdigit() or ch in "+-*/=" for ch in tokenizer.decode([i]))]
    return bank.loss_mask & torch.isin(bank.completion_ids, torch.tensor(numeric, dtype=torch.long))


def method_row(bank: RolloutBank, name: str, settings, numeric: torch.Tensor | None, trained: str) -> list[str]:
    """What one method keeps: share of all tokens, of the large gaps, of digits; and its score, all as texts."""
    selection = bank.select(name, settings)
    mask, scores = selection.mask, selection.scores
    caught = caught_share(bank, name, LARGE_GAP, settings, trained)
    values = None if scores is None else scores[bank.loss_mask].float()
    return [
        name,
        f"{(mask.sum() / bank.loss_mask.sum()).item():.3f}",
        "-" if caught is None else f"{caught:.2f}",
        "-" if numeric is None else f"{((mask & numeric).sum() / mask.sum()).item():.2f}",
        *["-" if values is None else fixed(f(values).item()) for f in (torch.mean, torch.median, torch.max)],
    ]


def bank_report(bank: RolloutBank, settings, tokenizer=None, trained: str = "opd") -> str:
    """Budgets, scores, catches and overlaps of every method that the bank has signals for. Gaps are to the target of
    `trained`."""
    names, tokens = bank.choosing_methods(), bank.loss_mask.sum()
    numeric = None if tokenizer is None else numeric_tokens(bank, tokenizer)
    columns = ["method", "kept", "gaps caught", "digits, operators", "score mean", "median", "max"]
    rows = [method_row(bank, name, settings, numeric, trained) for name in names]
    selectors = [name for name in names if get_method(name).chooses]
    overlap = kept_overlap(bank, selectors, settings).tolist()
    shares = [[name, *(f"{value:.2f}" for value in line)] for name, line in zip(selectors, overlap)]
    large = (bank.loss_mask & (bank.gap(trained) > LARGE_GAP)).sum()
    everything = "" if numeric is None else f" ({(numeric.sum() / tokens).item():.2f} of all tokens)"
    return (
        f"{len(bank.rows)} responses, {tokens} tokens, {large} with a student-teacher gap above {LARGE_GAP:g} nats; "
        f"retention ratio {settings.retention_ratio}.\n\n"
        f"{markdown_table(columns, rows, right=True, padded=True)}\n"
        "kept: share of all tokens that is kept. gaps caught: of the tokens that the student finds likelier than "
        f"the teacher by more than {LARGE_GAP:g} nats, the share that the method keeps; a blind choice catches about "
        f"as much as it keeps. digits, operators: their share of the kept tokens{everything}. score: what ranks "
        "tokens, on a scale of each method's own.\n\n"
        "Share of the tokens kept by the row's method that the column's keeps too:\n\n"
        f"{markdown_table(['', *selectors], shares, right=True, padded=True)}"
    )
