"""Formulas of prompts: drawn where they are some, marked where they differ, and never more than formulas."""

import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from crop_trl.formulas import with_formulas
from crop_trl.text import marked_triplet, visible_text

MATHML = "{http://www.w3.org/1998/Math/MathML}"


def drawn(text: str, *others: str) -> list[tuple[str, ...]]:
    return with_formulas(marked_triplet(text, [], *others)[1][0])


def test_what_differs_in_a_formula_is_marked_in_it_or_the_whole_is():
    for text, other, inside, whole in (
        (r"Let $\frac{x}{12}=5x$ be.", r"Let $\frac{x}{13}=5x$ be.", ["12"], ""),
        (r"\[\sqrt[3]{2y}\]", r"\[\sqrt[4]{2y}\]", ["3"], ""),
        (r"for \(x \le 5\) only", r"for \(x \ge 5\) only", [], "changed"),
        (r"$$\text{in 5 km}$$", r"$$\text{in 6 km}$$", [], "changed"),
        ("$a+b$ and 3", "$a+b$ and 4", [], ""),
    ):
        pieces = drawn(text, other)
        (formula,) = [piece for piece in pieces if len(piece) == 3]
        assert re.findall('class="changed"><m[ni]>(.*?)</', formula[2]) == inside and formula[1] == whole, text
        assert "".join(piece[0] for piece in pieces) == text
    # Money, and what is no LaTeX.
    for text in ("It costs $5 to $7.", "Between $5 and $7, or $ 8 $", r"$\frac{$", r"\boxed{}", r"3\$ or $4", "$$"):
        assert drawn(text) == [(text, "")], text
    # Drawn by ourselves: without a font for mathematics browsers leave out the sign.
    (root,) = drawn(r"$\sqrt{x}$")
    assert "√" in root[2] and "msqrt" not in root[2]


PARTS = (
    r"$ $$ \( \) \[ \] \text{ \frac{ } { ^ _ & \\ \href{javascript:1} \class{x}{ \style{a:b}{ \begin{cases} \end{cases}"
)
PARTS = [*PARTS.split(), *"a 5 < > \" ' &lt;script&gt; <script> <!-- ]]> \x00 \u202e \u2028 🙂 \xa0 \n".split(" "), " "]


@given(st.lists(st.sampled_from(PARTS), max_size=30).map("".join))
def test_hostile_text_stays_text(text):
    pieces = drawn(f"$x$ {text}$")
    assert "".join(piece[0] for piece in pieces) == visible_text(f"$x$ {text}$")
    for _, _, mathml in (piece for piece in pieces if len(piece) == 3):
        for part in ElementTree.fromstring(mathml).iter():
            assert part.tag.startswith(MATHML + "m") and not {"href", "style", "id"} & set(part.attrib)
            assert part.get("class", "root") == "root"
