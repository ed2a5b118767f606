"""Training-evaluation overlap (appendix "Training-Evaluation Contamination Audit").

Every text of every training record is compared with every benchmark problem: exactly, after both were brought to one
spelling, and by what they share, as candidates for a person to judge.

Departures from the paper, which retrieves by token trigrams alone:
- Shared trigrams are weighted by how rare they are, so that "Find the sum of all positive integers" counts little.
- Two more views are weighed in: rare single tokens (light rewording breaks most trigrams), and trigrams of the formulas
  alone (another language, or other words round the same numbers).
- Requests for a form of the answer ("... is in the form m/n, give m + n") do not count towards similarity; how the two
  answers are related is reported beside it.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..evaluation.benchmarks import row_answer, row_id
from ..evaluation.grading.latex import exact_number, normalize, squeeze
from ..files import read_jsonl
from ..triplets.record import PROBLEM_FIELDS
from .words import WORD, asked_tokens, tokens_of


@dataclass(frozen=True)
class Problem:
    """One text to compare. `field` says which of a record's texts it is."""

    id: str
    text: str
    answer: str | None = None
    field: str = "problem"


@dataclass
class Candidate:
    """
    A training text that may be a benchmark problem.

    Args:
        benchmark (`str`): Name of the benchmark.
        problem (`Problem`): The benchmark problem.
        train (`Problem`): The training text.
        similarity (`float`): In [0, 1]; 1 only for exact matches.
        exact (`bool`): The same after canonicalisation.
        answers (`str`): `"equal"`, `"re-encoded"` (the training answer is made of the parts of the benchmark's), or
            `"different"`; empty when one is missing.
        verdict (`str`): A person's: see `report.VERDICTS`.
    """

    benchmark: str
    problem: Problem
    train: Problem
    similarity: float
    exact: bool
    answers: str = ""
    verdict: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What a verdict goes by: benchmark, its problem's id, training id and field."""
        return self.benchmark, self.problem.id, self.train.id, self.train.field


@dataclass
class Audit:
    """Candidates by falling similarity within each benchmark, and the sizes behind them."""

    candidates: list[Candidate]
    benchmarks: dict[str, list[str]]
    records: int
    texts: int
    seconds: float = 0.0
    unknown_verdicts: int = field(default=0)


def read_train(paths: Iterable[str | Path]) -> list[Problem]:
    """
    All texts of training files: rows with `problem`, or triplet records.

    Args:
        paths (iterable of paths): JSONL files.

    Returns:
        `list[Problem]`: Up to three for a triplet record. A row whose id is taken gets its place behind the id.

    Raises:
        `FileNotFoundError`, `ValueError`: a missing file; a row without any of the fields.
    """
    texts, known_ids = [], set()
    for path in paths:
        for number, row in enumerate(_rows(path, "--train"), start=1):
            names = [
                name for name in ("problem", *PROBLEM_FIELDS) if isinstance(row.get(name), str) and row[name].strip()
            ]
            if not names:
                raise ValueError(
                    f"{path}, row {number} has neither `problem` nor {', '.join(PROBLEM_FIELDS)}; give bare problems "
                    "or triplet records."
                )
            answer = row_answer(row, f"{path}, row {number}")
            own_id = row_id(row, f"{Path(path).name}:{number}", f"{path}, row {number}")
            while own_id in known_ids:  # a verdict must say which row it is about
                own_id = f"{own_id} ({Path(path).name}:{number})"
            known_ids.add(own_id)
            for name in names:
                # Only the original's answer is known: a counterfactual has another one.
                known = answer if name in ("problem", *PROBLEM_FIELDS[:2]) else None
                texts.append(Problem(own_id, row[name], known, name))
    return texts


def read_benchmark(path: str | Path) -> list[Problem]:
    """The problems of a benchmark file (`id` where it has one, `problem`, `answer`)."""
    problems = []
    for number, row in enumerate(_rows(path, "--benchmark"), start=1):
        if not isinstance(row.get("problem"), str) or not row["problem"].strip():
            raise ValueError(f"{path}, row {number} has no `problem`; a benchmark row needs `problem` and `answer`.")
        answer = row_answer(row, f"{path}, row {number}")
        own_id = row_id(row, str(row.get("unique_id", number - 1)), f"{path}, row {number}")
        problems.append(Problem(own_id, row["problem"], answer))
    return problems


def _rows(path: str | Path, option: str) -> list[dict[str, Any]]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{option} {str(path)!r} does not exist; give a JSONL file.")
    rows = read_jsonl(path)
    if not rows:
        raise ValueError(f"{option} {str(path)!r} has no rows; give a JSONL file with one problem a line.")
    return rows


def trigrams(tokens: Sequence[str]) -> set[tuple[str, ...]]:
    """Runs of three tokens; a shorter text is one run."""
    if len(tokens) < 3:
        return {tuple(tokens)} if tokens else set()
    return set(zip(tokens, tokens[1:], tokens[2:]))


@dataclass(frozen=True)
class View:
    """
    One way to compare: a set of features, and what it counts for.

    `train_only` is what a feature that only the training text has costs: little, so that text added to a problem (a
    request for the answer's form) does not hide it. `unseen` is evidence to be outweighed, so that few shared
    features mean little.
    """

    name: str
    features: Callable[[Sequence[str]], set]
    weight: float
    train_only: float = 0.35
    unseen: float = 10.0


VIEWS = (
    View("trigrams", trigrams, 0.5),
    View("tokens", set, 0.3),
    View("formulas", lambda tokens: trigrams([token for token in tokens if not WORD.match(token)]), 0.2),
)


ROWS_AT_A_TIME = 4096


def similarities(train: Sequence[Sequence[str]], problems: Sequence[Sequence[str]]) -> np.ndarray:
    """
    How much each training text and each benchmark problem share.

    A Tversky index in each view, features weighted by inverse document frequency, then the views' weighted mean.

    Args:
        train (sequence of token lists): Training texts.
        problems (sequence of token lists): Benchmark problems.

    Returns:
        `numpy.ndarray` of shape `[len(train), len(problems)]`: fp32, in [0, 1].
    """
    total = np.zeros((len(train), len(problems)), dtype=np.float32)
    if not total.size:
        return total
    for view in VIEWS:
        train_sets = [view.features(tokens) for tokens in train]
        problem_sets = [view.features(tokens) for tokens in problems]
        frequency = Counter(feature for features in (*train_sets, *problem_sets) for feature in features)
        documents = len(train) + len(problems)
        # Features that no problem has only count towards a training text's own mass.
        index = {feature: number for number, feature in enumerate(set().union(*problem_sets))}
        weights = np.array([math.log((documents + 1) / frequency[feature]) for feature in index], dtype=np.float32)
        train_mass = np.array(
            [sum(math.log((documents + 1) / frequency[feature]) for feature in features) for features in train_sets],
            dtype=np.float32,
        )

        right = torch.zeros(len(index), len(problems))
        for column, features in enumerate(problem_sets):
            rows = [index[feature] for feature in features]
            right[rows, column] = torch.from_numpy(weights[rows])
        problem_mass = right.sum(dim=0).numpy()
        shared = np.zeros_like(total)
        for start in range(0, len(train), ROWS_AT_A_TIME):
            known = [
                [index[f] for f in features if f in index] for features in train_sets[start : start + ROWS_AT_A_TIME]
            ]
            flat = torch.tensor([column for row in known for column in sorted(row)], dtype=torch.int64)
            starts = torch.tensor([0, *(len(row) for row in known[:-1])]).cumsum(0)
            bags = torch.nn.functional.embedding_bag(flat, right, starts, mode="sum")
            shared[start : start + len(known)] = bags.numpy()
        union = shared + (problem_mass - shared) + view.train_only * (train_mass[:, None] - shared) + view.unseen
        total += view.weight * shared / union
    return np.clip(total, 0.0, 1.0)


def relate_answers(benchmark: str | None, train: str | None) -> str:
    """How two answers are related; see [`Candidate`]."""
    if not benchmark or not train:
        return ""
    plain = [re.sub(r"\^?\\degree|\\text ?\{.*?\}", "", normalize(text)).strip() for text in (benchmark, train)]
    numbers = [exact_number(text) for text in plain]
    if squeeze(plain[0]) == squeeze(plain[1]) or numbers[0] is not None and numbers[0] == numbers[1]:
        return "equal"
    parts = [int(part) for part in re.findall(r"\d+", plain[0])]
    if numbers[1] is not None and len(parts) > 1 and sum(parts) == abs(numbers[1]):
        return "re-encoded"
    return "different"


def check_limits(min_similarity: float, per_problem: int, at_least: int = 10) -> None:
    """
    Raise `ValueError` for a similarity outside [0, 1], fewer than 1 candidate per problem, or a negative number.

    Args:
        min_similarity (`float`): Least similarity of a candidate.
        per_problem (`int`): Most candidates of a problem.
        at_least (`int`): A number of problems.
    """
    if not 0 <= min_similarity <= 1:
        raise ValueError(f"`min_similarity` is {min_similarity}: choose a number in [0, 1].")
    if per_problem < 1:
        raise ValueError(f"`per_problem` is {per_problem}: choose at least 1 candidate text.")
    if at_least < 0:
        raise ValueError(f"`at_least` is {at_least}: choose 0 or more problems.")


def audit(
    train: Sequence[Problem],
    benchmarks: Mapping[str, Sequence[Problem]],
    min_similarity: float = 0.3,
    per_problem: int = 5,
    at_least: int = 10,
) -> Audit:
    """
    Compare all training texts with all benchmark problems.

    Args:
        train (sequence of [`Problem`]):
            Training texts; see [`read_train`].
        benchmarks (mapping from `str` to sequences of [`Problem`]):
            Benchmarks by name.
        min_similarity (`float`, *optional*, defaults to `0.3`):
            Least similarity of a candidate that is no exact match.
        per_problem (`int`, *optional*, defaults to `5`):
            Most different candidate texts for one benchmark problem, exact matches not counted.
        at_least (`int`, *optional*, defaults to `10`):
            Problems of each benchmark whose best candidate is shown however weak it is: a person then sees what the
            strongest look like.

    Returns:
        [`Audit`]

    Raises:
        `ValueError`: see [`check_limits`]; or a benchmark with two problems of one id.
    """
    check_limits(min_similarity, per_problem, at_least)
    for name, problems in benchmarks.items():
        twice = [id for id, count in Counter(problem.id for problem in problems).items() if count > 1]
        if twice:
            raise ValueError(f"Benchmark {name!r} has the id {twice[0]!r} twice; give each problem an id of its own.")
    train_tokens = [tokens_of(problem.text) for problem in train]
    canonical = [" ".join(tokens) for tokens in train_tokens]
    rows_of: dict[str, list[int]] = defaultdict(list)
    for row, text in enumerate(canonical):
        rows_of[text].append(row)
    # Each distinct text is compared once; its copies share the outcome.
    distinct = [rows[0] for rows in rows_of.values()]
    flat = [(name, problem) for name, problems in benchmarks.items() for problem in problems]
    problem_tokens = [tokens_of(problem.text) for _, problem in flat]
    scores = similarities(
        [asked_tokens(train[row].text, train_tokens[row]) for row in distinct],
        [asked_tokens(problem.text, tokens) for (_, problem), tokens in zip(flat, problem_tokens)],
    )

    candidates = []
    for column, (name, problem) in enumerate(flat):
        own = " ".join(problem_tokens[column])
        exact_rows = rows_of.get(own, []) if own else []
        best = np.argsort(-scores[:, column], kind="stable")[: per_problem + 1]
        found = [(row, 1.0, True) for row in exact_rows]
        near = [(at, float(scores[at, column])) for at in best if canonical[distinct[at]] != own][:per_problem]
        found += [(row, min(value, 0.999), False) for at, value in near for row in rows_of[canonical[distinct[at]]]]
        candidates += [
            Candidate(
                name,
                problem,
                train[row],
                round(similarity, 4),
                exact,
                relate_answers(problem.answer, train[row].answer),
            )
            for row, similarity, exact in found
        ]
    candidates = _worth_a_look(candidates, min_similarity, at_least)
    order = {name: number for number, name in enumerate(benchmarks)}
    candidates.sort(key=lambda c: (order[c.benchmark], -c.similarity, c.problem.id, c.train.id, c.train.field))
    ids = {name: [problem.id for problem in problems] for name, problems in benchmarks.items()}
    return Audit(candidates, ids, len({problem.id for problem in train}), len(train))


def _worth_a_look(candidates: list[Candidate], min_similarity: float, at_least: int) -> list[Candidate]:
    best: dict[str, dict[str, float]] = defaultdict(dict)
    for candidate in candidates:
        of_benchmark = best[candidate.benchmark]
        of_benchmark[candidate.problem.id] = max(of_benchmark.get(candidate.problem.id, 0.0), candidate.similarity)
    floor = {name: sorted(values.values(), reverse=True)[:at_least] for name, values in best.items()}
    return [
        candidate
        for candidate in candidates
        if candidate.similarity >= min_similarity
        or candidate.similarity
        == best[candidate.benchmark][candidate.problem.id]
        >= (floor[candidate.benchmark] or [1])[-1]
    ]


def summarize(result: Audit) -> dict[str, dict[str, Any]]:
    """
    The summary table (table "Training-evaluation overlap after manual verification").

    Args:
        result ([`Audit`]): An audit, with verdicts or without.

    Returns:
        `dict`: By benchmark: `size`, `exact` and `near` (numbers of benchmark problems; a problem with both counts as
            exact), `judged` and `to_judge` (candidates that are no exact match), `clean_size` and `clean_ids`. Without
            verdicts only exact matches are taken out.
    """
    table = {}
    for name, ids in result.benchmarks.items():
        own = [candidate for candidate in result.candidates if candidate.benchmark == name]
        exact = {candidate.problem.id for candidate in own if candidate.exact and candidate.verdict != "different"}
        near = {candidate.problem.id for candidate in own if candidate.verdict in ("same", "near")} - exact
        open_ones = sum(not candidate.exact and not candidate.verdict for candidate in own)
        table[name] = {
            "size": len(ids),
            "exact": len(exact),
            "near": len(near),
            "judged": sum(not candidate.exact for candidate in own) - open_ones,
            "to_judge": open_ones,
            "clean_size": len(ids) - len(exact | near),
            "exact_ids": sorted(exact),
            "near_ids": sorted(near),
            "clean_ids": [id for id in ids if id not in exact | near],
        }
    return table
