"""Heat maps of one response: data ([`ResponseHeatmap`]), then a picture ([`save_png`]) or a page ([`save_html`])."""

from .data import GAP, MARGIN, SEMANTIC, SURFACE, ResponseHeatmap, RowStyle
from .figure import save_png
from .page import save_html

__all__ = ["GAP", "MARGIN", "SEMANTIC", "SURFACE", "ResponseHeatmap", "RowStyle", "save_html", "save_png"]
