r"""Which numbers of a problem the rule changes, on texts picked by hand, and what it makes of them."""

import re

from crop_trl.triplets.numbers import changes

# Text -> what may change in it.
TEXTS = {
    "A tank holds 240 litres and loses 3.5 litres a day. How many litres are left after 12 days?": ["240", "3.5", "12"],
    "A car costs $12,500 and loses 20% of its value a year.": ["12,500", "20"],
    "A rope of 4.20 m is cut into pieces of 35 cm. How many pieces are there?": ["4.20", "35"],
    "How many 5-digit numbers have digits that add up to 43?": ["5", "43"],
    "$\\frac{3}{4}$ of the 28 pupils swim and 1/5 of the others cycle.": ["3", "4", "28", "5"],
    "第8班有45个学生，平均分成9组。": ["8", "45", "9"],
    # indices, exponents, bases, degrees of roots
    "Let $a_1 = 7$ and $a_{n+1} = 3a_n + 5$. Find $a_{10}$ and $x^{12}$.": ["7", "3", "5"],
    "Find $\\sqrt[3]{512} + \\binom{9}{4} + \\log_{8} 64$ and $1011_{2}$.": ["512", "9", "4", "64"],
    # in several places, however it is written
    "There are 18 children. The 18 children share 54 sweets.": ["54"],
    "A machine makes 1,200 screws, then 1200 more and 40 others.": ["40"],
    # no quantities
    "R2D2 was the 15th of them to leave with 0, 0.0 and 1; 100% and 90 degrees mean all of it, 007 nothing.": [],
    "Let $\\angle A = 35^\\circ$ and $\\angle B = 90^\\circ$.": ["35"],
    "Find the sum of $\\{1, 2, 3, \\ldots, 100\\}$ and of 5, 9, ..., 401, or 64 times it.": ["64"],
    # the form of the answer
    "A disc of radius 13 has an area that can be written as $25m$. Round to the nearest 10 or to 2 decimals.": ["13"],
    "What is 6 times 17? (A) 102 (B) 112 (C) 122": ["6", "17"],
}


def test_the_numbers_that_may_change():
    found = {text: sorted(change.old for change in changes(text, 99)) for text in TEXTS}
    assert found == {text: sorted(numbers) for text, numbers in TEXTS.items()}


def test_one_number_takes_another_value_of_its_size_and_nothing_else_changes():
    wrong = []
    for text in TEXTS:
        for old, new, changed in changes(text, 99):
            alike = len(old) == len(new) and float(old.replace(",", "")) / 3 < float(new.replace(",", ""))
            alike &= re.sub(r"\d", "", old) == re.sub(r"\d", "", new) and old != new
            alike &= new.endswith(old[len(old.rstrip("0")) :])  # round stays round
            rest = re.sub(rf"(?<![\w.,]){re.escape(new)}(?!\d|[.,]\d)", old, changed, count=1, flags=re.ASCII)
            if not alike or rest != text or not re.search(rf"(?<!\d){re.escape(old)}(?!\d)", text):
                wrong.append((text, old, new))
    assert wrong == []
    (even,) = changes("He has 98 of them.", 3)
    assert int(even.new) % 2 == 0 and even.text == f"He has {even.new} of them."


def test_changes_are_always_the_same_and_each_of_another_number():
    text = "Add 12, 25, 38, 41 and 57."
    assert changes(text, 2) == changes(text, 2) and len({change.old for change in changes(text, 3)}) == 3
