"""A heat map as one HTML file: no script, style or font from elsewhere, readable with the keyboard and on a phone."""

import json
import math
from pathlib import Path

from ...files import write_text
from ...text import CONTINUED, filled, joined, shorten, visible_text, visible_token
from .data import ResponseHeatmap, RowStyle, explanation, meaning_of, number, short_name

_KINDS = {"blue": "b", "orange": "o", "signed": "s"}


def save_html(heatmap: ResponseHeatmap, path) -> None:
    """
    Write a heat map as one HTML file that opens anywhere; values show on hover, tap or arrow keys, for all rows or one.
    """
    rows = [_row(heatmap, label) for label in heatmap.rows]
    lines = [heatmap.summary(), visible_text(heatmap.note), "Hatched: no value." if heatmap.has_missing() else ""]
    marks = f"Marks: ␣ a space, ⏎ a line break, {CONTINUED} the rest of a character that takes several tokens."
    page = filled(
        Path(__file__).parent / "templates" / "heatmap.html.j2",
        heatmap=heatmap,
        title=visible_text(heatmap.title),
        explanation=explanation(heatmap),
        prompts=[_prompt(*block) for block in heatmap.prompts()],
        rows=rows,
        names=json.dumps([row["name"] for row in rows]),
        tokens=(_token(heatmap, i, rows) for i in range(len(heatmap))),
        footer=[*filter(None, lines), marks],
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)


def _row(heatmap: ResponseHeatmap, label: str) -> dict:
    style, limit = heatmap.styles[label], heatmap.limit(label)
    return {
        "name": visible_text(short_name(label)),
        "meaning": meaning_of(heatmap, label),
        "kind": _KINDS[style.colour],
        "low": number(-limit) if style.colour == "signed" else "0",
        "high": number(limit),
        "style": style,
        "limit": limit,
        "values": heatmap.rows[label],
    }


def _prompt(heading: str, pieces: list[tuple[str, bool]]) -> tuple:
    """Heading, colour of the marks, the text near its changes, and the whole text where that is longer."""
    short = shorten(pieces)
    shown = [[(visible_text(text), changed) for text, changed in joined(part)] for part in (short, pieces)]
    return heading, "o" if heading.startswith("Paraphrase") else "b", shown[0], None if short is pieces else shown[1]


def _token(heatmap: ResponseHeatmap, i: int, rows: list[dict]) -> dict:
    token, kept = heatmap.tokens[i], heatmap.kept[i]
    text = visible_token(token)
    cells, details = [], [f"Token {i + 1:,} of {len(heatmap):,}: “{text}”"]
    for row in rows:
        value, style = row["values"][i], row["style"]
        cells.append(_cell(value, style, row["limit"]))
        exact = f"{value:.4f} {style.unit}".rstrip().replace("-", "\u2212")
        details.append(f"{row['name']} {exact}" if math.isfinite(value) else f"{row['name']}: no value")
    details.append("kept for training" if kept else "not trained")
    # Most tokens begin with a space, whose mark is quiet. The response breaks its lines where it did when written.
    space = text.startswith("␣") and len(text) > 1
    text = text[1:] if space else text
    shown = {"kept": kept, "title": " · ".join(details), "cells": cells}
    return {**shown, "space": space, "text": text, "breaks": "\n" in token}


def _cell(value: float, style: RowStyle, limit: float) -> tuple[str, str | None]:
    """Class of a value's colour, and how strong it is."""
    if not math.isfinite(value):
        return "x", None
    negative = style.colour == "signed" and value < 0
    share = 0.0 if style.colour != "signed" and value < 0 else abs(value) / limit
    return "o" if style.colour == "orange" or negative else "b", f"{share:.3g}"
