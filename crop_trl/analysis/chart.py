"""What all pictures share: a figure without pyplot, colours that keep apart, a file that is whole or not there."""

import math
from pathlib import Path

from ..files import replacing, write_json

DPI = 300  # what printers ask for
INK, QUIET, RULE = "#1a1a1a", "#5c5c5c", "#d0d0d0"
# Okabe and Ito's, which keep apart for every common kind of colour blindness.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
MARKERS = "osD^vP*X"


def require_matplotlib() -> None:
    """Raise `ImportError` with the remedy when matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("Drawing a chart needs matplotlib: `pip install crop-trl[viz]`.") from error


def new_figure(width: float, height: float, layout: str | None = "constrained"):
    """An empty figure of so many inches. Raises `ImportError` when matplotlib is not installed."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The canvas is used directly: pyplot would keep the figure alive and choose a backend for the whole process.
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    return figure


def tidy(axes, title: str) -> None:
    """Give axes their title and take away the frame that carries nothing."""
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, colors=INK)


def caption(figure, text: str) -> None:
    """Write how to read a figure below it."""
    figure.supxlabel(text, fontsize=8, color=QUIET, x=0.01, ha="left")


def save(figure, path: str | Path) -> None:
    """Write a figure as PNG, whole or not at all; folders are made."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=DPI, facecolor="white")


def save_json(data: dict, path: str | Path) -> None:
    """Write data as JSON, whole or not at all; folders are made, what is not finite becomes `null`."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_json(path, _plain(data))


def _plain(value):
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
