"""What the charts share: a figure without pyplot, colours that keep apart, a file that is whole or not there."""

import io
import json
import math
from pathlib import Path

from .heatmap.canvas import DPI, INK, QUIET
from .heatmap.data import write_atomically

__all__ = [
    "COLOURS",
    "INK",
    "MARKERS",
    "QUIET",
    "RULE",
    "new_figure",
    "require_matplotlib",
    "save",
    "save_json",
    "tidy",
]

RULE = "#d0d0d0"
# Okabe and Ito's, which keep apart for every common kind of colour blindness.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
MARKERS = "osD^vP*X"


def require_matplotlib() -> None:
    """Raise `ImportError` with the remedy when matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("Drawing a chart needs matplotlib: `pip install crop-trl[viz]`.") from error


def new_figure(width: float, height: float):
    """
    An empty figure of so many inches.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The canvas is used directly: pyplot would keep the figure alive and choose a backend for the whole process.
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes, title: str) -> None:
    """Give axes their title and take away the frame that carries nothing."""
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, colors=INK)


def save(figure, path: str | Path) -> None:
    """Write a figure as PNG, whole or not at all; folders are made."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, facecolor="white")
    write_atomically(path, buffer.getvalue())


def save_json(data: dict, path: str | Path) -> None:
    """Write data as JSON, whole or not at all; what is not finite becomes `null`."""
    write_atomically(path, (json.dumps(_plain(data), indent=1, ensure_ascii=False) + "\n").encode())


def _plain(value):
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
