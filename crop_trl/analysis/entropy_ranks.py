"""Where along the order of student entropy methods spend their budget: the paper's figure on entropy ranks. Tokens of
equal entropy share their ranks evenly, so that their order in a file plays no part."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .chart import COLOURS, INK, QUIET, caption, new_figure, save, tidy
from .tokens import TokenTable

TAIL = 0.016
BINS = 50
_RESAMPLES = 2000


@dataclass
class EntropyRanks:
    """What each of M methods keeps, by rank of the student's entropy."""

    methods: list[str]
    density: np.ndarray  # [M, bins]: share of the kept tokens from highest to lowest entropy; blind: 1 / bins each
    tail: float  # share of all tokens that counts as the lowest-entropy tail
    tail_share: np.ndarray  # [M]: share of the kept tokens in the tail
    tail_interval: np.ndarray  # [M, 2]: bootstrap 95 % over responses
    reference: np.ndarray  # [M]: tail share of a blind choice of as many tokens of each response
    kept_tokens: np.ndarray  # [M]
    responses: int  # in the table with the most

    def to_dict(self) -> dict:
        """For JSON."""
        names = ("kept_tokens", "tail_share", "tail_interval", "entropy_independent", "density")
        rows = (self.kept_tokens, self.tail_share, self.tail_interval, self.reference, self.density)
        return {
            "tail": self.tail,
            "responses": self.responses,
            "methods": {m: dict(zip(names, row)) for m, *row in zip(self.methods, *(r.tolist() for r in rows))},
        }


def entropy_ranks(
    tables: TokenTable | Sequence[TokenTable], tail: float = TAIL, bins: int = BINS, seed: int = 0
) -> EntropyRanks:
    """Rank tokens by student entropy, within each table, and see where methods keep them."""
    tables = [tables] if isinstance(tables, TokenTable) else list(tables)
    rng = np.random.default_rng(seed)
    rows: dict[str, tuple] = {}
    for table in tables:
        real = table.trainable & np.isfinite(table.entropy)
        entropy, responses = table.entropy[real], table.responses[real]
        n = len(entropy)
        if n == 0:
            raise ValueError("There is no token to rank: the responses are empty.")
        # Groups of equal entropy, from the highest down, and the rank at which each ends.
        _, group, size = np.unique(-entropy, return_inverse=True, return_counts=True)
        ends = np.cumsum(size)
        # Share of each token that lies in the tail: its group spreads evenly over the ranks it holds.
        in_tail = np.clip((ends - n * (1 - tail)) / size, 0, 1)[group]
        per_response = np.bincount(responses, minlength=len(table.lengths))
        tail_per_response = np.bincount(responses, in_tail, len(table.lengths)) / np.maximum(per_response, 1)
        borders = np.linspace(0, n, bins + 1)
        for name, mask in table.kept.items():
            kept = mask[real]
            total = int(kept.sum())
            kept_per_response = np.bincount(responses[kept], minlength=len(table.lengths))
            kept_tail = np.bincount(responses[kept], in_tail[kept], len(table.lengths))
            label = name if name not in rows else f"{name} ({sum(k.split(' (')[0] == name for k in rows) + 1})"
            if total == 0:
                rows[label] = (np.full(bins, np.nan), np.nan, (np.nan, np.nan), np.nan, 0)
                continue
            # Kept tokens up to each rank: within a group of equal entropy every rank holds the group's mean.
            passed = np.cumsum(np.bincount(group, kept))
            density = np.diff(np.interp(borders, np.append(0, ends), np.append(0, passed))) / total
            drawn = rng.multinomial(len(table.lengths), np.full(len(table.lengths), 1 / len(table.lengths)), _RESAMPLES)
            resampled = (drawn @ kept_tail) / np.maximum(drawn @ kept_per_response, 1)
            interval, reference = np.quantile(resampled, [0.025, 0.975]), kept_per_response @ tail_per_response / total
            rows[label] = (density, kept_tail.sum() / total, interval, reference, total)
    density, share, interval, reference, kept_tokens = (np.array(values) for values in zip(*rows.values()))
    responses = max(len(table.lengths) for table in tables)
    measured = (density, tail, share, interval, reference, kept_tokens)
    return EntropyRanks(list(rows), *measured, responses)


def save_entropy_chart(ranks: EntropyRanks, path: str | Path) -> None:
    """Draw the density, a row a method, and the tail's share beside it, to a PNG."""
    from matplotlib.ticker import PercentFormatter

    count = len(ranks.methods)
    figure = new_figure(11, 2.3 + 0.36 * count)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    bins = ranks.density.shape[1]
    # As a multiple of what a blind choice has: 1 means no preference, whatever the number of bins.
    preference = ranks.density * bins
    highest = max(2.0, float(np.nanmax(preference)))
    scale = {"cmap": "Blues", "vmin": 0, "vmax": highest, "interpolation": "nearest"}
    image = left.imshow(preference, aspect="auto", extent=(0, 100, count - 0.5, -0.5), **scale)
    left.set_yticks(range(count), ranks.methods)
    left.set_xlabel("rank of the student's entropy: most uncertain token (0 %) to surest token (100 %)")
    left.axvline(100 * (1 - ranks.tail), color=COLOURS[5], linewidth=1)
    bar = figure.colorbar(image, ax=left, pad=0.015, fraction=0.05)
    bar.set_label("kept tokens, as a multiple\nof a blind choice", fontsize=8, color=QUIET)
    bar.ax.axhline(1, color=INK, linewidth=1)
    bar.ax.tick_params(labelsize=8)
    tidy(left, "Where along the entropy order each method keeps tokens")
    left.spines[:].set_visible(False)

    places = np.arange(count)
    share = 100 * ranks.tail_share
    spread = np.abs(100 * ranks.tail_interval.T - share)
    right.barh(places, share, color="#9ecae1", height=0.62)
    right.errorbar(share, places, xerr=spread, fmt="none", ecolor=INK, elinewidth=1, capsize=2.5)
    for place, reference in zip(places, 100 * ranks.reference):
        right.plot([reference] * 2, [place - 0.5, place + 0.5], color=COLOURS[5], linestyle=":", linewidth=1.8)
    reach = float(np.nanmax([100 * ranks.tail_interval[:, 1], 100 * ranks.reference]))
    for place, value, top in zip(places, share, 100 * ranks.tail_interval[:, 1]):
        if np.isfinite(value):
            # On white, since the dotted line may run behind it.
            style = {"va": "center", "fontsize": 8.5, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1}}
            right.text(max(top, value) + 0.02 * reach, place, f"{value:.2f} %", **style)
    right.set(xlim=(0, 1.25 * reach), ylim=(count - 0.5, -0.5))
    right.xaxis.set_major_formatter(PercentFormatter(decimals=1))
    right.tick_params(axis="y", length=0, labelleft=False)
    right.set_xlabel(f"kept tokens that lie among the surest {100 * ranks.tail:g} % of all tokens")
    tidy(right, f"Share spent on the lowest-entropy {100 * ranks.tail:g} %")
    for axes in (left, right):
        axes.xaxis.label.set(fontsize=8.5, color=QUIET)
    text = (
        "Left: white, the method never keeps such tokens; every row has the same total. Orange: where the tail begins, "
        "and (dotted, right) what a choice blind to entropy would spend there.\n"
        f"Whiskers: bootstrap 95 % over {ranks.responses:,} responses. A share at the dotted line means indifference "
        "to entropy, not quality."
    )
    caption(figure, text)
    save(figure, path)
