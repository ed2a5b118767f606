"""What the charts share: a figure without pyplot, colours that keep apart, a file that is whole or not there."""

import io
from pathlib import Path

import numpy as np

from .heatmap.data import write_atomically

DPI = 200
INK, QUIET, RULE = "#1a1a1a", "#5c5c5c", "#d0d0d0"
# Dark and light alternate in grey; told apart with every common kind of colour blindness (Okabe and Ito).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
MARKERS = "osD^vP*X"


def new_figure(width: float, height: float):
    """
    An empty figure of so many inches.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Drawing a chart needs matplotlib: `pip install crop-trl[viz]`.") from error
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


def plain(value):
    """A dataclass field, array or number in types that JSON knows; NaN becomes `None`."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value
