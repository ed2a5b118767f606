"""Which kinds of token methods keep: shares per method, and their stacked bar chart."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ..text import token_pieces
from .categories import CATEGORIES, categorize
from .chart import QUIET, caption, new_figure, save, tidy
from .tokens import TokenTable

ALL_TOKENS = "all tokens"
# Blue for the category that the question is about. The others are muted, but of hues of their own: a method that keeps
# nothing of one must not lend its place, and so its meaning, to the next.
_COLOURS = ("#0072B2", "#8a8a8a", "#e8b968", "#a9d6b8", "#d8c3e2")
_NAMES = ("task-specific", "formatting, punctuation", "boilerplate reasoning", "function words", "content words")


@dataclass
class CategoryShares:
    """Tokens of each category among those that each of M methods keeps."""

    methods: list[str]  # the last, "all tokens", is every token that could be kept
    categories: tuple[str, ...]  # in order of precedence
    counts: np.ndarray  # [M, 5]: kept tokens
    responses: list[int]  # behind each row

    @property
    def shares(self) -> np.ndarray:
        """`[M, 5]`; each row adds up to 1, or is NaN for a method that keeps nothing."""
        with np.errstate(invalid="ignore"):
            return self.counts / self.counts.sum(axis=1, keepdims=True)

    def to_dict(self) -> dict:
        """For JSON."""
        rows = zip(self.methods, self.counts, self.shares.tolist(), self.responses)
        methods = {
            name: {"tokens": int(count.sum()), "responses": n, "shares": dict(zip(self.categories, share))}
            for name, count, share, n in rows
        }
        return {"categories": list(self.categories), "methods": methods}


def categorize_table(table: TokenTable, tokenizer, progress: bool = False) -> np.ndarray:
    """The category of every token of a table, places in `CATEGORIES`, `int8` `[N]`."""
    out = np.empty(len(table), dtype=np.int8)
    spans = zip(table.starts, table.starts + table.lengths)
    for start, end in tqdm(spans, total=len(table.lengths), desc="categories", disable=not progress):
        out[start:end] = categorize(token_pieces(tokenizer, table.token_ids[start:end]))
    return out


def category_shares(tables: TokenTable | Sequence[TokenTable], tokenizer, progress: bool = False) -> CategoryShares:
    """Count what methods keep by category, methods of one name together; one tokenizer, or one a table."""
    tables = [tables] if isinstance(tables, TokenTable) else list(tables)
    counts: dict[str, np.ndarray] = {}
    responses: dict[str, int] = {}
    tokenizers = tokenizer if isinstance(tokenizer, Sequence) else [tokenizer] * len(tables)
    for table, cut_by in zip(tables, tokenizers, strict=True):
        categories = categorize_table(table, cut_by, progress)
        for name, mask in {**table.kept, ALL_TOKENS: table.trainable}.items():
            found = np.bincount(categories[mask], minlength=len(CATEGORIES))
            counts[name] = counts.get(name, 0) + found
            responses[name] = responses.get(name, 0) + len(table.lengths)
    names = [*(name for name in counts if name != ALL_TOKENS), ALL_TOKENS]
    stacked = np.stack([counts[name] for name in names])
    return CategoryShares(names, CATEGORIES, stacked, [responses[name] for name in names])


def save_category_chart(shares: CategoryShares, path: str | Path) -> None:
    """Draw the shares as stacked bars, one a method, to a PNG."""
    figure = new_figure(8.5, 1.9 + 0.42 * len(shares.methods))
    axes = figure.add_subplot()
    values = 100 * np.nan_to_num(shares.shares)
    # A gap before the bar that is no method.
    heights = np.append(np.arange(len(shares.methods) - 1), len(shares.methods) - 0.5)
    left = np.zeros(len(values))
    for column, colour in enumerate(_COLOURS):
        axes.barh(heights, values[:, column], 0.72, left, color=colour, edgecolor="white", label=_NAMES[column])
        for height, start, value in zip(heights, left, values[:, column]):
            if value >= 4:
                ink = "white" if column < 2 else "#1a1a1a"
                axes.text(start + value / 2, height, f"{value:.1f}", ha="center", va="center", fontsize=8.5, color=ink)
        left += values[:, column]
    labels = [f"{name}  ({int(count):,})" for name, count in zip(shares.methods, shares.counts.sum(axis=1))]
    axes.set_yticks(heights, labels)
    axes.set(xlim=(0, 100), ylim=(heights[-1] + 0.6, -0.6), xlabel="% of the kept tokens (in brackets: how many)")
    axes.xaxis.label.set(fontsize=9, color=QUIET)
    tidy(axes, "What kind of tokens each method keeps for training")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper left", ncols=len(_NAMES), fontsize=8.5, frameon=False, handlelength=1.1)
    text = (
        f"Lowest bar: every token of the {shares.responses[-1]:,} responses, which a blind choice would resemble. A "
        "longer blue part means more numbers, operators, variables and\nmathematical words; it does not by itself mean "
        "better training. Categories come from word lists."
    )
    caption(figure, text)
    save(figure, path)
