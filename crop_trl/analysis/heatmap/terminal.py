"""A heat map in a terminal: tokens in lines, a strip of colour (or of shades) under each for every row."""

import math
import os
import unicodedata

from ...text import visible_text, visible_token
from .data import ResponseHeatmap, RowStyle, short_name

RESET = "\x1b[0m"
SHADES = " ░▒▓█"
# Of the 256 colours that every terminal knows, from next to nothing to the full value. They start dark and do not
# depend on the terminal's own background.
BLUE, ORANGE = (236, 18, 25, 26, 32, 39, 117), (236, 94, 130, 166, 202, 208, 215)
LABELS = 12


def render_terminal(heatmap: ResponseHeatmap, width: int = 100, color: bool | None = None) -> str:
    """
    Render a heat map as text.

    Args:
        heatmap ([`ResponseHeatmap`]):
            What to show; a long response as the window round its peak and an overview.
        width (`int`, *optional*, defaults to `100`):
            Columns of the terminal; at least 40 are used.
        color (`bool`, *optional*):
            ANSI colours; by default on unless the environment sets `NO_COLOR`. Without them, shades show the magnitude
            and a minus sign shows a negative value.

    Returns:
        `str`, lines joined by line breaks.
    """
    if color is None:
        color = not os.environ.get("NO_COLOR")
    width = max(width, 40)

    def bold(text):
        return f"\x1b[1m{text}{RESET}" if color else text

    start, end = heatmap.window()
    out = [bold(line) for line in _wrap(visible_text(heatmap.title), width)]
    out += _wrap(heatmap.summary(), width)
    step = 2 if width >= 72 else 1
    limits = {label: heatmap.limit(label) for label in heatmap.rows}
    for label, limit in limits.items():
        style = heatmap.styles[label]
        low = -limit if style.colour == "signed" else 0.0
        ramp = "".join(_cell(low + (limit - low) * i / 10, limit, style, step, color) for i in range(11))
        end_text = f" {limit:.2f} {style.unit}  "
        name = _cut(visible_text(label), width - 7 - 11 * step - _columns(end_text))
        out.append(f"{low:6.2f} {ramp}{end_text}{name}")
    if heatmap.is_long:
        name = short_name(list(heatmap.rows)[-1])
        heading = f"Tokens {start + 1:,} to {end:,} of {len(heatmap):,}, round the highest {visible_text(name)}"
        out += ["", *(bold(part) for part in _wrap(heading, width))]
    for line in _lines(heatmap, start, end, width - LABELS):
        words = [bold(text) if heatmap.kept[position] else text for position, text, _ in line]
        out += ["", " " * LABELS + " ".join(words)]
        out.append(_fit("kept", LABELS) + " ".join(("▔" if heatmap.kept[p] else " ") * w for p, _, w in line).rstrip())
        for label, values in heatmap.rows.items():
            cells = (_cell(values[p], limits[label], heatmap.styles[label], w, color) for p, _, w in line)
            out.append(_fit(visible_text(short_name(label)), LABELS - 1) + " " + " ".join(cells))
    if heatmap.is_long:
        out += ["", bold(f"Whole answer, tokens 1 to {len(heatmap):,}")]
        out += _overview(heatmap, start, end, width - LABELS, color)
    if heatmap.note:
        out += ["", *_wrap(visible_text(heatmap.note), width)]
    return "\n".join(out)


def _cell(value: float, limit: float, style: RowStyle, width: int, color: bool) -> str:
    if not math.isfinite(value):
        return "?" * width
    share = max(-1.0, min(1.0, value / limit))
    if not color:
        shade = SHADES[min(4, math.ceil(abs(share) * 4 - 0.2))]
        return (("-" + shade * (width - 1)) if share < 0 and shade != " " else shade * width)[:width]
    ramp = ORANGE if share < 0 or style.colour == "orange" else BLUE
    colour = ramp[min(len(ramp) - 1, math.ceil(abs(share) * (len(ramp) - 1) - 0.3))]
    return f"\x1b[48;5;{colour}m{' ' * width}{RESET}"


def _lines(heatmap: ResponseHeatmap, start: int, end: int, width: int):
    """Lines of `(position, text, columns)`."""
    lines, used = [[]], 0
    for position in range(start, end):
        text = _cut(visible_token(heatmap.tokens[position]), min(24, width))
        columns = _columns(text)
        if columns < 2:
            text, columns = text + " " * (2 - columns), 2
        if used + columns > width and lines[-1]:
            lines, used = [*lines, []], 0
        lines[-1].append((position, text, columns))
        used += columns + 1
    return lines


def _overview(heatmap: ResponseHeatmap, start: int, end: int, width: int, color: bool) -> list[str]:
    n = len(heatmap)
    columns = min(width, n)
    bins = [range(c * n // columns, (c + 1) * n // columns) for c in range(columns)]
    out = []
    for label, values in heatmap.rows.items():
        strongest = [max((values[i] for i in b), key=lambda v: abs(v) if math.isfinite(v) else -1.0) for b in bins]
        limit, style = heatmap.limit(label), heatmap.styles[label]
        cells = "".join(_cell(value, limit, style, 1, color) for value in strongest)
        out.append(_fit(visible_text(short_name(label)), LABELS - 1) + " " + cells)
    marks = "".join("^" if b[0] < end and b[-1] >= start else " " for b in bins)
    out.append(_fit("above", LABELS - 1) + " " + marks.rstrip())
    return out


def _columns(text: str) -> int:
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _cut(text: str, columns: int) -> str:
    if _columns(text) <= columns:
        return text
    while text and _columns(text) > columns - 1:
        text = text[:-1]
    return text + "…"


def _fit(text: str, columns: int) -> str:
    text = _cut(text, columns)
    return text + " " * (columns - _columns(text))


def _wrap(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and _columns(lines[-1]) + 1 + _columns(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
