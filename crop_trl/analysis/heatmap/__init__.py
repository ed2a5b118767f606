"""Heat maps of one response: data ([`ResponseHeatmap`]), then a picture ([`save_png`])."""

from .data import GAP, MARGIN, SEMANTIC, SURFACE, ResponseHeatmap
from .figure import save_png
