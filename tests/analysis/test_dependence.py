"""Labels of tokens from worked solutions: a problem by hand, with every character taken for a token."""

import pytest

from crop_trl.analysis.dependence import AFTER_ERROR, NEGATIVE, POSITIVE, UNALIGNED, Reference


def telling(boxes: int, eggs: int, sold: int, word: str = "minus", sign: str = "-") -> dict[str, str]:
    total = boxes * eggs
    left = total - sold if sign == "-" else total + sold
    verb = "sells" if sign == "-" else "finds"
    return {
        "problem": f"Ann has {boxes} boxes of {eggs} eggs and {verb} {sold}. How many dozens of 12 are left?",
        "solution": f"We look at it.\nStep 1: {boxes} boxes of {eggs} eggs are {boxes} x {eggs} = {total} eggs.\n"
        f"Step 2: {word} {sold} eggs is {total} {sign} {sold} = {left} eggs, and a dozen is 12.\nSo \\boxed{{{left}}}.",
    }


OWN = telling(3, 20, 7)
RECORD = {
    "id": "eggs",
    "original_problem": OWN["problem"],
    "solution": OWN["solution"],
    "changes": [telling(5, 20, 7), telling(3, 21, 7), telling(3, 20, 9), telling(3, 20, 7, "plus", "+")],
}


def marked(response: str, record=RECORD) -> str:
    """The response with its positive characters in brackets, `?` for what is not aligned, cut where labels end."""
    text, before = "", NEGATIVE
    for char, label in zip(response, Reference.of(record).label_tokens(list(response))):
        text += {(True, False): "[", (False, True): "]"}.get((label == POSITIVE, before == POSITIVE), "")
        if label == AFTER_ERROR:
            return f"{text}|"
        text += "?" if label == UNALIGNED else char
        before = label
    return text


CASES = {
    "the solution itself": (
        OWN["solution"],
        "We look at it.\nStep 1: [3] boxes of [20] eggs are [3] x [20] = [60] eggs.\n"
        "Step 2: [minus] [7] eggs is [60] [-] [7] = [53] eggs, and a dozen is 12.\nSo \\boxed{[53]}.",
    ),
    "other words around it, and no numbered steps": (
        OWN["solution"].replace("We look at it.", "Fine, then!").replace("Step 2:", "After that:"),
        "Fine, then!\nStep 1: [3] boxes of [20] eggs are [3] x [20] = [60] eggs.\n"
        "After that: [minus] [7] eggs is [60] [-] [7] = [53] eggs, and a dozen is 12.\nSo \\boxed{[53]}.",
    ),
    "a misread number": (
        OWN["solution"].replace("3 x 20 = 60", "3 x 7 = 21"),
        "We look at it.\nStep 1: [3] boxes of [20] eggs are [3] x |",
    ),
    "a slip in the result": (
        OWN["solution"].replace("= 60", "= 66"),
        "We look at it.\nStep 1: [3] boxes of [20] eggs are [3] x [20] = |",
    ),
    "another sign, foreshadowed by a word": (
        OWN["solution"].replace("minus", "with").replace("60 - 7 = 53", "60 + 7 = 67"),
        "We look at it.\nStep 1: [3] boxes of [20] eggs are [3] x [20] = [60] eggs.\nStep 2: |",
    ),
    "another word for the same": (
        OWN["solution"].replace("minus", "without"),
        "We look at it.\nStep 1: [3] boxes of [20] eggs are [3] x [20] = [60] eggs.\n"
        "Step 2: ??????? [7] eggs is [60] [-] [7] = [53] eggs, and a dozen is 12.\nSo \\boxed{[53]}.",
    ),
    "a forgotten step": (
        OWN["solution"].split("Step 2")[0] + "So \\boxed{60}.",
        "We look at it.\nStep 1: [3] boxes of [20] eggs are [3] x [20] = [60] eggs.\nSo \\boxed{|",
    ),
    "signs and numbers written otherwise": (
        OWN["solution"].replace(" x ", " × ").replace("60", "60.0"),
        "We look at it.\nStep 1: [3] boxes of [20] eggs are [3] × [20] = [60.0] eggs.\n"
        "Step 2: [minus] [7] eggs is [60.0] [-] [7] = [53] eggs, and a dozen is 12.\nSo \\boxed{[53]}.",
    ),
    "a sentence that the solution does not have": (
        OWN["solution"].replace("We look", "She sells 7. We look"),
        "She ????? [7]. We look at it.\nStep 1: [3] boxes of [20] eggs are [3] x [20] = [60] eggs.\n"
        "Step 2: [minus] [7] eggs is [60] [-] [7] = [53] eggs, and a dozen is 12.\nSo \\boxed{[53]}.",
    ),
    "a number from nowhere": (OWN["solution"].replace("We look", "There are 99. We look"), "There are |"),
    "nothing": ("", ""),
}


def test_a_problem_may_have_either_name():
    renamed = {"problem" if name == "original_problem" else name: value for name, value in RECORD.items()}
    assert Reference.of(renamed).changing == Reference.of(RECORD).changing


def test_labels_of_a_problem_by_hand():
    wrong = {name: marked(response) for name, (response, right) in CASES.items() if marked(response) != right}
    assert not wrong


def test_a_value_that_is_a_constant_elsewhere_is_left_out_where_nothing_tells_which():
    record = {**RECORD, "changes": [*RECORD["changes"], telling(3, 20, 12)]}
    record |= {"solution": telling(3, 20, 12)["solution"], "original_problem": telling(3, 20, 12)["problem"]}
    assert marked("Twelve is 12. " + record["solution"], record).startswith("Twelve is ??. We look")
    assert "a dozen is 12" in marked(record["solution"], record)


def test_tokens_of_several_characters_and_white_space():
    pieces = ["We look at it.\nStep", " 1", ":", " ", "3", " boxes", " of", " 2", "0", " eggs are 3", " x", " 7"]
    labels = Reference.of(RECORD).label_tokens(pieces).tolist()
    P, N, A = POSITIVE, NEGATIVE, AFTER_ERROR
    assert labels == [N, N, N, N, P, N, N, P, P, P, N, A]
    # A piece without text of its own, as of a sign that is several tokens, belongs to what stands before it.
    pieces = list(OWN["solution"])
    sign = pieces.index("-")
    pieces.insert(sign + 1, "")
    assert Reference.of(RECORD).label_tokens(pieces)[sign : sign + 3].tolist() == [P, P, N]
    assert len(Reference.of(RECORD).label_tokens(list("5² is 25, 10⁻³ is ①"))) == 19


def test_a_part_of_the_solution_that_vanishes_counts_with_its_numbers_and_signs():
    short = {"problem": OWN["problem"].replace("sells 7", "sells none"), "solution": "We look at it.\nSo \\boxed{60}."}
    record = {**RECORD, "changes": [short]}
    assert marked(OWN["solution"], record) == (
        "We look at it.\nStep 1: [3] boxes of [20] eggs are [3] [x] [20] = [60] eggs.\n"
        "Step 2: minus [7] eggs is [60] [-] [7] = [53] eggs, and a dozen is [12].\nSo \\boxed{[53]}."
    )


@pytest.mark.parametrize(
    "record",
    [
        {**RECORD, "changes": []},
        {**RECORD, "solution": None},
        {**RECORD, "original_problem": None},
        {**RECORD, "changes": [{"problem": "x"}]},
    ],
)
def test_a_record_that_says_too_little_is_refused(record):
    with pytest.raises(ValueError, match="record 'eggs'.*(docs/selectors.md|each change needs both)"):
        Reference.of(record)
