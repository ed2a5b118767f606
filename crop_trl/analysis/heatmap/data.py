"""What a heat map shows: decoded tokens, rows of values, the kept mask and the prompts. No drawing here."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...prompts import ORIGINAL, REWORDINGS
from ...text import marked, marked_triplet

SEMANTIC = "Semantic: moves when a condition changes"
SURFACE = "Surface: moves when only the wording changes"
MARGIN = "CROP margin"
GAP = "Gap: student minus teacher, log-probability"

# A longer response is shown as a window of WINDOW positions round its peak.
LEGIBLE_TOKENS = 160
WINDOW = 64


@dataclass(frozen=True)
class RowStyle:
    """How the values of a row become colours."""

    colour: str = "blue"  # or "orange", from 0 upwards; "signed": orange below 0, blue above
    group: str = ""  # rows of one group share their colour scale, so that equal colours mean equal numbers
    unit: str = ""
    floor: float = 0.0  # the scale reaches at least this far: numerical noise must not fill it
    low: str = ""  # what the two ends of the scale mean, in plain words
    high: str = ""


CROP_STYLES = {
    SEMANTIC: RowStyle("blue", "divergence", "nats", 0.1, "prediction unchanged", "moves most"),
    SURFACE: RowStyle("orange", "divergence", "nats", 0.1, "prediction unchanged", "moves most"),
    MARGIN: RowStyle("signed", "divergence", "nats", 0.1, "moved by wording", "moved by condition"),
    GAP: RowStyle("signed", "gap", "nats", 1.0, "teacher likes it more", "teacher would not say it"),
}


@dataclass
class ResponseHeatmap:
    """One response, ready to be drawn.

    `tokens` are decoded pieces which, joined, are the response. Each of `rows` has a value for each token; what stands
    before a colon in its label is its short name, values that are not finite are drawn as missing, and a long response
    is centred on the peak of the last row. `prompts` are texts by kind, the original among them or none at all;
    `scorer` is whose predictions the rows compare, for the explanation."""

    tokens: list[str]
    rows: dict[str, Sequence[float]]
    kept: Sequence[bool]
    prompts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    note: str = ""
    scorer: str = "teacher"
    kept_by: dict[str, Sequence[bool]] = field(default_factory=dict)  # what other methods would keep; in the picture
    verdict: str = ""  # whether the answer is right, in a sentence; in the picture
    wrong_from: int | None = None  # the first wrong token, where it is known; in the picture

    def __post_init__(self):
        self.tokens = [str(token) for token in self.tokens]
        self.rows = {str(label): [float(v) for v in values] for label, values in self.rows.items()}
        self.kept = [bool(k) for k in self.kept]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_long(self) -> bool:
        """Whether a window of the response is shown."""
        return len(self) > LEGIBLE_TOKENS

    def style(self, label: str) -> RowStyle:
        """How the values of a row become colours."""
        signed = any(value < 0 for value in self.rows[label])
        return CROP_STYLES.get(label) or RowStyle("signed" if signed else "blue", group=label)

    def limit(self, label: str) -> float:
        """The value of the strongest colour of a row: the largest magnitude in its group of rows."""
        group = [k for k in self.rows if self.style(k).group == self.style(label).group]
        largest = max((abs(v) for k in group for v in self.rows[k] if math.isfinite(v)), default=0.0)
        return max(largest, self.style(label).floor) or 1.0

    def has_missing(self) -> bool:
        """Whether some value is not finite."""
        return any(not math.isfinite(v) for values in self.rows.values() for v in values)

    def peak(self) -> int:
        """Position of the largest finite value of the last row; 0 when it has none."""
        values = list(self.rows.values())[-1]
        return max(range(len(values)), key=lambda i: values[i] if math.isfinite(values[i]) else -math.inf)

    def window(self) -> tuple[int, int]:
        """Positions that are shown with their tokens: all of a short response, else 64 round the peak."""
        if not self.is_long:
            return 0, len(self)
        start = min(max(self.peak() - WINDOW // 2, 0), len(self) - WINDOW)
        return start, start + WINDOW

    def summary(self) -> str:
        """How many tokens are kept, in one sentence."""
        n_kept, n = sum(self.kept), sum(any(map(math.isfinite, values)) for values in zip(*self.rows.values()))
        return f"Kept for training: {n_kept:,} of {n:,} tokens ({100 * n_kept / max(n, 1):.0f} %)."

    def blocks(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """The prompts that are known, each as a heading and its text in pieces with their marks."""
        if not self.prompts:
            return []
        (original, *_), *rewordings = (self.prompts.get(kind, []) for kind in (ORIGINAL, *REWORDINGS))
        paraphrases, (changed, *more) = rewordings[0][:1], rewordings[1] or [None]
        _, texts = marked_triplet(original, paraphrases, changed)
        headings = ["Original problem", *["Paraphrase: same problem, other words"] * len(paraphrases)]
        others = [("Another counterfactual", text) for text in more]
        kinds = [kind for kind in self.prompts if kind not in (ORIGINAL, *REWORDINGS)]
        others += [(f"{kind.capitalize()} prompt", self.prompts[kind][0]) for kind in kinds]
        return [
            *zip([*headings, "Counterfactual: one condition changed"], texts),
            *((heading, [(t, mark and "changed") for t, mark in marked(original, text)]) for heading, text in others),
        ]


def short_name(label: str) -> str:
    """What stands before the colon of a row's label."""
    return label.split(":", 1)[0].strip()


def meaning_of(heatmap: ResponseHeatmap, label: str) -> str:
    """What stands after the colon of a row's label, or what the CROP margin is made of."""
    if label == MARGIN and SEMANTIC in heatmap.rows and SURFACE in heatmap.rows:
        return "Semantic minus Surface"
    if label == MARGIN:
        return "moved by a condition, minus by the wording"
    return label.split(":", 1)[1].strip() if ":" in label else ""


def explanation(heatmap: ResponseHeatmap) -> str:
    """How to read the picture, for a person who has never seen one."""
    text = (
        "The model's answer, cut into tokens (words or pieces of words), from left to right and line by line. Each "
        "token has coloured bars below it; no colour is 0."
    )
    if SEMANTIC in heatmap.rows:
        text += (
            f" Semantic and Surface: how far the {heatmap.scorer}'s prediction of the token moves when it reads the "
            "counterfactual, or the paraphrase, in place of the original problem; at most 0.69 nats (ln 2)."
        )
    return text + (" In dark grey: which methods keep the token." if heatmap.kept_by else "")


def number(value: float) -> str:
    """A value as the legends write it: two digits, a true minus sign."""
    return "0" if value == 0 else f"{value:.2g}".replace("-", "\u2212")
