"""The grader: what counts as the answer, what equals the gold, and that nothing can hang it."""

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from crop_trl.evaluation.grading import verdict as grading
from crop_trl.evaluation.grading.pool import GradingPool
from crop_trl.evaluation.grading.verdict import BOX, accuracy_reward, extract_boxed, grade, grade_many


def boxed(answer: str) -> str:
    return f"Therefore we find $\\boxed{{{answer}}}$."


BOXES = [
    (r"So \boxed{12}.", "12"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
    (r"\boxed{3} no, \boxed{4}", "4"),
    (r"\boxed{\boxed{7}}", "7"),
    (r"<think>\boxed{3}</think> The answer: \boxed{5}", "5"),
    (r"\boxed{3}</think> The answer: \boxed{5}", "5"),
    (r"<think>a</think><think>b</think>\boxed{5}", "5"),
    (r"<think>so \boxed{3}", None),
    (r"<think>so \boxed{3}</think> done", None),
    (r"<think>a</think>\boxed{5}<think>", None),
    (r"\boxed{3} or rather \boxed{4", None),
    (r"\boxed{3} \boxed{\frac{1}{2}", None),
    (r"\boxed{}", None),
    (r"\boxed{  }", None),
    (r"\boxed 5", None),
    (r"\boxed {5}", None),
    (r"\fbox{5}", None),
    ("boxed{5}", None),
    ("5", None),
    ("", None),
    (None, None),
    (5, None),
]


def test_extract_boxed():
    found = [(text, extract_boxed(text)) for text, _ in BOXES]
    assert found == BOXES


def wrong_verdicts(cases: list[tuple[str, object, bool]]) -> list[str]:
    """Responses and golds that the grader takes for something else."""
    verdicts = grade_many([text for text, _, _ in cases], [gold for _, gold, _ in cases])
    return [
        f"{text} ~ {gold}: {is_right}"
        for (text, gold, right), is_right in zip(cases, verdicts)
        if is_right is not right
    ]


HERE = Path(__file__).parent
ANSWERS = (HERE.parents[1] / "data" / "grader_answers.jsonl", HERE / "adversarial_answers.jsonl")


@pytest.mark.parametrize("file", ANSWERS)
def test_answers(file):
    """
    The pairs in adversarial_answers.jsonl were labelled before the grader saw them. `known_miss` marks what is still
    wrong: such a mark that is out of date fails, too, so the number stays in sight.
    """
    cases = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    wrong = wrong_verdicts([(boxed(c["answer"]), c["gold"], c["right"] ^ c.get("known_miss", False)) for c in cases])
    assert not wrong, "\n".join(wrong)


def test_which_box_counts():
    wrong = wrong_verdicts(
        [
            (r"First \boxed{3}. Checking again gives \boxed{4}.", "4", True),
            (r"\boxed{4}" + "\n\n" + r"\boxed{4}", "4", True),
            (r"It is \boxed{3} or \boxed{4}", "4", False),
            (r"$\boxed{3}$, $\boxed{4}$", "4", False),
            (r"$x=\boxed{3}$ and $y=\boxed{4}$", "3, 4", True),
            (r"$x=\boxed{3}$ and $y=\boxed{4}$", "4", False),
            (r"<think>\boxed{4}</think> It is \boxed{3}.", "4", False),
            ("4", "4", False),
            (boxed("nan"), "nan", False),
            (boxed("nan"), float("nan"), False),
            (boxed("inf"), float("inf"), False),
        ]
    )
    assert not wrong, "\n".join(wrong)


HOSTILE = [
    r"9^{9^{9^{9}}}",
    r"\log_3(\log_2 2^{2^{2^{2^{2^2}}}})",
    r"\sum_{k=1}^{10^{12}} \frac{1}{k^k}",
    "{" * 900 + "}" * 900,
    r"\frac{" * 300,
    r"\sqrt" * 400,
    "(" * 2000,
    "x" * 100_000,
    "\x0c\x00",
]


def use(pool: GradingPool, monkeypatch) -> GradingPool:
    monkeypatch.setattr(grading, "shared_pool", lambda: pool)
    return pool


def test_hostile_answers_in_a_worker_thread(monkeypatch):
    """Signals do not reach threads, and big-integer powers do not answer to signals: only killing ends them."""
    pool = use(GradingPool(cpu_seconds=0.5), monkeypatch)
    verdicts = []
    golds = [r"\sqrt{11}"] * len(HOSTILE)
    thread = threading.Thread(target=lambda: verdicts.extend(grade_many(map(boxed, HOSTILE), golds)), daemon=True)
    thread.start()
    thread.join(240)  # an end to a hang, no measure of speed
    pool.close()
    assert verdicts == [False] * len(HOSTILE)


class ImpatientPool(GradingPool):
    """Its workers may compute for a minute, but it does not wait so long, and says then that they had their time."""

    def _drop(self, worker):
        spent = super()._drop(worker)
        self.cpu_seconds, self.wall_seconds = 0.1, 120.0
        return spent


def test_worker_that_computes_on_is_killed_and_replaced():
    pool = ImpatientPool(size=1, cpu_seconds=60.0, wall_seconds=120.0)
    try:
        assert pool.same("x+1", "1+x")
        pool.wall_seconds = 2.0
        first = next(iter(pool.everyone)).process
        assert not pool.same(r"\sqrt{7}", r"\sum_{k=1}^{10^{12}} \sin(k^k)")
        assert first.poll() is not None
        pool.cpu_seconds = 60.0
        assert pool.same("x+2", "2+x")
    finally:
        pool.close()
    assert not pool.everyone


class TroubledPool(GradingPool):
    """The first workers are stopped or killed as soon as they are there."""

    def __init__(self, signals: list[signal.Signals]):
        super().__init__(size=1, wall_seconds=0.5)
        self.signals = list(signals)

    def _take(self):
        worker = super()._take()
        worker.wait_until_ready()
        if self.signals:
            worker.process.send_signal(self.signals.pop(0))
        else:
            self.wall_seconds = 120.0
        return worker


def test_trouble_with_workers_is_no_verdict(monkeypatch, caplog):
    pool = use(TroubledPool([signal.SIGSTOP]), monkeypatch)
    assert grade(boxed("p+q"), "q+p")
    pool.signals.append(signal.SIGKILL)
    assert grade(boxed("p+r"), "r+p")
    # Out of luck twice: no verdict, said, and not kept for the next time.
    pool.wall_seconds = 0.5
    pool.signals += [signal.SIGSTOP, signal.SIGKILL, signal.SIGSTOP, signal.SIGSTOP]
    assert not grade(boxed("p+s"), "s+p") and "No verdict on an answer, which counts as wrong" in caplog.text
    assert grade_many([boxed("p+s"), boxed("4")], ["s+p", "4"]) == [None, True]
    assert "No verdict on 1 of 2 answers (a grading process stalled: 1)" in caplog.text
    assert accuracy_reward(["p"] * 2, [boxed("p+s"), boxed("s")], ["s+p", "s+p"]) == [1.0, 0.0]
    pool.close()


def test_a_call_has_a_budget(monkeypatch, caplog):
    pool = use(GradingPool(size=1, cpu_seconds=0.2), monkeypatch)
    monkeypatch.setattr(grading, "CALL_SECONDS", 0.5)
    monkeypatch.setattr(grading, "PAIR_SECONDS", 0.0)
    towers = [boxed(rf"{n}^{{{n}^{{{n}^{{{n}}}}}}}") for n in range(11, 31)]
    verdicts = grade_many(towers, [r"\sqrt{7}"] * len(towers))
    assert set(verdicts) == {False, None} and verdicts[0] is False
    assert f"the time for grading was used up: {verdicts.count(None)}" in caplog.text
    pool.close()


ISOLATED = """
import sys
from crop_trl.evaluation import grading
from crop_trl.evaluation.grading import pool
pool.Worker = None  # starting one would fail
assert grading.grade("\\\\boxed{12}", "12") and not grading.grade("\\\\boxed{13}", 12)
assert grading.accuracy_reward(["p"], ["\\\\boxed{1,234}"], ["1234"]) == [1.0]
print(sorted({"math_verify", "sympy", "torch"} & set(sys.modules)))
"""


def test_integers_need_neither_math_verify_nor_a_process():
    done = subprocess.run([sys.executable, "-c", ISOLATED], capture_output=True, text=True, check=True)
    assert "math_verify" not in done.stdout and "sympy" not in done.stdout


def test_without_math_verify_algebra_counts_as_wrong_and_says_so(monkeypatch, caplog):
    class Missing:
        size = 1

        def same(self, gold, prediction, budget=None):
            raise ImportError("No module named 'math_verify'")

    monkeypatch.setattr(grading, "shared_pool", Missing)
    monkeypatch.setattr(grading, "_warned_without_algebra", False)
    with caplog.at_level(logging.WARNING):
        assert not grade(boxed("a+b+c+d"), "d+c+b+a")
    assert "crop-trl[eval]" in caplog.text
    with pytest.raises(ImportError, match=r"crop-trl\[eval\]"):
        grading.require_algebra()


def test_accuracy_reward_takes_both_kinds_of_completions():
    completions = [r"\boxed{4}", [{"role": "assistant", "content": r"\boxed{5}"}], r"\boxed{4}", [], r"\boxed{4}"]
    answers = ["4", "4", None, "4", float("nan")]
    assert accuracy_reward(["p"] * 5, completions, answers, id=["a"] * 5) == [1.0, 0.0, None, 0.0, None]


def test_grade_many_keeps_the_order():
    golds = [str(number) for number in range(200)]
    assert grade_many([boxed(str(number - number % 2)) for number in range(200)], golds) == [True, False] * 100


LOOKS_RIGHT = {
        "42": ("x = 24, y = 42", "x=43, x=42", r"x = 24 \text{ and } y = 42"),
        "25": ("x^2=25", r"\sqrt{x}=25", "1/x=25", "|x|=25", r"\log x=25", "x^2+1=25", r"\frac{x}{2}=25"),
        "A": (r"\text{(A) or (B)}", r"\text{(A) and (B)}", r"\text{(A)(B)}"),
        "12": (r"12\text{ squared}", r"12\text{ factorial}", r"\text{negative }12", r"\text{twice }12",
               r"\text{square root of }12", r"12\text{ tens}", r"12\text{ halves}", r"12\%\%", r"12\text{ negative}"),
    }  # fmt: skip
IS_RIGHT = {
        "42": ("x = 40 + 2 = 42", "f(1, 2) = 42"),
        "25": ("a+b=25", "f(2)+f(3)=25", "x=25", "S_{10}=25", r"x = 5^2 = 25", r"\angle ABC = 25^\circ", "f(5) = 25"),
        "A": (r"\text{(A) ellipse}", r"\text{(A)}"),
        "12": (r"12\text{ cm squared}", r"12\text{ square feet}", r"12\text{ positive integers}", r"12\%",
               r"\text{Area of the square is }12", r"\text{Side of the square: }12"),
        "x^2+2x+1": ("(x+1)^2 = x^2+2x+1",),
        "12 cm^2": (r"12\text{ cm squared}",),
    }  # fmt: skip


def test_answers_that_only_look_right():
    both = ((LOOKS_RIGHT, False), (IS_RIGHT, True))
    pairs = [(answer, gold, right) for cases, right in both for gold, answers in cases.items() for answer in answers]
    wrong = wrong_verdicts([(boxed(answer), gold, right) for answer, gold, right in pairs])
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        BOX * 4000 + "5" + "}" * 4000,
        BOX + "{" * 500_000 + "1" + "}" * 500_000 + "}",
        BOX + "1}" + BOX + "{" * 500_000 + "1" + "}" * 500_000 + "}",
        BOX + "0" * 500_000 + "x}",
        BOX + r"answer\text{sum of }" * 60 + "!}",
    ],
    ids=["boxes", "braces", "two boxes", "zeros", "words"],
)
def test_long_answers_cost_no_time(text):
    started = time.monotonic()
    assert not grade(text, "5")
    assert time.monotonic() - started < 10
    assert grade(BOX * 3 + "{{5}}" + "}" * 3, "5")
