"""The problems that triplets are made of: reading them, taking wrappers off, screening."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..prompts import DEFAULT_PROMPT_TEMPLATE, unwrap_problem
from .domain import Domain
from .latex import mend_problem
from .record import load_records
from .settings import TripletSettings

# DAPO-Math-17k, as published on the hub, wraps every problem in this.
DAPO_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
KNOWN_WRAPPERS = (DEFAULT_PROMPT_TEMPLATE, DAPO_TEMPLATE)
_COLUMNS = ("problem", "id", "answer")


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # Unicode category Cc without tab and newline
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")  # JSON can carry one ("\\ud83d"), UTF-8 cannot


def folded(text: str) -> str:
    """A text whose white space does not matter."""
    return " ".join(text.split())


def unclean_reason(text: str) -> str | None:
    """`empty`, `control_characters` or `invalid_unicode` for a text that cannot be a problem, else `None`."""
    if not text.strip():
        return "empty"
    if _CONTROL.search(text):
        return "control_characters"
    return "invalid_unicode" if _LONE_SURROGATE.search(text) else None


@dataclass(frozen=True)
class Problem:
    """One problem. `excluded`: why no triplet is made of it, a reason of [`unclean_reason`] or `not_text`."""

    id: str
    text: str
    answer: str | None = None
    excluded: str | None = None
    mended: bool = False  # LaTeX commands had lost their backslash


@dataclass
class ProblemSet:
    """The problems of a run, in the order of the input; what repeats in them; what the user should look at."""

    problems: list[Problem]
    duplicates: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_problems(settings: TripletSettings, domain: Domain) -> ProblemSet:
    """Read and screen the input of `settings`; what cannot work is a `ValueError`, or a `FileNotFoundError`."""
    if not settings.input:
        raise ValueError("`input` is empty; give one or more JSONL files, or a hub dataset's name.")
    hub = (settings.split, "input", settings.input_config, settings.input_revision)
    rows = [row for source in settings.input for row in load_records(source, *hub)]
    if settings.limit is not None:
        rows = rows[: settings.limit]
    if not rows:
        raise ValueError(f"`input` {', '.join(settings.input)} holds no rows; give files with one problem a line.")
    wrappers = [w for w in (settings.input_template, *KNOWN_WRAPPERS) if w]
    for setting, usual in (("id_column", "id"), ("answer_column", "answer")):
        column = getattr(settings, setting)
        if column != usual and all(_cell(row, column) is None for row in rows):
            raise ValueError(
                f"`{setting}` {column!r} is in no row of `input` ({_columns(rows[0])}); name one, or none."
            )
    problems = [_problem(number, row, settings, wrappers, domain) for number, row in enumerate(rows)]
    problem_set = ProblemSet(problems)
    _find_duplicates(problem_set, settings.deduplicate, domain)
    # Copies of a row, as DAPO-Math-17k is published with, are left out before.
    twice = [id for id, count in Counter(problem.id for problem in problem_set.problems).items() if count > 1]
    if twice:
        raise ValueError(
            f"`id_column` {settings.id_column!r} gives two rows the id {twice[0]!r}; make ids unique, or leave out "
            "copies of a row by `deduplicate`."
        )
    mended = [problem.id for problem in problem_set.problems if problem.mended]
    if mended:
        problem_set.notes.append(
            f"{len(mended):,} problems had LaTeX commands without their backslash, such as a tab and `imes`; mended: "
            f"{', '.join(mended[:20])}{', ...' if len(mended) > 20 else ''}."
        )
    return problem_set


def _problem(
    number: int, row: Mapping[str, Any], settings: TripletSettings, wrappers: Iterable[str], domain: Domain
) -> Problem:
    cell, identifier, answer = (_cell(row, getattr(settings, f"{what}_column")) for what in _COLUMNS)
    for what, found in zip(_COLUMNS, (cell, identifier, answer)):
        # A problem may stand in a list, of chat messages.
        if isinstance(found, Mapping) or isinstance(found, list) and what != "problem":
            column = getattr(settings, f"{what}_column")
            inside = f", such as `{column}.{next(iter(found))}`" if isinstance(found, Mapping) and found else ""
            raise ValueError(
                f"`{what}_column` {column!r} holds a {type(found).__name__} in row {number + 1} of `input`; name a "
                f"column that holds a text or a number{inside}."
            )
    if cell is None and settings.problem_column not in row:
        raise ValueError(
            f"`problem_column` {settings.problem_column!r} is missing in row {number + 1} of `input` "
            f"({_columns(row)}); name the column that holds the problem."
        )
    written = _text(cell)
    text = written or ""
    for wrapper in wrappers:
        text = unwrap_problem(text, wrapper)
    # Screened before white space is stripped, since str.strip() takes some control characters with it.
    excluded = "not_text" if written is None else unclean_reason(text)
    mended = text if excluded or not domain.latex else mend_problem(text)
    return Problem(
        id=f"row_{number:06d}" if identifier is None else str(identifier),
        text=text if excluded else mended.strip(),
        answer=None if answer is None else str(answer),
        excluded=excluded,
        mended=mended != text,
    )


def _cell(row: Mapping[str, Any], column: str) -> Any:
    """What a row has in a column, in whose name dots may reach into mappings."""
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _columns(row: Mapping[str, Any]) -> str:
    return f"it has {', '.join(sorted(map(str, row)))}"


def _text(value: Any) -> str | None:
    if isinstance(value, list):  # chat messages, as hub datasets for TRL and verl have them
        turns = [m.get("content") for m in value if isinstance(m, Mapping) and m.get("role") == "user"]
        value = turns[-1] if turns else None
    return value if isinstance(value, str) else None


def duplicates_line(duplicates: Mapping[str, Any]) -> str:
    """What became of repeated problems, in one sentence."""
    rows, identical = duplicates["rows"], duplicates["identical"]
    if not rows:
        return "No row repeats the text of another."
    handling = f"{identical:,} of them to the letter, which is asked once; {rows - identical:,} but for white space"
    return (
        f"{rows:,} rows repeat the text of an earlier one ({'left out' if duplicates['left_out'] else handling}), "
        f"{duplicates['conflicting_answers']:,} texts have more than one answer."
    )


def _find_duplicates(problem_set: ProblemSet, leave_out: bool, domain: Domain) -> None:
    groups: dict[str, list[Problem]] = defaultdict(list)
    for problem in problem_set.problems:
        if problem.excluded not in ("not_text", "empty"):
            groups[folded(problem.text)].append(problem)
    repeated = [group for group in groups.values() if len(group) > 1]
    problem_set.duplicates = {
        "rows": sum(len(group) - 1 for group in repeated),
        "identical": sum(len(group) - len({problem.text for problem in group}) for group in repeated),
        "conflicting_answers": sum(len({domain.folded_answer(p.answer) for p in group}) > 1 for group in repeated),
        "left_out": leave_out,
    }
    if leave_out:
        later = {id(problem) for group in repeated for problem in group[1:]}
        problem_set.problems = [problem for problem in problem_set.problems if id(problem) not in later]
