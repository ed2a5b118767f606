"""Triplet records (JSONL), and records with any other prompts, and how they become the trainer's dataset.

A triplet holds one problem three times: as it is, reworded, and with one condition changed. The text around a problem
that asks for the answer's format is not part of it: records hold bare problems, and the same template goes round all
of them when they are turned into prompts.
"""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import check_local, looks_like_path, read_rows
from ..prompts import DEFAULT_PROMPT_TEMPLATE, ORIGINAL, REWORDINGS, check_template, prompt_column, wrap_problem

if TYPE_CHECKING:
    import datasets

PROBLEM_FIELDS = tuple(f"{kind}_problem" for kind in (ORIGINAL, *REWORDINGS))
FLAGS = ("triplet_complete", "usable_for_training", "validation_passed")
# What a row keeps of a record beside its texts.
_PLAIN = ("answer", "id")


@dataclass
class AdapterReport:
    """How many records came in, how many became prompts, why the others left (each under its first reason)."""

    total: int = 0
    kept: int = 0
    dropped: Counter = field(default_factory=Counter)

    def __str__(self) -> str:
        reasons = "; ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())
        return f"{self.kept} of {self.total} records kept" + (f" (left out: {reasons})" if reasons else "")


def reason_to_drop(record: Mapping[str, Any]) -> str | None:
    """Why a record is unfit for training, or `None` when it is fit."""
    for flag in FLAGS:
        if record.get(flag) is not True:
            return f"without {flag}"
    for name in PROBLEM_FIELDS:
        if not isinstance(record.get(name), str) or not record[name].strip():
            return f"without {name}"
    return None


def _is_alone(record: Mapping[str, Any]) -> bool:
    """Whether a record claims to be no triplet."""
    return not any(name in record for name in (*PROBLEM_FIELDS[1:], *FLAGS))


def _variants(record: Mapping[str, Any], name: str, count: int) -> list[str]:
    """The record's own text and those of its alternates, at most `count` different ones."""
    alternates = record.get("alternates")
    alternates = [other for other in alternates if isinstance(other, Mapping)] if isinstance(alternates, list) else []
    texts = [record[name], *(other.get(name) for other in alternates)]
    return list(dict.fromkeys(text for text in texts if isinstance(text, str) and text.strip()))[:count]


def _prompts(record: Mapping[str, Any], what: str, made: Callable[[Any], Any]) -> dict[str, Any]:
    """What a record's `KIND_problem(s)` or `KIND_prompt(s)` (`what`) are `made` into, by dataset column."""
    found, forms = {}, str if what == "problem" else (str, list)
    for name, value in record.items():
        match = re.fullmatch(rf"(\w+)_{what}(s?)", name)
        if match and match[1] != ORIGINAL:
            several = [value] if not match[2] else value if isinstance(value, list) else []
            prompts = [made(one) for one in several if isinstance(one, forms) and one and str(one).strip()]
            if prompts:
                found[prompt_column(match[1]) + match[2]] = prompts if match[2] else prompts[0]
    return found


def to_row(
    record: Mapping[str, Any], template: str, conversational: bool, counterfactuals: int, paraphrases: int
) -> dict[str, Any]:
    """One record as a dataset row, see [`build_dataset`]; without a prompt where it holds none."""

    def turn(prompt):
        return [{"role": "user", "content": prompt}] if conversational and isinstance(prompt, str) else prompt

    def wrapped(problem: str):
        return turn(wrap_problem(problem, template))

    problems, prompts = _prompts(record, "problem", wrapped), _prompts(record, "prompt", turn)
    if _is_alone(record):
        bare = next((record[name] for name in ("problem", "original_problem", "question") if record.get(name)), None)
        given = record.get("prompt") or (wrap_problem(bare, template) if isinstance(bare, str) else None)
        row = {"prompt": turn(given) if given and str(given).strip() else None, **problems, **prompts}
    else:
        # What its texts differ in must be nothing but the problem, whatever other prompts it holds.
        row = {"prompt": wrapped(record["original_problem"]), **prompts, **problems}
        for kind, count in (("paraphrase", paraphrases), ("counterfactual", counterfactuals)):
            if count > 1:
                row[f"{kind}_prompts"] = [wrapped(text) for text in _variants(record, f"{kind}_problem", count)]
    row |= {name: None if record.get(name) is None else str(record[name]) for name in _PLAIN}
    # The picture of an answer lays it beside the solution.
    return row | {name: record[name] for name in ("solution", "teacher") if isinstance(record.get(name), str)}


def _is_unicode(row: Mapping[str, Any]) -> bool:
    """Whether UTF-8 can hold a row: JSON can spell half a character."""
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def build_dataset(
    records: Iterable[Mapping[str, Any]],
    template: str = DEFAULT_PROMPT_TEMPLATE,
    conversational: bool = True,
    counterfactuals: int = 1,
    paraphrases: int = 1,
) -> tuple[datasets.Dataset, AdapterReport]:
    """[`load_triplets`] of records that are read already."""
    import datasets  # takes two seconds, which those who make triplets need not wait

    check_template(template)
    for name, count in (("counterfactuals", counterfactuals), ("paraphrases", paraphrases)):
        if count < 1:
            raise ValueError(f"`{name}` must be at least 1, got {count}.")
    report = AdapterReport()
    rows, alike = [], []
    for record in records:
        report.total += 1
        alone, row = _is_alone(record), {}
        reason = None if alone else reason_to_drop(record)
        if reason is None:
            row = to_row(record, template, conversational, counterfactuals, paraphrases)
            reason = None if row["prompt"] else "without prompt or problem"
            if not alone and len({" ".join(record[name].split()) for name in PROBLEM_FIELDS}) == 1:
                alike.append(str(record.get("id", f"number {report.total}")))
        if not _is_unicode(row):
            reason = "with half a character (a lone surrogate)"
        if reason:
            report.dropped[reason] += 1
        else:
            rows.append(row)
    report.kept = len(rows)
    if not rows:
        raise ValueError(
            f"No record is fit for training: {report}; a record needs a `prompt` or a `problem`, and a triplet the "
            f"texts {', '.join(PROBLEM_FIELDS)}, and {', '.join(FLAGS)} set to true."
        )
    if alike:
        warnings.warn(
            f"{len(alike)} of {len(rows)} triplets have the same text three times ({alike[0]} first): all scores "
            "of CROP are 0 there. Mend or drop them.",
            stacklevel=2,
        )
    columns = dict.fromkeys(name for row in rows for name in row)
    return datasets.Dataset.from_list([{name: row.get(name) for name in columns} for row in rows]), report


def load_records(
    source: str,
    split: str = "train",
    setting: str = "dataset_name",
    config: str | None = None,
    revision: str | None = None,
) -> list[dict[str, Any]]:
    """Triplet records, or other rows, of a JSONL, JSON, CSV or Parquet file or a hub dataset, whose `split`, `config`
    and `revision` the rest says; errors name `setting`."""
    if is_local(source, setting, config, revision):
        rows = read_rows(source)
        for row in rows if Path(source).suffix.lower() == ".csv" else ():
            row |= {flag: row[flag].lower() == "true" for flag in FLAGS if row.get(flag)}
        return rows
    import datasets

    try:
        return list(datasets.load_dataset(source, config, split=split, revision=revision))
    except (OSError, ValueError) as error:
        # The first two lines: the second has the configurations to choose from.
        reason = " ".join(str(error).split("\n")[:2]) or type(error).__name__
        raise ValueError(
            f"`{setting}` {source!r} is no file here, and no dataset of that name can be loaded from the hub "
            f"({reason})."
        ) from error


def is_local(source: str, setting: str, config: str | None = None, revision: str | None = None) -> bool:
    """Whether rows come from a file and not from the hub. Raises for what can be neither, see [`load_records`]."""
    of_hub = setting.removesuffix("_name")
    check_local(source, **{f"{of_hub}_config": config, f"{of_hub}_revision": revision})
    if Path(source).is_dir():
        raise ValueError(f"`{setting}` {source!r} is a folder; give the file in it.")
    if looks_like_path(source) and not Path(source).is_file():
        raise FileNotFoundError(f"`{setting}` {source!r} does not exist; give a file or a hub dataset's name.")
    return Path(source).is_file()


def load_triplets(
    source: str,
    split: str = "train",
    template: str = DEFAULT_PROMPT_TEMPLATE,
    conversational: bool = True,
    counterfactuals: int = 1,
    paraphrases: int = 1,
    config: str | None = None,
    revision: str | None = None,
    setting: str = "dataset_name",
) -> tuple[datasets.Dataset, AdapterReport]:
    """
    Read records and turn them into the trainer's columns.

    A triplet stays if its three flags are all true. Any other record stays with a `problem`, or a `prompt`, which is
    not wrapped. Beside it, `NAME_problem` or `NAME_prompt` becomes the column `NAME_prompt`, and a list of them,
    `NAME_problems` or `NAME_prompts`, the column `NAME_prompts`.

    Args:
        source (`str`): A JSONL, JSON, CSV or Parquet file, or a hub dataset's name.
        split (`str`): Of a hub dataset.
        template (`str`): Answer-format wrapper holding `{problem}` once, put round all problems alike.
        conversational (`bool`): Prompts as chat messages, a single user turn, or as plain text.
        counterfactuals, paraphrases (`int`):
            How many of each to use at most; beyond the first they come from a record's `alternates`, and the row has
            the plural column too.
        config, revision (`str`): Of a hub dataset: its configuration, and a branch, tag or commit.
        setting (`str`): What errors call `source`.

    Returns:
        The dataset and an [`AdapterReport`].

    Raises:
        `FileNotFoundError`: `source` looks like a path and no such file exists.
        `ValueError`: nothing that can be read, a template without `{problem}`, a count below 1, or no record fit for
        training; the message says why each record left.
    """
    records = load_records(source, split, setting, config, revision)
    return build_dataset(records, template, conversational, counterfactuals, paraphrases)
