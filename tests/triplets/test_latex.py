"""LaTeX that JSON has eaten: mended where there is one reading, named where there is doubt, else left alone."""

import json

import pytest
from triplets.running import generate

from crop_trl.triplets.candidates import check_candidate
from crop_trl.triplets.domain import load_domain
from crop_trl.triplets.latex import COMMANDS, WORDS, commands, mend, mend_problem

MATHEMATICS = load_domain("mathematics")
ORIGINAL = r"Let $a \ne b$ and $2 \times 3 \tan2x$. Find $\frac{\nu_1}{2}$."


def eaten(text: str, command: str) -> str:
    """A text as it comes out of JSON in which this command had one backslash only."""
    return json.loads(json.dumps(text).replace(f"\\\\{command}", f"\\{command}"))


def test_every_command_that_an_escape_can_eat():
    failed = []
    for command in sorted(COMMANDS | {"frac", "beta", "rho", "right", "binom", "forall"}):
        whole = rf"Let $x \{command} {{y}}$ hold, and $\{command}_1 + 2$."
        text = eaten(whole, command)
        assert text != whole
        # One reading, where the original has the command; without it nothing is guessed.
        if mend(text, rf"Take $3\{command}1$.", {command}) != (whole, [command] * 2, []):
            failed.append(("known", command))
        same, mended, broken = mend(text, "Take $3$.", set())
        if (same, mended) != (text, []) or (command in COMMANDS and broken != [command] * 2):
            failed.append(("unknown", command))
        if command in COMMANDS - WORDS and mend_problem(text) != whole:
            failed.append(("problem", command))
    assert failed == []


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        ("Find $\tan2x$.", r"Find $\tan2x$."),
        ("Now $a \ne b$.", r"Now $a \ne b$."),
        ("So $\x0crac{\nu_1}{2}$.", r"So $\frac{\nu_1}{2}$."),
        (r"So $\\frac{1}{2}$.", r"So $\frac{1}{2}$."),
        (r"One.\n\nTwo.\nFind $x$.", "One.\n\nTwo.\nFind $x$."),
    ],
)
def test_what_is_certain_is_mended(text, mended):
    found, changed, broken = mend(text, ORIGINAL, commands([ORIGINAL]))
    assert found == mended and changed and not broken


@pytest.mark.parametrize(
    "text",
    [
        "Take $a \nleq b$.",
        "Take $3 \to0$.",
        "So\therefore $x$.",
        "Number it $x \tag{1}$.",
        "So $\tbinom{3}{2}$.",
        "So $\tau_1$.",
        "So $a \not= b$.",
        "So $a \ni b$.",
        r"So $\\sqrt{2}$.",
        r"So $x \\cdots y$.",
        r"One.\nwhere $x$.",
        r"One\t$x$.",
    ],
)
def test_what_is_not_certain_is_named(text):
    assert mend(text, ORIGINAL, commands([ORIGINAL]))[2]


@pytest.mark.parametrize(
    "text",
    [
        "One\nin three\n\tof them\ne. each",
        "$$\ne = mc^2$$",
        "$$\nu = 1$$",
        "```\n\te=(0, 1);\n```",
        r"\begin{pmatrix} a & b \\c & d \end{pmatrix} \\ x",
        r"so \\ $\neq$ is \nabla, $\to$",
        r"Line.\\Line",
        "i. one\ni. two\nless\nmid",
    ],
)
def test_what_is_meant_is_left(text):
    assert mend(text, "Other.", commands([text])) == (text, [], [])


def test_the_original_s_own_form_is_no_mistake():
    original = "So $x \\\\cdots y$ and\n$$\nu=1$$ \\nand \tag"
    assert mend(original, original, commands([original])) == (original, [], [])


def candidate(paraphrase: str, **others: str):
    fields = {
        "paraphrase_problem": paraphrase,
        "counterfactual_problem": "Let $a = b$.",
        "condition_type": "x",
    } | others
    return check_candidate(ORIGINAL, fields, 1, 1, (), commands([ORIGINAL, *fields.values()]), MATHEMATICS)


def test_a_candidate_is_mended_or_not_accepted():
    found = candidate("Is $a \ne b$?")
    assert found.fields["paraphrase_problem"] == r"Is $a \ne b$?" and not found.violations
    assert found.warnings[0] == "paraphrase: backslashes mended (ne)"
    assert candidate("Is $a \nleq b$?").violations == ["paraphrase_has_broken_latex_command"]
    # The reply's other texts know the command.
    found = candidate("Is $a \nleq b$?", counterfactual_condition_description=r"$a \nleq c$")
    assert found.fields["paraphrase_problem"] == r"Is $a \nleq b$?" and not found.violations


def test_problems_that_lost_backslashes_are_mended_and_named(start_server, problems, tmp_path, capsys):
    rows = ["[plan:good] Is $2 \times 3$?", "[plan:good] For $\nabla ABC$ take 1.", "[plan:good] One\nis 1\ni. e. 2"]
    result = generate(start_server(), problems(*rows), tmp_path / "out")
    assert [record["original_problem"] for record in result.records] == [
        r"[plan:good] Is $2 \times 3$?",
        r"[plan:good] For $\nabla ABC$ take 1.",
        rows[2],
    ]
    assert "2 problems had LaTeX commands without their backslash" in (said := capsys.readouterr().err)
    assert "mended: p0000, p0001." in said


def test_rows_and_cells_are_no_commands():
    """Two backslashes that end a row stay, or void the candidate where nobody can tell; a tab before a word is one."""
    rows = r"Solve \(\begin{cases} x=1 \\(y-1)^2=4 \end{cases}\)."
    original = r"Solve \(x=1, (y-1)^2=4\)."
    assert mend(rows, original, commands([original, rows])) == (rows, [], [])
    braces = r"Find $\{x\}$ with $\begin{cases} x=1 \\{y}=2 \end{cases}$."
    assert mend(braces, r"Find $\{x\}$.", commands([braces]))[0] == braces
    for text in (r"$\begin{cases} a\\theta=2\end{cases}$", r"$\begin{array}{c} \sin x \\cos x\end{array}$"):
        mended, _, broken = mend(text, r"$\theta + \cos x$", {"theta", "cos", "sin", "begin", "end"})
        assert mended == text and broken
    eaten = "Solve $\\begin{cases} r=2\\\theta=3\\end{cases}$."  # the row's end, and a tab that was a command
    assert mend(eaten, r"Solve $r=2, \theta=3$.", {"theta", "begin", "end"})[2] == ["theta"]
    assert mend_problem(eaten) == eaten and mend_problem("It is\not so") == "It is\not so"
    for problem in ("Time table:\ns\tt\n1\t2", "1.\tan apple", "From\to", "Find\top", "(a)\tag"):
        assert mend_problem(problem) == problem
    table = "Values:\n1\tan angle"
    assert mend(table, r"The $\tan x$ of it", {"tan"}) == (table, [], [])
