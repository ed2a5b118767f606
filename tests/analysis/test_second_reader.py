"""Two readers of the same tokens."""

import csv
from collections import Counter
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def labels(name):
    with open(FOLDER / name, newline="") as file:
        return {row["id"]: row["category"] for row in csv.DictReader(file)}


def test_two_readers_agree_as_the_table_says():
    first, second = labels("token_categories.csv"), labels("token_categories_second.csv")
    pairs = [(first[i], category) for i, category in second.items()]
    agreed = sum(a == b for a, b in pairs) / len(pairs)
    ours, theirs = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    by_chance = sum(ours[category] * theirs[category] for category in ours) / len(pairs) ** 2
    assert len(pairs) == 50 and agreed == pytest.approx(0.92)
    assert (agreed - by_chance) / (1 - by_chance) == pytest.approx(0.88, abs=0.01)
    said = (FOLDER / "token_categories.md").read_text()
    assert "agree on 46 (92 %, Cohen's kappa 0.88)" in said
