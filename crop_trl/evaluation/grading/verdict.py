"""Grading: the final answer must stand in `\\boxed{}` (appendix "Evaluation Details").

The same grader serves evaluation and the trainer's accuracy reward. Numbers, lists, intervals and words are compared
here, exactly and at once; what needs computer algebra goes to processes that can be killed (`pool.py`), so a
tower of powers costs seconds and a verdict, not the run.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .equivalence import Undecided, same
from .equivalence import exact_scalars as exact
from .latex import MAX_LAYERS, braced, normalize, squeeze
from .numerals import MAX_DIGITS
from .pool import Budget, GradingFailed, shared_pool

logger = logging.getLogger(__name__)

BOX = r"\boxed{"
THINK, END_THINK = "<think>", "</think>"
# Longer than any answer: what runs on inside a box is compared as text only.
MAX_ANSWER_LENGTH = 2000
# Between two boxes, no word that takes back the first: both are then parts of one answer.
_JOINT = re.compile(
    r"(?:[\s,;:.&+*$/()\[\]~!-]|\\[\[\]()!,;:]|\\q?quad|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b|\b[a-zA-Z]\s*=)*\Z"
)
_warned_without_algebra = False


def after_thinking(text: str) -> str | None:
    """What follows the last `</think>`; `None` when a thinking part is left open."""
    text = text.rpartition(END_THINK)[2]
    return None if THINK in text else text


def _boxes(text: str) -> list[tuple[int, int, str]] | None:
    """Start, end and content of each outermost box; `None` when the last one is not closed."""
    found, index = [], 0
    while (start := text.find(BOX, index)) >= 0:
        end = braced(text, start + len(BOX) - 1)
        if end is None:
            # A box inside an unclosed one may be closed, but it is not the final answer.
            return None
        found.append((start, end + 1, text[start + len(BOX) : end]))
        index = end + 1
    return found


def _answers(text: str) -> list[str]:
    """The final answer, in the boxes that give it: the last one after the thinking part, and those before it with no
    word between that would take them back (`\\boxed{1} and \\boxed{2}`). None where that box is empty or not closed."""
    text = after_thinking(text) if isinstance(text, str) else None
    boxes = (_boxes(text) if text is not None else None) or []
    found = [_bare(boxes[-1][2])] if boxes else []
    if not found or not found[0]:
        return []
    for before, box in zip(boxes[-2::-1], boxes[:0:-1]):
        if not _JOINT.match(text[before[1] : box[0]]):
            break
        found.insert(0, _bare(before[2]))
    return found


def _bare(content: str) -> str:
    """The content of a box without boxes round the whole of it."""
    content = content.strip()
    if len(content) > MAX_ANSWER_LENGTH:
        return content
    for _ in range(MAX_LAYERS):
        if not content.startswith(BOX) or braced(content, len(BOX) - 1) != len(content) - 1:
            break
        content = content[len(BOX) : -1].strip()
    return content


def extract_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{}` of a response after its thinking part; `None` when there is no whole box."""
    answers = _answers(text)
    return answers[-1] if answers else None


def _final_answer(text: str) -> str | None:
    """The same, but neighbouring boxes that differ are one list."""
    answers = _answers(text)
    if len(answers) < 2:
        return answers[0] if answers else None
    before, last = answers[-2:]
    if max(len(before), len(last)) > MAX_ANSWER_LENGTH:
        one = before == last
    else:
        one = squeeze(normalize(before)) == squeeze(normalize(last))
    return last if one else ",".join(answers)


def _gold_text(gold: Any) -> str | None:
    if isinstance(gold, bool) or str(gold).strip().lower() in ("nan", "inf", "-inf"):  # what tables put for nothing
        return None
    if isinstance(gold, float):
        return str(int(gold)) if gold.is_integer() else repr(gold)
    return gold if isinstance(gold, str) else str(gold) if isinstance(gold, int) else None


def _plain_integer(text: str) -> tuple[str, str] | None:
    """Sign and digits of a plain integer, however long."""
    match = re.fullmatch(r"([+-]?)(\d+)", text.strip(), re.ASCII)
    if match is None:
        return None
    digits = match.group(2).lstrip("0") or "0"
    return "-" if match.group(1) == "-" and digits != "0" else "", digits


def compare_answers(answer: str, gold: str, budget: Budget | None = None) -> bool:
    """Whether a boxed answer equals the gold one. Raises [`GradingFailed`]."""
    if not answer.strip() or not gold.strip():
        return False
    numbers = _plain_integer(answer), _plain_integer(gold)
    if None not in numbers:
        return numbers[0] == numbers[1]
    if max(len(answer), len(gold)) > MAX_ANSWER_LENGTH:
        return answer.strip() == gold.strip()
    answer, gold = normalize(answer), normalize(gold)
    if not answer or not gold:
        return False
    if squeeze(answer) == squeeze(gold):
        return True
    if max(len(answer), len(gold)) > min(MAX_ANSWER_LENGTH, MAX_DIGITS):
        return False
    try:
        return same(gold, answer, exact)
    except Undecided:
        return _by_algebra(gold, answer, budget)


_verdicts: dict[tuple[str, str], bool] = {}  # of workers; a failure is no verdict and not kept
MAX_VERDICTS = 65536


def _by_algebra(gold: str, answer: str, budget: Budget | None) -> bool:
    global _warned_without_algebra
    if (gold, answer) in _verdicts:
        return _verdicts[gold, answer]
    try:
        verdict = shared_pool().same(gold, answer, budget)
    except ImportError as error:
        if not _warned_without_algebra:
            _warned_without_algebra = True
            logger.warning("Answers that need algebra count as wrong (%s); `pip install crop-trl[eval]`.", error)
        return False
    if len(_verdicts) >= MAX_VERDICTS:
        _verdicts.clear()
    _verdicts[gold, answer] = verdict
    return verdict


def require_algebra() -> None:
    """Raise `ImportError` unless math-verify is installed; call it before grading anything but integers."""
    try:
        shared_pool().same("x+1", "1+x")
    except ImportError as error:
        raise ImportError(f"Grading needs math-verify ({error}); `pip install crop-trl[eval]`.") from None


def grade(prediction: Any, gold: Any) -> bool:
    """
    Whether a response's final answer is right (appendix "Evaluation Details").

    Safe in any thread; never raises, never hangs: a comparison that takes too long, or fails, counts as wrong.

    Args:
        prediction (`str`): The response. Anything that is no text is wrong.
        gold (`str`, `int` or `float`): The right answer; an empty one makes every response wrong.

    Returns:
        `bool`
    """
    try:
        return _grade(prediction, gold)
    except GradingFailed as failure:
        logger.warning("No verdict on an answer, which counts as wrong: %s.", failure)
        return False


def _grade(prediction: Any, gold: Any, budget: Budget | None = None) -> bool:
    try:
        gold = _gold_text(gold)
        answer = _final_answer(prediction)
        return answer is not None and gold is not None and compare_answers(answer, gold, budget)
    except GradingFailed:
        raise
    except Exception as error:  # a fault of the grader must not cost a training run
        logger.warning("Grading failed with %s; the answer counts as wrong.", type(error).__name__)
        return False


# What the comparisons of one call may take together, each a few milliseconds as a rule.
CALL_SECONDS, PAIR_SECONDS = 30.0, 0.1


def grade_many(predictions: Iterable[Any], golds: Iterable[Any]) -> list[bool | None]:
    """[`grade`] for pairs, as many at a time as there are worker processes; verdicts in the order given.

    `None` stands where there is no verdict: the workers died or stalled, or the time for the whole call ran out. A
    warning counts them, and asking again grades them."""
    pairs = list(zip(predictions, golds, strict=True))
    size = shared_pool().size
    budget = Budget(size * (CALL_SECONDS + PAIR_SECONDS * len(pairs)))
    failures: Counter[str] = Counter()

    def verdict(pair: tuple[Any, Any]) -> bool | None:
        try:
            return _grade(*pair, budget)
        except GradingFailed as failure:
            failures[str(failure)] += 1
            return None

    with ThreadPoolExecutor(size) as threads:
        verdicts = list(threads.map(verdict, pairs))
    if failures:
        reasons = "; ".join(f"{reason}: {count}" for reason, count in failures.items())
        logger.warning("No verdict on %d of %d answers (%s).", verdicts.count(None), len(pairs), reasons)
    return verdicts


def completion_text(completion: Any) -> Any:
    """The text of a completion in TRL's form: a string, or messages whose last one is the assistant's."""
    if isinstance(completion, list):
        return completion[-1].get("content") if completion else None
    return completion


def accuracy_reward(prompts: list, completions: list, answer: list, **kwargs: Any) -> list[float | None]:
    """
    Reward function for TRL: is the boxed answer right?

    Args:
        prompts (`list`): Not looked at.
        completions (`list`): Strings, or `[{"role": "assistant", "content": ...}]`.
        answer (`list`): The dataset's `answer` column.
        kwargs: Whatever else TRL passes.

    Returns:
        `list[float | None]`: 1.0 or 0.0; `None` (no reward) where a row has no answer, or grading it failed.
    """
    verdicts = grade_many([completion_text(completion) for completion in completions], answer)
    missing = [_gold_text(gold) is None or verdict is None for verdict, gold in zip(verdicts, answer, strict=True)]
    return [None if none else float(verdict) for verdict, none in zip(verdicts, missing)]
