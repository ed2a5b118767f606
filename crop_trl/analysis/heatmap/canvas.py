"""A page to draw on with matplotlib: inches from the top left corner, measured text."""

from ..chart import DPI, INK

# Inches.
WIDTH, EDGE = 11.0, 0.35

# Fonts that hold what DejaVu Sans lacks, where one is installed.
FALLBACK_FONTS = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei"),
    *("PingFang SC", "Hiragino Sans", "Arial Unicode MS", "Microsoft YaHei", "SimHei", "Malgun Gothic"),
    *("Droid Sans Fallback", "Noto Sans Symbols2", "Noto Sans Symbols 2"),
)


class Page:
    """One axes over the whole figure, in inches with y downwards; the height is what was used of it."""

    def __init__(self, figure, renderer):
        from matplotlib.font_manager import FontProperties, fontManager

        self.figure, self.renderer = figure, renderer
        self.axes = figure.add_axes([0, 0, 1, 1])
        self.axes.set_axis_off()
        installed = {entry.name for entry in fontManager.ttflist}
        families = ["DejaVu Sans", *(name for name in FALLBACK_FONTS if name in installed)]
        weights = {False: "normal", True: "bold"}
        self.fonts = {bold: FontProperties(family=families, weight=weight) for bold, weight in weights.items()}
        self._widths: dict[tuple, float] = {}
        self.y = EDGE

    def width(self, text: str, size: float, bold: bool = False) -> float:
        """Width of a line of text in inches; `size` is in points."""
        key = (text, size, bold)
        if key not in self._widths:
            if text.isspace() or not text:
                # The renderer measures ink, and a space has none.
                self._widths[key] = self.width(f"x{text}x", size, bold) - self.width("xx", size, bold) if text else 0.0
            else:
                font = self.fonts[bold].copy()
                font.set_size(size)
                self._widths[key] = self.renderer.get_text_width_height_descent(text, font, False)[0] / DPI
        return self._widths[key]

    def text(self, x, y, text, size, bold=False, colour=INK, ha="left", va="center"):
        """Write one line at a place in inches."""
        style = {"fontproperties": self.fonts[bold], "fontsize": size, "color": colour, "ha": ha, "va": va}
        if text:
            # parse_math off: a response is full of dollar signs.
            self.axes.text(x, y, text, parse_math=False, **style)

    def box(self, x, y, width, height, face="none", edge="none", line=0.0, order=1.0):
        """Draw a rectangle, in inches from its upper left corner; what has a higher `order` lies above."""
        from matplotlib.patches import Rectangle

        style = {"facecolor": face, "edgecolor": edge, "linewidth": line, "zorder": order}
        self.axes.add_patch(Rectangle((x, y), width, height, **style))

    def image(self, x, y, width, height, rgba):
        """Draw coloured cells, `rgba` `[rows, columns, 4]` from 0 to 1, in inches from the upper left corner."""
        extent = (x, x + width, y + height, y)
        self.axes.imshow(rgba, extent=extent, aspect="auto", interpolation="nearest", origin="upper")

    def wrap(self, text: str, size: float, width: float, bold: bool = False) -> list[str]:
        """A text in lines that are not wider than `width` inches, broken at spaces."""
        lines = [""]
        for word in text.split():
            candidate = f"{lines[-1]} {word}".strip()
            if lines[-1] and self.width(candidate, size, bold) > width:
                lines.append(word)
            else:
                lines[-1] = candidate
        return lines

    def paragraph(self, text: str, size: float, bold=False, colour=INK, x=EDGE, width=None):
        """Write wrapped text at the current height, by default up to the page's edge, and move below it."""
        step = size * 1.45 / 72
        for line in self.wrap(text, size, width or WIDTH - EDGE - x, bold):
            self.text(x, self.y + step / 2, line, size, bold, colour)
            self.y += step

    def finish(self):
        """Cut the page off below what was written, once everything is."""
        height = self.y + EDGE * 0.7
        self.figure.set_size_inches(WIDTH, height)
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0))
