"""Token categories: the hand-labelled table, decoding, precedence, phrases, shares, chart."""

import csv
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from transformers import AutoTokenizer

import crop_trl.analysis
from crop_trl.analysis.categories import CATEGORIES, categorize, load_word_lists
from crop_trl.analysis.category_shares import ALL_TOKENS, categorize_table, category_shares, save_category_chart
from crop_trl.analysis.tokens import TokenTable

FOLDER = Path(__file__).parent
STUDENT = FOLDER.parents[1] / "examples/tiny_math/models/student"


def names(pieces):
    return [CATEGORIES[c] for c in categorize(pieces)]


def labelled():
    with open(FOLDER / "token_categories.csv", encoding="utf-8", newline="") as file:
        return [{k: v.replace("⏎", "\n") for k, v in row.items()} for row in csv.DictReader(file)]


def test_the_table_is_as_it_was_labelled():
    rows = labelled()
    assert [row["id"] for row in rows] == [str(i + 1) for i in range(200)]
    counts = {name: sum(row["category"] == name for row in rows) for name in CATEGORIES}
    assert counts == {"task-specific": 90, "formatting": 51, "boilerplate": 30, "function": 21, "content": 8}


def test_agreement_with_the_reader():
    """192 of 200 as first seen, 197 after mending; the three that differ are a matter of opinion."""
    rows = labelled()
    differing = [row["id"] for row in rows if names([row["left"], row["token"], row["right"]])[1] != row["category"]]
    assert set(differing) <= {"60", "113", "137"}, differing


TOKENS = [
    # Of several things in one token the first in precedence counts; a space in front counts for nothing.
    ([" (x"], "T"),
    ([").\n\n"], "F"),
    ([" the", " sum"], "WT"),
    ([" ", "7"], "FT"),
    (["\n", "Thus", ",", " cats"], "FBFC"),
    # A word has one category, however it is cut.
    (["cos", "ines", " cat", "tle"], "TTCC"),
    ([" double", "-", "check"], "TFB"),
    # Phrases are found in the decoded text, over any cut and line break.
    ([" w", "e", "\n", "have", " we"], "BBFBW"),
    (["On", " the", " other", " hand", ",", " the", " hand"], "BBBBFWC"),
    (["we", " haven"], "WC"),
    # LaTeX: commands calculate unless they lay out.
    (["\\", "frac", "{", "1", "}", "\\", "boxed", "{"], "TTFTFFFF"),
    (["\\begin", "{", "align", "*", "}", "\\", "alpha"], "FFFFFTT"),
    (["\\(", "x", "\\)", "$", "$$"], "FTFFF"),
    # Letters: variables in formulas, words in prose.
    ([" a", " cat", " $", "a", " +", " a", "$"], "WCFTTTF"),
    ([" I", " run", ",", " I", "_", "n"], "WCFTFT"),
    (["in", " a", " ", "3", "0", "-day", " trip"], "WWFTTCC"),
    # Operators and what only looks like them.
    (["**", "x", "**", "\n", "-", " one"], "FTFFFT"),
    (["x", " -", " y", " *", " z", "!"], "TTTTTF"),
    (["3", " :", " 2", " is", ":"], "TTTWF"),
    (["2", "7", ".", "8", "%", "."], "TTTTTF"),
    # Full-width signs and Chinese.
    (["设", " x", "，", "所以", "方", "程", "：", "苹果"], "BTFBTTFC"),
    (["<|im_end|>", "<think>", "</think>"], "FFF"),
    (["🙂", "\ufffd", "\ud800"], "FFF"),
    (["Vi", "eta", "'s", " can", "'t"], "CCWWW"),
    ([], ""),
]


def test_categories():
    letters = dict(zip(CATEGORIES, "TFBWC"))
    found = [(pieces, expected, "".join(letters[name] for name in names(pieces))) for pieces, expected in TOKENS]
    assert [case for case in found if case[1] != case[2]] == []


def test_a_part_of_a_character_belongs_to_it():
    # ∠ and √ each in two tokens, as token_pieces gives them: the second is empty.
    assert names([" ∠", "", "ABC", "，", "", "", " the"]) == ["task-specific"] * 3 + ["formatting"] * 3 + ["function"]
    assert names(["", "", "x"]) == ["formatting", "formatting", "task-specific"]


def test_no_category_depends_on_how_the_text_is_cut():
    rng = np.random.default_rng(0)
    text = (
        "Let's see: therefore the sum of $x_1$ and \\frac{3}{4} is ≤ 5，所以 we have cosines. On the other hand, a cat!"
    )
    whole = categorize(list(text))
    for _ in range(50):
        cuts = np.sort(rng.choice(np.arange(1, len(text)), size=20, replace=False))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        for piece, category, start in zip(pieces, categorize(pieces), [0, *cuts]):
            strong = [c for c, char in zip(whole[start : start + len(piece)], piece) if not char.isspace()]
            assert category in strong or (not strong and CATEGORIES[category] == "formatting"), piece


def test_the_word_lists_hold_no_word_in_two_ways():
    """A boilerplate or function word that is task-specific too would never be seen as what it is listed for."""
    lists = yaml.safe_load(Path(crop_trl.analysis.__file__).with_name("categories.yaml").read_text(encoding="utf-8"))
    known = load_word_lists().words
    for section, category in (("boilerplate", "boilerplate"), ("function_words", "function")):
        hidden = [w for w in lists[section]["words"].split() if CATEGORIES[known[w]] != category]
        assert not hidden, hidden


def test_time_grows_with_the_response():
    text = "Therefore we have $x^2 + 3x = 4$, so a cat has \\frac{1}{2} of the sum. "

    def seconds(count):
        pieces = [p for _ in range(count) for p in (text[i : i + 4] for i in range(0, len(text), 4))]
        start = time.process_time()
        categorize(pieces)
        return time.process_time() - start

    # 16 times as much text; in quadratic time it would take 256 times as long.
    assert min(seconds(640) for _ in range(2)) < 64 * min(seconds(40) for _ in range(3))


def table_of(texts, tokenizer, **kept):
    ids = [tokenizer(text)["input_ids"] for text in texts]
    flat = np.concatenate(ids)
    masks = {name: keep(flat) for name, keep in kept.items()}
    return TokenTable(flat, np.array([len(i) for i in ids]), np.ones(len(flat), dtype=bool), masks)


@pytest.fixture(scope="module")
def shares():
    tokenizer = AutoTokenizer.from_pretrained(STUDENT)
    table = table_of(
        ["Let us see. To begin, 37 shells", " the boxes 3 + 4 = 7."],
        tokenizer,
        first=lambda ids: np.arange(len(ids)) < 3,
        none=lambda ids: np.zeros(len(ids), dtype=bool),
    )
    return table, tokenizer, category_shares(table, tokenizer)


def test_shares(shares):
    table, tokenizer, shares = shares
    assert shares.methods == ["first", "none", ALL_TOKENS]
    assert shares.counts[0].tolist() == [0, 0, 3, 0, 0]
    # Let us see . To begin , 3 7 shells | the boxes 3 + 4 = 7 .
    assert shares.counts[2].tolist() == [7, 3, 5, 1, 2] and shares.counts[2].sum() == len(table)
    assert np.isnan(shares.shares[1]).all()
    assert shares.to_dict()["methods"]["first"]["shares"]["boilerplate"] == 1.0
    two = category_shares([table, table], tokenizer)
    assert (two.counts == 2 * shares.counts).all() and two.responses == [4, 4, 4]


def test_responses_do_not_run_into_each_other():
    """A phrase that would only come about by joining two responses is none."""
    tokenizer = AutoTokenizer.from_pretrained(STUDENT)
    table = table_of(["so we", " have it"], tokenizer, all=lambda ids: np.ones(len(ids), dtype=bool))
    assert "boilerplate" not in {CATEGORIES[c] for c in categorize_table(table, tokenizer)}


def test_chart(shares, tmp_path):
    save_category_chart(shares[2], tmp_path / "new" / "chart.png")
    assert (tmp_path / "new" / "chart.png").stat().st_size > 20_000
