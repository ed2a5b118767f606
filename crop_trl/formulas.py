"""Marked texts as pages show them, their LaTeX as MathML, which browsers draw by themselves."""

import html
import re
from collections.abc import Iterable
from xml.etree import ElementTree

from .text import joined, visible_text

try:
    from latex2mathml.converter import convert_to_element
except ImportError:  # then formulas stay as they were written
    convert_to_element = None

# A dollar is no formula's end after a space or before a figure: "between $5 and $7".
_FORMULA = re.compile(
    r"\$\$(.{1,2000}?)\$\$|\\\[(.{1,2000}?)\\\]|\\\((.{1,2000}?)\\\)"
    r"|(?<![\\$])\$(?=\S)((?:\\.|[^$\\]){1,2000}?)(?<!\s)\$(?!\d)",
    re.DOTALL,
)
# What would reach out of a formula.
_REFUSED = re.compile(r"\\(class|href|style|cssId)(?![A-Za-z])")


def with_formulas(pieces: Iterable[tuple[str, str]]) -> list[tuple[str, ...]]:
    """A marked text in pieces `(text, mark)`, and formulas as `(text, mark, MathML)`."""
    pieces, found, place = list(pieces), [], 0
    for formula in _FORMULA.finditer("".join(text for text, _ in pieces)) if convert_to_element else ():
        drawn = _drawn(list(_part(pieces, *formula.span(formula.lastindex))))
        if drawn is not None:
            mark, mathml = drawn
            found += [*_plain(_part(pieces, place, formula.start())), (visible_text(formula[0]), mark, mathml)]
            place = formula.end()
    return [*found, *_plain(_part(pieces, place, sum(len(text) for text, _ in pieces)))]


def _plain(pieces) -> list[tuple[str, str]]:
    return [(visible_text(text), mark) for text, mark in joined(pieces)]


def _part(pieces, start: int, end: int) -> Iterable[tuple[str, str]]:
    """What stands from one place of a text to another."""
    for text, mark in pieces:
        if text[max(start, 0) : max(end, 0)]:
            yield text[max(start, 0) : max(end, 0)], mark
        start, end = start - len(text), end - len(text)


def _drawn(pieces: list[tuple[str, str]]) -> tuple[str, str] | None:
    """The mark of a whole formula and its MathML; figures and letters that differ are marked in it, if that works."""
    tex, marks = "", []
    for text, mark in pieces:
        marks += [mark] if mark and not text.isspace() else []
        plain = re.fullmatch("[0-9A-Za-z]+", text) and not tex.endswith("\\")
        tex += f"{{\\class{{{mark}}}{{{text}}}}}" if mark and plain else text
    source = "".join(text for text, _ in pieces)
    if _REFUSED.search(source):
        return None
    inside = _mathml(tex) if marks else None
    if inside and len(re.findall('class="(?:reworded|changed)"', inside)) == len(marks):
        return "", inside
    whole = _mathml(source)
    return whole and (max(marks, key=["reworded", "changed"].index, default=""), whole)


def _mathml(tex: str) -> str | None:
    try:
        formula = convert_to_element(tex)
        for part in list(formula.iter()):
            # Symbols are entities here; written anew, what was text is text again.
            part.text = "\xa0".join(map(visible_text, html.unescape(part.text or "").split("\xa0")))
            if part.tag in ("msqrt", "mroot"):
                _draw_root(part)
        return ElementTree.tostring(formula, encoding="unicode")
    except Exception:  # of many kinds, for what is no LaTeX or too deep
        return None


def _draw_root(root: ElementTree.Element) -> None:
    """The sign and a line over what follows it: browsers draw a root only with a font for mathematics."""
    base, *index = root
    root.tag, root[:] = "mrow", []
    if index:
        ElementTree.SubElement(root, "msup").extend([ElementTree.Element("mrow"), *index])
    ElementTree.SubElement(root, "mo", stretchy="false").text = "√"
    ElementTree.SubElement(root, "mrow", {"class": "root"}).append(base)
