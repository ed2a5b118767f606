"""Training-evaluation overlap (appendix "Training-Evaluation Contamination Audit").

Departures from the paper, which retrieves by token trigrams alone: trigrams are weighted by how rare they are; rare
single tokens and trigrams of the formulas alone are weighed in; requests for a form of the answer do not count, how the
two answers are related is reported instead."""

import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ..evaluation.benchmarks import load_benchmark, row_answer, row_id
from ..evaluation.grading.latex import normalize, squeeze
from ..evaluation.grading.numerals import exact_number
from ..files import iterate_jsonl, read_rows
from ..triplets.record import FLAGS, PROBLEM_FIELDS
from .similarity import Texts, most_similar
from .words import asked_tokens, tokens_of

# The best text of a problem is shown from a lower similarity on when it stands out by so much from the third.
STANDS_OUT = 1.5
PER_PROBLEM = 5  # texts of a problem that are shown


@dataclass(frozen=True, slots=True)
class ProblemText:
    """One text to compare. `field` says which of a record's texts it is."""

    id: str
    text: str
    answer: str | None = None
    field: str = "problem"


@dataclass
class Pair:
    """A training text that may be a benchmark problem."""

    benchmark: str
    problem: ProblemText
    train: ProblemText
    similarity: float  # in [0, 1]; 1 only for exact matches
    exact: bool  # the same after canonicalisation
    answers: str = ""  # see `relate_answers`
    verdict: str = ""  # a person's: see `report.VERDICTS`

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What a verdict goes by: benchmark, its problem's id, training id and field."""
        return self.benchmark, self.problem.id, self.train.id, self.train.field


@dataclass
class Audit:
    """Candidates by falling similarity within each benchmark, and the sizes behind them."""

    candidates: list[Pair]
    benchmarks: dict[str, list[str]]
    records: int
    texts: int
    seconds: float = 0.0
    unknown_verdicts: int = 0


def read_train(paths: Iterable[str | Path]) -> list[ProblemText]:
    """All texts of training files: rows with `problem`, or triplet records that their flags let be trained on."""
    texts, known_ids = [], set()
    for path in paths:
        if not Path(path).is_file():
            raise FileNotFoundError(f"--train {str(path)!r} does not exist; give a JSONL, CSV or Parquet file.")
        left_out = number = 0
        rows = iterate_jsonl(path) if Path(path).suffix == ".jsonl" else read_rows(path)
        for number, row in enumerate(rows, start=1):
            if any(str(row.get(flag)).lower() == "false" for flag in FLAGS):
                left_out += 1
                continue
            fields = ("problem", *PROBLEM_FIELDS)
            names = [name for name in fields if isinstance(row.get(name), str) and row[name].strip()]
            if not names:
                raise ValueError(f"{path}, row {number} has neither `problem` nor {', '.join(PROBLEM_FIELDS)}.")
            answer = row_answer(row, f"{path}, row {number}")
            own_id = row_id(row, f"{Path(path).name}:{number}", f"{path}, row {number}")
            while own_id in known_ids:  # a verdict must say which row it is about
                own_id = f"{own_id} ({Path(path).name}:{number})"
            known_ids.add(own_id)
            # Only the original's answer is known: a counterfactual has another one.
            texts += [
                ProblemText(own_id, row[name], None if name == PROBLEM_FIELDS[2] else answer, name) for name in names
            ]
        if left_out == number:
            raise ValueError(f"--train {str(path)!r} has no record that training would take; give another file.")
        if left_out:
            print(f"{left_out:,} of {number:,} records of {path} did not pass: not trained on, so not compared.")
    return texts


def read_benchmark(name: str, file: str | Path) -> list[ProblemText]:
    """The problems of a benchmark file, see [`~crop_trl.evaluation.benchmarks.load_benchmark`]."""
    examples = load_benchmark(f"{name}={file}", answered=False).examples
    return [ProblemText(example.id, example.problem, example.answer) for example in examples]


def relate_answers(benchmark: str | None, train: str | None) -> str:
    """`"equal"`, `"re-encoded"` (made of the parts of the benchmark's), `"different"`, or empty when one is missing."""
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


def _key(tokens: Sequence[str]) -> bytes:
    return blake2b(" ".join(tokens).encode(), digest_size=16).digest()


def audit(
    train: Sequence[ProblemText],
    benchmarks: Mapping[str, Sequence[ProblemText]],
    min_similarity: float = 0.3,
    at_least: int = 10,
) -> Audit:
    """Compare all training texts with all benchmark problems.

    Candidates are exact matches; of each problem the five best different texts from `min_similarity` on, and the best
    one from half of it on where it stands out; and the best of the `at_least` strongest problems of a benchmark."""
    # Each distinct text is compared once; its copies share the outcome.
    vocabulary: dict[str, int] = {}
    compared, asked, of_row = Texts(vocabulary), Texts(vocabulary), array("i")
    places_of: dict[bytes, int] = {}
    for text in train:
        tokens = tokens_of(text.text)
        of_row.append(places_of.setdefault(_key(tokens), len(places_of)))
        if len(compared) < len(places_of):
            compared.add(asked_tokens(text.text, tokens))
    flat, exact = [(name, problem) for name, problems in benchmarks.items() for problem in problems], []
    for _, problem in flat:
        tokens = tokens_of(problem.text)
        exact.append(places_of.get(_key(tokens), -1) if tokens else -1)
        asked.add(asked_tokens(problem.text, tokens))
    places, similarities = most_similar(compared, asked, PER_PROBLEM + 1)
    rows_of: dict[int, list[int]] = {place: [] for place in {*places.flat, *exact}}
    for row, place in enumerate(of_row):
        if place in rows_of:
            rows_of[place].append(row)

    listed: list[tuple[Pair, bool]] = []
    for (name, problem), own, *ranked in zip(flat, exact, places, similarities, strict=True):
        near = [(place, float(value)) for place, value in zip(*ranked) if place not in (own, -1)]
        standing_out = max(min_similarity / 2, STANDS_OUT * near[2][1] if len(near) > 2 else 0.0)
        found = [(row, 1.0, True, True) for row in rows_of[own]]
        for rank, (place, value) in enumerate(near[:PER_PROBLEM]):
            strong = value >= min_similarity or (rank == 0 and value >= standing_out)
            found += [(row, min(value, 0.999), False, strong) for row in rows_of[place]]
        for row, value, is_exact, strong in found:
            answers = relate_answers(problem.answer, train[row].answer)
            listed.append((Pair(name, problem, train[row], round(value, 4), is_exact, answers), strong))
    candidates = _worth_a_look(listed, at_least)
    order = {name: number for number, name in enumerate(benchmarks)}
    candidates.sort(key=lambda c: (order[c.benchmark], -c.similarity, c.problem.id, c.train.id, c.train.field))
    ids = {name: [problem.id for problem in problems] for name, problems in benchmarks.items()}
    return Audit(candidates, ids, len({text.id for text in train}), len(train))


def _worth_a_look(listed: list[tuple[Pair, bool]], at_least: int) -> list[Pair]:
    """The strong ones, and the best of the strongest problems of each benchmark."""
    best: dict[str, dict[str, float]] = defaultdict(dict)
    for pair, _ in listed:
        of_benchmark = best[pair.benchmark]
        of_benchmark[pair.problem.id] = max(of_benchmark.get(pair.problem.id, 0.0), pair.similarity)
    floor = {name: (sorted(values.values(), reverse=True)[:at_least] or [1])[-1] for name, values in best.items()}
    return [
        pair
        for pair, strong in listed
        if strong or pair.similarity == best[pair.benchmark][pair.problem.id] >= floor[pair.benchmark]
    ]


def summarize(result: Audit) -> dict[str, dict[str, Any]]:
    """The summary table by benchmark; without verdicts only exact matches leave the clean set."""
    table = {}
    for name, ids in result.benchmarks.items():
        own = [pair for pair in result.candidates if pair.benchmark == name]
        exact = {pair.problem.id for pair in own if pair.exact and pair.verdict != "different"}
        near = {pair.problem.id for pair in own if pair.verdict in ("same", "near")} - exact
        open_ones = sum(not pair.exact and not pair.verdict for pair in own)
        table[name] = {
            "size": len(ids),
            "exact": len(exact),
            "near": len(near),
            "judged": sum(not pair.exact for pair in own) - open_ones,
            "to_judge": open_ones,
            "clean_size": len(ids) - len(exact | near),
            "exact_ids": sorted(exact),
            "near_ids": sorted(near),
            "clean_ids": [id for id in ids if id not in exact | near],
        }
    return table
