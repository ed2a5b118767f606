"""Heat maps of one response: how each token reacts to a changed condition and to other wording, and what is trained.

Data first ([`response_heatmap`]), then a picture ([`save_png`]), a page ([`save_html`]) or a terminal
([`render_terminal`]).
"""

from ...text import token_pieces, word_changes
from .data import MARGIN, SEMANTIC, SURFACE, ResponseHeatmap, RowStyle, response_heatmap
from .figure import save_png
from .page import save_html
from .terminal import render_terminal

__all__ = [
    "MARGIN",
    "SEMANTIC",
    "SURFACE",
    "ResponseHeatmap",
    "RowStyle",
    "render_terminal",
    "response_heatmap",
    "save_html",
    "save_png",
    "token_pieces",
    "word_changes",
]
