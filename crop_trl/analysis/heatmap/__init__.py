"""Heat maps of one response: data ([`ResponseHeatmap`]), then a picture ([`save_png`])."""

from .data import GAP, MARGIN, SEMANTIC, SURFACE, ResponseHeatmap, RowStyle
from .figure import save_png

__all__ = ["GAP", "MARGIN", "SEMANTIC", "SURFACE", "ResponseHeatmap", "RowStyle", "save_png"]
