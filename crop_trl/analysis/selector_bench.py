"""How well each method finds the tokens that depend on the conditions: precision, recall and average precision against
labels that need no model (`dependence.py`), over the responses of a rollout bank. A method scores the whole response,
as it does in training; its budget is then a share of the tokens that have a label."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..evaluation.grading import grade
from ..methods import SelectionSettings, Signals, get_method
from ..methods.budget import select_top_b
from ..prompts import split_signal, unwrap_problem
from ..text import markdown_table, token_pieces, visible_text
from .bank import RolloutBank
from .chart import COLOURS, MARKERS, QUIET, RULE, caption, new_figure, save, tidy
from .dependence import AFTER_ERROR, NEGATIVE, POSITIVE, UNALIGNED, Reference, problem_of

CEILING = "(the labels)"
MEASURES = ("precision", "recall", "average_precision")
_RESAMPLES = 2000


@dataclass
class LabelledResponses:
    """B responses of at most T tokens, laid beside the worked solutions of their problems."""

    labels: torch.Tensor  # [B, T], see `dependence.py`; AFTER_ERROR outside the response as well
    tokens: torch.Tensor  # bool, [B, T]: what may be kept
    right: np.ndarray  # [B]: whether the final answer is right
    problems: list[str]
    pieces: list[list[str]]

    def counts(self) -> dict[str, dict[str, int]]:
        """For all, right and wrong responses: how many there are, and what became of their tokens."""
        found = {}
        for name, rows in groups(self.right).items():
            labels, real = self.labels[rows], self.tokens[rows]
            cut = ((labels == AFTER_ERROR) & real).any(-1)
            found[name] = {
                "responses": int(rows.sum()),
                "tokens": int(real.sum()),
                "positive": int(((labels == POSITIVE) & real).sum()),
                "negative": int(((labels == NEGATIVE) & real).sum()),
                "unaligned": int(((labels == UNALIGNED) & real).sum()),
                "after_first_wrong_value": int(((labels == AFTER_ERROR) & real).sum()),
                "responses_with_a_wrong_value": int(cut.sum()),
            }
        return found

    def in_context(self, count: int, seed: int = 0) -> str:
        """Labelled tokens in their responses, drawn at random, half of them positive: for reading labels by hand."""
        rng, drawn = np.random.default_rng(seed), []
        for label, share in ((POSITIVE, count - count // 2), (NEGATIVE, count // 2)):
            places = ((self.labels == label) & self.tokens).nonzero().tolist()
            drawn += [places[i] for i in rng.permutation(len(places))[:share]]
        lines = []
        for number, i in enumerate(rng.permutation(len(drawn)), start=1):
            row, t = drawn[i]
            text = [visible_text(piece) for piece in self.pieces[row]]
            text[t] = f"⟦{text[t]}⟧"
            verdict = "right" if self.right[row] else "wrong"
            sign = "depends on a condition" if self.labels[row, t] == POSITIVE else "does not depend"
            lines.append(f"{number}. {sign} ({verdict} response)\n{self.problems[row]}\n{''.join(text)}\n")
        return "\n".join(lines)


def groups(right: np.ndarray) -> dict[str, np.ndarray]:
    """Which responses are meant by each name, [B] each."""
    return {"all": np.ones_like(right), "right": right, "wrong": ~right}


def record_of_each(
    prompts: Sequence[str], records: Sequence[Mapping[str, Any]], template: str
) -> list[Mapping[str, Any]]:
    """The record that each prompt was made from. Raises `ValueError` for a prompt without one."""
    named = [(problem_of(record), record) for record in records]
    by_problem = {" ".join(problem.split()): record for problem, record in named if isinstance(problem, str)}
    found = []
    for text in prompts:
        problem = " ".join(unwrap_problem(text, template).split())
        if problem not in by_problem:
            what = "give the dataset and template it was sampled from, or another `--bank`"
            raise ValueError(f"A response is to {problem[:80]!r}, which is no problem of the dataset; {what}.")
        found.append(by_problem[problem])
    return found


def label_bank(bank: RolloutBank, records: Sequence[Mapping[str, Any]], tokenizer, template: str) -> LabelledResponses:
    """Lay each response beside the solution of its record. Raises `ValueError` for a problem that has none."""
    references: dict[str, Reference] = {}
    tokens = bank.loss_mask.bool()
    labels = torch.full(tokens.shape, AFTER_ERROR, dtype=torch.int8)
    right, problems, pieces = [], [], []
    for row, record in enumerate(record_of_each(bank.texts["original"], records, template)):
        problem = " ".join(str(problem_of(record)).split())
        if problem not in references:
            references[problem] = Reference.of(record)
            if record.get("answer") is None:
                raise ValueError(f"The record of {problem[:80]!r} has no `answer` to tell right responses by.")
        ids = bank.completion_ids[row, : int((tokens[row] * torch.arange(1, tokens.size(1) + 1)).max())].tolist()
        pieces.append(token_pieces(tokenizer, ids))
        labels[row, : len(ids)] = torch.from_numpy(references[problem].label_tokens(pieces[-1]))
        right.append(grade(tokenizer.decode(ids, skip_special_tokens=True), str(record["answer"])))
        problems.append(problem)
    return LabelledResponses(labels, tokens, np.array(right, dtype=bool), problems, pieces)


def average_precision(scores: np.ndarray, positive: np.ndarray) -> float:
    """Mean precision at the ranks of the positives, best score first; equal scores share that of their last."""
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.diff(scores[order]) != 0, True)
    hits, ranks = np.cumsum(positive[order])[last], np.flatnonzero(last) + 1
    return float((np.diff(hits, prepend=0) * hits / ranks).sum() / hits[-1])


@dataclass
class _Sums:
    """What the measures of one selector are ratios of, per response; a resample of problems only weighs them anew."""

    kept: np.ndarray  # [budgets, B]
    hits: np.ndarray  # [budgets, B]: kept and positive
    positive: np.ndarray  # [B]
    precision_sum: np.ndarray  # [B]: average precision, 0 without positives

    def measures(self, weights: np.ndarray) -> np.ndarray:
        """Precision and recall of all tokens together, average precision a mean over responses: `[3, budgets, ...]`."""
        with np.errstate(invalid="ignore", divide="ignore"):
            hits, positive = self.hits @ weights, self.positive @ weights
            average = (self.precision_sum @ weights) / ((self.positive > 0) @ weights)
            return np.stack([hits / (self.kept @ weights), hits / positive, np.broadcast_to(average, hits.shape)])


def _sums(
    scores: torch.Tensor | None, kept: torch.Tensor, labelled: LabelledResponses, settings, budgets: Sequence[float]
) -> _Sums:
    has_label = labelled.tokens & (labelled.labels >= NEGATIVE)
    positive = labelled.tokens & (labelled.labels == POSITIVE)
    if scores is None:
        # A method that has no budget ranks no token above another that it keeps.
        masks, scores = [has_label & kept] * len(budgets), kept.float()
    else:
        masks = [select_top_b(scores, has_label, budget, settings.min_tokens) for budget in budgets]
    # What is not finite is never kept, and so comes last.
    finite = torch.where(torch.isfinite(scores), scores, torch.finfo(scores.dtype).min).double().numpy()
    average = [
        average_precision(finite[row, here], truth[here]) if truth.any() else 0.0
        for row, (here, truth) in enumerate(zip(has_label.numpy(), positive.numpy()))
    ]
    kept = np.stack([mask.sum(-1).numpy() for mask in masks])
    hits = np.stack([(mask & positive).sum(-1).numpy() for mask in masks])
    return _Sums(kept, hits, positive.sum(-1).numpy(), np.array(average))


def bench(
    bank: RolloutBank,
    labelled: LabelledResponses,
    counterfactuals: Sequence[int],
    budgets: Sequence[float],
    settings: SelectionSettings,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """A row for every method, number of counterfactuals, budget and group of responses, with intervals."""
    found: list[tuple[str, int | None, _Sums]] = []
    for name in bank.choosing_methods():
        changed = [need for need in get_method(name).needs if split_signal(need)[1] == "counterfactual"]
        for count in counterfactuals if changed else [None]:
            # As if it had been sampled with so many counterfactuals; `None`: the method reads none.
            lists = bank.signals.lists
            cut = {need: parts[:count] if need in changed else parts for need, parts in lists.items()}
            selection = replace(bank, signals=Signals(cut)).select(name, settings)
            found.append((name, count, _sums(selection.scores, selection.mask, labelled, settings, budgets)))
    right = labelled.labels == POSITIVE
    found.append((CEILING, None, _sums(right.float(), right, labelled, settings, budgets)))
    numbers = np.unique(labelled.problems, return_inverse=True)[1]
    number = numbers.max() + 1
    drawn = np.random.default_rng(seed).multinomial(number, np.full(number, 1 / number), _RESAMPLES)
    weights = np.vstack([np.ones(number, dtype=int), drawn])[:, numbers].T  # [B, 1 + resamples]
    rows = []
    for name, count, sums in found:
        for group, members in groups(labelled.right).items():
            values = sums.measures(weights * members[:, None])
            for place, budget in enumerate(budgets):
                row = {"method": name, "counterfactuals": count, "budget": budget, "responses": group}
                for measure, (value, *resampled) in zip(MEASURES, values[:, place]):
                    known = np.array(resampled)[np.isfinite(resampled)]
                    low, high = np.quantile(known, [0.025, 0.975]) if known.size else (np.nan, np.nan)
                    row |= {measure: float(value), f"{measure}_low": float(low), f"{measure}_high": float(high)}
                rows.append(row)
    return rows


def bench_table(rows: Sequence[Mapping[str, Any]], budget: float, group: str) -> str:
    """The rows of one budget and group as Markdown."""

    def shown(row: Mapping[str, Any], measure: str) -> str:
        low, high = row[f"{measure}_low"], row[f"{measure}_high"]
        return f"{row[measure]:.2f} ({low:.2f} to {high:.2f})" if np.isfinite(row[measure]) else "-"

    lines = [
        [row["method"], row["counterfactuals"] or "-", *(shown(row, measure) for measure in MEASURES)]
        for row in rows
        if row["budget"] == budget and row["responses"] == group
    ]
    header = ["method", "counterfactuals", *(measure.replace("_", " ") for measure in MEASURES)]
    return markdown_table(header, lines, right=True, padded=True)


def save_bench_chart(rows: Sequence[Mapping[str, Any]], budget: float, path: str | Path) -> None:
    """Draw precision, recall and average precision of all responses at one budget, a line a method, to a PNG."""
    rows = [row for row in rows if row["budget"] == budget and row["responses"] == "all"]
    names = list(dict.fromkeys(row["method"] for row in rows))
    counts = list(dict.fromkeys(row["counterfactuals"] for row in rows))
    figure = new_figure(11, 1.9 + 0.26 * len(names))
    for axes, measure in zip(figure.subplots(1, 3, sharey=True), MEASURES):
        blind = next((row[measure] for row in rows if row["method"] == "random"), None)
        if blind is not None:
            axes.axvline(blind, color=COLOURS[5], linestyle=":", linewidth=1.5)
        for place, count in enumerate(counts):
            own = [row for row in rows if row["counterfactuals"] == count]
            value = np.array([row[measure] for row in own])
            spread = np.abs(np.array([[row[f"{measure}_{end}"] for row in own] for end in ("low", "high")]) - value)
            shift = 0.0 if count is None else 0.22 * (place - len(counts) / 2)
            style = {"fmt": MARKERS[place], "color": QUIET if count is None else COLOURS[place], "markersize": 4.5}
            label = "reads none" if count is None else f"{count} counterfactual{'s' * (count > 1)}"
            places = [names.index(row["method"]) + shift for row in own]
            axes.errorbar(value, places, xerr=spread, elinewidth=1, capsize=0, label=label, **style)
        axes.set(xlim=(0, 1.03), ylim=(len(names) - 0.5, -0.5), yticks=range(len(names)))
        axes.set_yticklabels(names)
        axes.grid(axis="y", color=RULE, linewidth=0.5)
        axes.tick_params(axis="y", length=0)
        tidy(axes, measure.replace("_", " ").capitalize())
    figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside upper left", ncols=4, frameon=False)
    text = (
        f"Tokens that depend on a condition of the problem, at a budget of {100 * budget:g} % of the labelled tokens "
        "of each response. Dotted: random tokens.\nWhiskers: bootstrap 95 % over problems."
    )
    caption(figure, text)
    save(figure, path)
