"""Triplet records (JSONL) and how they become the trainer's dataset.

A record holds one problem three times: as it is, reworded, and with one condition changed. The text around a problem
that asks for the answer's format is not part of it: records hold bare problems, and the same template goes round all
three when they are turned into prompts.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import looks_like_path, read_rows
from ..prompts import DEFAULT_PROMPT_TEMPLATE, PROMPT_COLUMNS, check_template, wrap_problem

if TYPE_CHECKING:
    import datasets

PROBLEM_FIELDS = tuple(f"{kind}_problem" for kind in PROMPT_COLUMNS)
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


def _prompt_row(record: Mapping[str, Any], template: str, conversational: bool) -> dict[str, Any] | None:
    """A record without a triplet as a dataset row: a `prompt` as it is, or a problem in the wrapper."""
    problem = next((record[name] for name in ("problem", "original_problem", "question") if record.get(name)), None)
    prompt = record.get("prompt") or (wrap_problem(problem, template) if isinstance(problem, str) else None)
    if isinstance(prompt, str) and not prompt.strip() or not prompt:
        return None
    if isinstance(prompt, str) and conversational:
        prompt = [{"role": "user", "content": prompt}]
    return {"prompt": prompt, **{name: None if record.get(name) is None else str(record[name]) for name in _PLAIN}}


def _variants(record: Mapping[str, Any], name: str, count: int) -> list[str]:
    """The record's own text and those of its alternates, at most `count` different ones."""
    alternates = record.get("alternates")
    alternates = [other for other in alternates if isinstance(other, Mapping)] if isinstance(alternates, list) else []
    texts = [record[name], *(other.get(name) for other in alternates)]
    return list(dict.fromkeys(text for text in texts if isinstance(text, str) and text.strip()))[:count]


def to_row(
    record: Mapping[str, Any], template: str, conversational: bool, counterfactuals: int, paraphrases: int
) -> dict[str, Any]:
    """One record as a dataset row, see [`build_dataset`]."""

    def prompt(problem: str):
        text = wrap_problem(problem, template)
        return [{"role": "user", "content": text}] if conversational else text

    row: dict[str, Any] = {
        column: prompt(record[name]) for column, name in zip(PROMPT_COLUMNS.values(), PROBLEM_FIELDS, strict=True)
    }
    for kind, count in (("paraphrase", paraphrases), ("counterfactual", counterfactuals)):
        if count > 1:
            texts = _variants(record, f"{kind}_problem", count)
            row[f"{PROMPT_COLUMNS[kind]}s"] = [prompt(text) for text in texts]
    for name in _PLAIN:
        row[name] = None if record.get(name) is None else str(record[name])
    return row


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
    prompts_alone: bool = False,
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
        if prompts_alone and _is_alone(record):
            row = _prompt_row(record, template, conversational)
            reason = None if row else "without prompt or problem"
        else:
            reason = reason_to_drop(record)
            row = None if reason else to_row(record, template, conversational, counterfactuals, paraphrases)
            if row and len({" ".join(record[name].split()) for name in PROBLEM_FIELDS}) == 1:
                alike.append(str(record.get("id", f"number {report.total}")))
        if row is not None and not _is_unicode(row):
            reason = "with half a character (a lone surrogate)"
        if reason:
            report.dropped[reason] += 1
        else:
            rows.append(row)
    report.kept = len(rows)
    if not rows:
        raise ValueError(
            f"No triplet is fit for training: {report}; a record needs the texts {', '.join(PROBLEM_FIELDS)}, and "
            f"{', '.join(FLAGS)} set to true."
        )
    if alike:
        warnings.warn(
            f"{len(alike)} of {len(rows)} triplets have the same text three times ({alike[0]} first): all scores "
            "of CROP are 0 there. Mend or drop them.",
            stacklevel=2,
        )
    return datasets.Dataset.from_list(rows), report


def load_records(
    source: str,
    split: str = "train",
    setting: str = "dataset_name",
    config: str | None = None,
    revision: str | None = None,
) -> list[dict[str, Any]]:
    """
    Triplet records, or other rows, of a JSONL, JSON, CSV or Parquet file or a hub dataset, whose `split`, `config` and
    `revision` the rest says; errors name `setting`.
    """
    path = Path(source)
    if path.is_file():
        rows = read_rows(path)
        for row in rows if path.suffix.lower() == ".csv" else ():
            row |= {flag: row[flag].lower() == "true" for flag in FLAGS if row.get(flag)}
        return rows
    if path.is_dir():
        raise ValueError(f"`{setting}` {source!r} is a folder; give the file in it.")
    if looks_like_path(source):
        raise FileNotFoundError(f"`{setting}` {source!r} does not exist; give a file or a hub dataset's name.")
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


def load_triplets(
    source: str,
    split: str = "train",
    template: str = DEFAULT_PROMPT_TEMPLATE,
    conversational: bool = True,
    counterfactuals: int = 1,
    paraphrases: int = 1,
    prompts_alone: bool = False,
    config: str | None = None,
    revision: str | None = None,
) -> tuple[datasets.Dataset, AdapterReport]:
    """
    Read triplet records and turn those whose three flags are all true into the trainer's columns.

    Args:
        source (`str`): A JSONL, JSON, CSV or Parquet file, or a hub dataset's name.
        split (`str`): Of a hub dataset.
        template (`str`): Answer-format wrapper holding `{problem}` once, put round all problems alike.
        conversational (`bool`): Prompts as chat messages, a single user turn, or as plain text.
        counterfactuals, paraphrases (`int`):
            How many of each to use at most; beyond the first they come from a record's `alternates`, and the row has
            the plural column too.
        prompts_alone (`bool`):
            Whether to take records that are no triplets at all as well, with a `problem` (or a `prompt`, which is not
            wrapped): enough for methods that read nothing else, and for evaluation.
        config, revision (`str`): Of a hub dataset: its configuration, and a branch, tag or commit.

    Returns:
        The dataset and an [`AdapterReport`].

    Raises:
        `FileNotFoundError`: `source` looks like a path and no such file exists.
        `ValueError`: nothing that can be read, a template without `{problem}`, a count below 1, or no record fit for
        training; the message says why each record left.
    """
    records = load_records(source, split, config=config, revision=revision)
    return build_dataset(records, template, conversational, counterfactuals, paraphrases, prompts_alone)
