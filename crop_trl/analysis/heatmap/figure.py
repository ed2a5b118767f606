"""A heat map as a picture for print: prompts, legend, then the response in lines of tokens above rows of colour."""

import warnings

import numpy as np

from ...text import CONTINUED, shorten, visible_text, visible_token
from ..chart import QUIET, new_figure, save
from .canvas import EDGE, WIDTH, Page
from .data import ResponseHeatmap, explanation, meaning_of, number, short_name

# Inches, except for font sizes, which are points.
LABELS = 1.2
TOKEN_SIZE, TOKEN_HEIGHT, CELL_HEIGHT, KEPT_HEIGHT, LINE_GAP = 10.0, 0.27, 0.17, 0.13, 0.2
MIN_CELL, MAX_CELL, CELL_MARGIN = 0.28, 1.7, 0.12
MAX_LINE_TOKENS = 24
PROMPT_SIZE, PROMPT_LINE, PROMPT_MAX_LINES = 9.5, 0.2, 7

FRAME, MISSING, KEPT, WRONG = "#000000", "#d9d9d9", "#4d4d4d", "#b2182b"
# Blue and orange keep apart for every common kind of colour blindness, and both darken in a grey print.
BLUE = ("#ffffff", "#c6dbef", "#6baed6", "#2171b5", "#08306b")
ORANGE = ("#ffffff", "#fdd9b5", "#fdae6b", "#d9600a", "#7f2704")
TITLE = "Which tokens of the answer depend on the problem, and which ones training uses"
TINTS = {"reworded": "#fdd9b5", "changed": "#b9d5ee"}


def save_png(heatmap: ResponseHeatmap, path) -> None:
    """Draw a heat map for print: all of a short response, else the close-up round its peak."""
    with warnings.catch_warnings():
        # A character that no font holds is drawn as a box, and each would be warned of.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = new_figure(WIDTH, 1.0, layout=None)
        page = Page(figure, figure.canvas.get_renderer())
        _draw(page, heatmap)
        page.finish()
        save(figure, path)


def _rgba(heatmap: ResponseHeatmap, label: str, values):
    """Colours of a row's values, `[n, 4]`; grey where there is none."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgba

    values, limit, kind = np.asarray(values, dtype=float), heatmap.limit(label), heatmap.style(label).colour
    scale = {"blue": BLUE, "orange": ORANGE, "signed": ORANGE[:0:-1] + BLUE}[kind]
    missing = ~np.isfinite(values)
    scaled = np.where(missing, 0.0, values) / limit
    colours = LinearSegmentedColormap.from_list(kind, scale, N=511)((scaled + 1) / 2 if kind == "signed" else scaled)
    colours[missing] = to_rgba(MISSING)
    return colours


def _draw(page: Page, heatmap: ResponseHeatmap) -> None:
    page.paragraph(TITLE, 14, bold=True)
    page.y += 0.05
    page.paragraph(explanation(heatmap), 9.5, colour=QUIET)
    page.y += 0.12
    _draw_prompts(page, heatmap)
    _draw_legend(page, heatmap)
    start, end = heatmap.window()
    if heatmap.is_long:
        page.paragraph(
            f"Close-up: tokens {start + 1:,} to {end:,} of {len(heatmap):,}, round the highest "
            f"{visible_text(short_name(list(heatmap.rows)[-1]))}",
            10.5,
            bold=True,
        )
        page.y += 0.08
    if heatmap.verdict:
        page.paragraph(visible_text(heatmap.verdict), 10.5, bold=True)
        page.y += 0.14
    _draw_lines(page, heatmap, start, end)
    page.y += 0.05
    footer = [heatmap.summary(), visible_text(heatmap.note), "Grey: no value." if heatmap.has_missing() else ""]
    shown = "".join(visible_token(token) for token in heatmap.tokens[start:end])
    marks = {"␣": "a space", "⏎": "a line break", "⇥": "a tab"}
    marks[CONTINUED] = "the rest of a character that takes several tokens"
    used = [f"{mark} {meaning}" for mark, meaning in marks.items() if mark in shown]
    if used:
        footer.append("Marks: " + ", ".join(used) + ".")
    for text in filter(None, footer):
        page.paragraph(text, 9, colour=QUIET)


def _draw_prompts(page: Page, heatmap: ResponseHeatmap) -> None:
    indent = EDGE + 0.15
    for heading, pieces in heatmap.blocks():
        page.paragraph(heading, 9.5, bold=True)
        lines = _wrap_pieces(page, shorten(pieces), WIDTH - EDGE - indent)
        if len(lines) > PROMPT_MAX_LINES:
            lines = [*lines[: PROMPT_MAX_LINES - 1], [("[…]", False)]]
        for line in lines:
            x = indent
            for text, mark in line:
                width = page.width(text, PROMPT_SIZE)
                if mark:
                    page.box(x - 0.02, page.y + 0.015, width + 0.04, PROMPT_LINE - 0.03, face=TINTS[mark])
                page.text(x, page.y + PROMPT_LINE / 2, text, PROMPT_SIZE)
                x += width
            page.y += PROMPT_LINE
        page.y += 0.07
    page.y += 0.06


def _wrap_pieces(page: Page, pieces, width: float):
    """Lines of `(text, changed)`, neighbours of one kind joined; a line break in the text breaks the line."""
    # Punctuation sticks to its word, whether or not one of the two is a change.
    units = []
    for text, changed in pieces:
        piece = (visible_text(text), changed)
        if units and not text.isspace() and not units[-1][-1][0].isspace():
            units[-1].append(piece)
        else:
            units.append([piece])
    lines, x = [[]], 0.0
    for unit in units:
        if "\n" in unit[0][0]:
            lines, x = [*lines, []], 0.0
            continue
        unit_width = sum(page.width(text, PROMPT_SIZE) for text, _ in unit)
        # Text without spaces, Chinese for one, may break at any character.
        parts = [unit] if unit_width <= width else [[(char, changed)] for text, changed in unit for char in text]
        for part in parts:
            part_width = sum(page.width(text, PROMPT_SIZE) for text, _ in part)
            if x + part_width > width:
                lines, x = [*lines, []], 0.0
            if not lines[-1] and part[0][0].isspace():
                continue
            for text, changed in part:
                if lines[-1] and lines[-1][-1][1] == changed:
                    lines[-1][-1] = (lines[-1][-1][0] + text, changed)
                else:
                    lines[-1].append((text, changed))
            x += part_width
    return [line for line in lines if line]


def _draw_legend(page: Page, heatmap: ResponseHeatmap) -> None:
    """One colour bar per row, and what a frame means."""
    page.box(EDGE, page.y, WIDTH - 2 * EDGE, 0.012, face="#bbbbbb")
    page.y += 0.12
    frame_width, gap = 2.0, 0.35
    labels = list(heatmap.rows)
    slot = (WIDTH - 2 * EDGE - frame_width) / len(labels)
    top, bottom = page.y, page.y
    for index, label in enumerate(labels):
        style, limit = heatmap.style(label), heatmap.limit(label)
        x, width = EDGE + index * slot, slot - gap
        page.y = top
        page.paragraph(short_name(label), 9.5, bold=True, x=x, width=width)
        page.paragraph(meaning_of(heatmap, label) or " ", 8.5, colour=QUIET, x=x, width=width)
        page.y += 0.03
        low = -limit if style.colour == "signed" else 0.0
        ramp = [low + (limit - low) * i / 255 for i in range(256)]
        page.image(x, page.y, width, 0.14, _rgba(heatmap, label, ramp)[None])
        page.box(x, page.y, width, 0.14, edge="#888888", line=0.6, order=2)
        y = page.y + 0.23
        if low:
            page.text(x + width / 2, y, "0", 8, ha="center")
        page.text(x, y, number(low), 8)
        page.text(x + width, y, f"{number(limit)} {style.unit}".strip(), 8, ha="right")
        page.text(x, y + 0.14, style.low, 8, colour=QUIET)
        page.text(x + width, y + 0.14, style.high, 8, colour=QUIET, ha="right")
        bottom = max(bottom, y + 0.28)
    x = WIDTH - EDGE - frame_width + 0.1
    page.box(x, top + 0.04, 0.3, 0.62, edge=FRAME, line=2.2, order=3)
    for k, text in enumerate(("Framed, in bold:", "kept for training.", "All other tokens", "are not trained.")):
        page.text(x + 0.42, top + 0.1 + 0.165 * k, text, 9, bold=k < 2)
    page.y = bottom
    page.box(EDGE, page.y, WIDTH - 2 * EDGE, 0.012, face="#bbbbbb")
    page.y += 0.16


def _lines(page: Page, heatmap: ResponseHeatmap, start: int, end: int):
    """Lines of `(position, text, size, width)`; cells are as wide as their text, within limits."""
    lines, x = [[]], 0.0
    for position in range(start, end):
        text, size, bold = visible_token(heatmap.tokens[position]), TOKEN_SIZE, heatmap.kept[position]
        width = page.width(text, size, bold)
        if width > MAX_CELL - CELL_MARGIN:
            size *= max(0.65, (MAX_CELL - CELL_MARGIN) / width)
            while len(text) > 1 and (width := page.width(text, size, bold)) > MAX_CELL - CELL_MARGIN:
                text = text[: min(len(text) - 2, int(len(text) * MAX_CELL / width))] + "…"
        width = max(MIN_CELL, width + CELL_MARGIN)
        if x + width > WIDTH - 2 * EDGE - LABELS or len(lines[-1]) == MAX_LINE_TOKENS:
            lines, x = [*lines, []], 0.0
        lines[-1].append((position, text, size, width))
        x += width
    return lines


def _draw_lines(page: Page, heatmap: ResponseHeatmap, start: int, end: int) -> None:
    rows_height = TOKEN_HEIGHT + CELL_HEIGHT * len(heatmap.rows)
    height = rows_height + KEPT_HEIGHT * len(heatmap.kept_by)
    colours = {label: _rgba(heatmap, label, values[start:end]) for label, values in heatmap.rows.items()}
    for line in _lines(page, heatmap, start, end):
        first, last = line[0][0] + 1, line[-1][0] + 1
        span = f"token {first:,}" if first == last else f"tokens {first:,}–{last:,}"
        page.text(EDGE, page.y + TOKEN_HEIGHT / 2, span, 8, colour=QUIET)
        for r, label in enumerate(heatmap.rows):
            y = page.y + TOKEN_HEIGHT + (r + 0.5) * CELL_HEIGHT
            page.text(EDGE + LABELS - 0.1, y, short_name(label), 8.5, ha="right")
        for r, name in enumerate(heatmap.kept_by):
            y = page.y + rows_height + (r + 0.5) * KEPT_HEIGHT
            page.text(EDGE + LABELS - 0.1, y, name, 8, colour=QUIET, ha="right")
        x = EDGE + LABELS
        for position, text, size, width in line:
            kept = heatmap.kept[position]
            y = page.y + TOKEN_HEIGHT / 2
            mark = "␣" if text.startswith("␣") and len(text) > 1 else ""
            at = x + (width - page.width(text, size, kept)) / 2
            # Most tokens begin with a space: its mark is there for those who look for it and quiet for all others.
            page.text(at, y, mark, size, colour="#a8a8a8")
            page.text(at + page.width(mark, size), y, text[len(mark) :], size, bold=kept)
            for r, label in enumerate(heatmap.rows):
                y = page.y + TOKEN_HEIGHT + r * CELL_HEIGHT
                page.box(x, y, width, CELL_HEIGHT, colours[label][position - start], "#c8c8c8", 0.5)
            for r, mask in enumerate(heatmap.kept_by.values()):
                y = page.y + rows_height + r * KEPT_HEIGHT
                page.box(x, y, width, KEPT_HEIGHT, KEPT if mask[position] else "none", "#c8c8c8", 0.5)
            if position == heatmap.wrong_from:
                page.text(x + width / 2, page.y - 0.06, "first wrong value", 7.5, True, WRONG, ha="center")
                page.box(x + 0.04, page.y + 0.03, width - 0.08, TOKEN_HEIGHT - 0.06, "none", WRONG, 1.6, order=4)
            if kept:
                page.box(x + 0.012, page.y, width - 0.024, height + 0.015, edge=FRAME, line=2.0, order=3)
            x += width
        page.y += height + LINE_GAP
