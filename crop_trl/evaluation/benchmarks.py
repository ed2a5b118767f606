"""The benchmarks of section "Evaluation", and any JSONL file with `problem` and `answer`."""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..files import read_object, read_rows, write_jsonl
from .grading.verdict import extract_boxed

# The eight problems that the paper's audit takes out (table "Verified MATH-500 overlaps"), by MATH's own ids.
MATH_500_OVERLAPS = frozenset(row["unique_id"] for row in read_rows(Path(__file__).with_name("math_500_overlaps.csv")))


@dataclass(frozen=True)
class Source:
    """A benchmark's hub dataset, its samples per problem and the seed of the first; the others count up."""

    dataset: str | None
    split: str = "test"
    samples: int = 8
    base_seed: int = 1000


NAMED: dict[str, Source] = {
    "AIME24": Source("math-ai/aime24"),
    "AIME25": Source("math-ai/aime25"),
    "AMC23": Source("math-ai/amc23"),
    "MATH-500": Source("HuggingFaceH4/MATH-500", samples=4, base_seed=5000),
}
CLEAN, MATH_500 = "-Clean", "MATH-500"


@dataclass(frozen=True)
class Example:
    """One problem: its id, bare text and right answer; `unique_id` is MATH's own, where a row has it."""

    id: str
    problem: str
    answer: str | None
    unique_id: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """Problems, and how many samples of each are drawn from which seed on; `store` names their generations."""

    name: str
    examples: tuple[Example, ...]
    samples: int
    base_seed: int
    store: str

    @property
    def seeds(self) -> list[int]:
        """Seeds of the samples of a problem, one each."""
        return [self.base_seed + index for index in range(self.samples)]

    @property
    def fingerprint(self) -> str:
        """Changes when a problem changes, so that a resumed run cannot mix two versions of a benchmark."""
        texts = json.dumps([(example.id, example.problem) for example in self.examples])
        return hashlib.sha256(texts.encode()).hexdigest()[:16]


def row_id(row: Mapping[str, Any], default: str, where: str) -> str:
    """The `id` of a row as text, `default` when it has none. Raises `ValueError` for what is no text or number."""
    id = default if row.get("id") is None else row["id"]
    if not isinstance(id, str | int | float):
        raise ValueError(f"{where} has an `id` that is a {type(id).__name__}; make it text or a number.")
    return str(id)


def row_answer(row: Mapping[str, Any], where: str) -> str | None:
    """The `answer` of a row as text, `None` when it has none. Raises `ValueError` for what is no text or number."""
    answer = row.get("answer")
    if answer is None:
        return None
    if not isinstance(answer, str | int | float) or answer != answer:
        raise ValueError(f"{where} has an `answer` that is {str(answer)[:50]!r}; make it text or a number.")
    return str(int(answer) if isinstance(answer, float) and answer.is_integer() else answer).strip()


def example_from_row(row: Mapping[str, Any], number: int, where: str, answered: bool = True) -> Example:
    """A row with `problem`, `original_problem` or `question`, and `answer` or a `solution` with a box; unless it is to
    be `answered`, it may lack these."""
    place = f"{where}, row {number + 1}"
    problem = next((row[name] for name in ("problem", "original_problem", "question") if row.get(name)), None)
    if not isinstance(problem, str) or not problem.strip():
        raise ValueError(f"{place} has no `problem` (nor `original_problem`, `question`); give it one.")
    answer = row_answer(row, place)
    if answer is None and isinstance(row.get("solution"), str):
        answer = (extract_boxed(row["solution"]) or row["solution"]).strip()
    if answered and not answer:
        raise ValueError(f"{place} has no `answer`; a benchmark needs one for each problem.")
    # A lone surrogate can be sent to no server or tokenizer.
    problem = problem.encode("utf-8", "replace").decode()
    unique_id = None if row.get("unique_id") is None else str(row["unique_id"])
    return Example(row_id(row, unique_id or str(number), place), problem, answer, unique_id)


def load_benchmark(
    spec: str, samples: int | None = None, base_seed: int | None = None, answered: bool = True
) -> Benchmark:
    """A benchmark by its name (`AIME24`, `AIME25`, `AMC23`, `MATH-500`, `MATH-500-Clean`), from `NAME=FILE` (problems
    from a file, for a known name with its settings) or from a JSONL file. `samples` and `base_seed` take the place of
    its own; unless `answered`, answers may lack. Raises `ValueError` or `FileNotFoundError` for what is none."""
    if samples is not None and samples < 1:
        raise ValueError(f"`samples` is {samples}: choose at least 1 per problem.")
    name, _, file = spec.partition("=")
    if "=" in spec and not (name.strip() and file):
        raise ValueError(f"`--benchmark` {spec!r} is not NAME=FILE, for example AIME24=aime24.jsonl.")
    if not file and spec.endswith((".jsonl", ".json")):
        name, file = Path(spec).stem, spec
    clean = name == MATH_500 + CLEAN
    whole = MATH_500 if clean else name
    if not file and whole not in NAMED:
        known = ", ".join([*NAMED, MATH_500 + CLEAN])
        raise ValueError(f"`--benchmark` {spec!r} is unknown: choose {known}, NAME=FILE or a JSONL file.")
    source = NAMED.get(whole, Source(None))
    examples = _read(whole, source, file, answered)
    twice = [id for id, count in Counter(example.id for example in examples).items() if count > 1]
    if twice:
        raise ValueError(f"Benchmark {name!r} has the id {twice[0]!r} twice; give each problem an id of its own.")
    benchmark = Benchmark(
        name=whole,
        examples=tuple(examples),
        samples=samples or source.samples,
        base_seed=source.base_seed if base_seed is None else base_seed,
        store=whole,
    )
    return math_500_clean(benchmark) if clean else benchmark


def local_copy(name: str, folder: Path) -> Path:
    """A file with a benchmark of [`NAMED`] under the ids of evaluation, made from the hub if it is not there."""
    file = folder / f"{name}.jsonl"
    if not file.exists():
        rows = [asdict(example) for example in load_benchmark(name).examples]
        folder.mkdir(parents=True, exist_ok=True)
        write_jsonl(file, ({key: value for key, value in row.items() if value is not None} for row in rows))
    return file


def _read(name: str, source: Source, file: str, answered: bool) -> list[Example]:
    if file:
        if not Path(file).is_file():
            raise FileNotFoundError(f"`--benchmark` {name!r}: {file!r} does not exist; give a file of problems.")
        rows, where = read_rows(file), file
    else:
        import datasets

        try:
            rows, where = list(datasets.load_dataset(source.dataset, split=source.split)), source.dataset
        except Exception as error:  # the hub's errors have no common base
            why = f"could not be loaded from {source.dataset!r} ({type(error).__name__})"
            raise ValueError(f"`--benchmark` {name!r} {why}; give a local copy as {name}=FILE.") from None
    if not rows:
        raise ValueError(f"`--benchmark` {name!r}: {where} has no rows; give a file with one problem a line.")
    return [example_from_row(row, number, where, answered) for number, row in enumerate(rows)]


def without(benchmark: Benchmark, ids: Sequence[str] | frozenset[str]) -> Benchmark:
    """The clean subset of a benchmark: the same generations, fewer problems."""
    taken = set(ids)
    return replace(
        benchmark,
        name=benchmark.name + CLEAN,
        examples=tuple(example for example in benchmark.examples if not taken & {example.id, example.unique_id}),
    )


def math_500_clean(benchmark: Benchmark) -> Benchmark:
    """MATH-500 without the eight problems of the paper's audit. Raises `ValueError` where not all are there."""
    missing = MATH_500_OVERLAPS - {id for example in benchmark.examples for id in (example.id, example.unique_id)}
    if missing:
        raise ValueError(
            f"{MATH_500 + CLEAN} leaves out eight problems by MATH's `unique_id`, and these rows lack {len(missing)} "
            f"of them ({min(missing)!r} first); take all of {NAMED[MATH_500].dataset!r} from the hub, or give each row "
            "its `unique_id`."
        )
    return without(benchmark, MATH_500_OVERLAPS)


def clean_subsets(file: str | None, loaded: Sequence[Benchmark]) -> list[Benchmark]:
    """What an audit (`clean_ids.json`) left of each benchmark, and by default the paper's of MATH-500."""
    subsets = _audited(file, loaded) if file else []
    names = {benchmark.name for benchmark in (*loaded, *subsets)}
    whole = next((benchmark for benchmark in loaded if benchmark.name == MATH_500), None)
    if whole is not None and MATH_500 + CLEAN not in names:
        try:
            subsets.append(math_500_clean(whole))
        except ValueError as error:
            print(f"Avg. counts the whole of {MATH_500}: {error}", file=sys.stderr)
    return subsets


def _audited(file: str, loaded: Sequence[Benchmark]) -> list[Benchmark]:
    if not Path(file).is_file():
        raise FileNotFoundError(f"`--clean` {file!r} does not exist; the audit writes it once it has verdicts.")
    clean = read_object(file, "give the clean_ids.json of an audit")
    known = [benchmark for benchmark in loaded if benchmark.name in clean]
    if not known:
        names = ", ".join(clean) or "no benchmark"
        raise ValueError(f"`--clean` {file!r} knows {names}, none of the benchmarks evaluated.")
    subsets = []
    for benchmark in known:
        ids = {example.id for example in benchmark.examples}
        missing = set(clean[benchmark.name]) - ids
        if missing:
            other = f"{sorted(missing)[0]!r}, which {benchmark.name} does not have"
            raise ValueError(f"`--clean` {file!r} names {other}; audit the same file that is evaluated.")
        if clean[benchmark.name]:
            subsets.append(without(benchmark, ids - set(clean[benchmark.name])))
    return subsets
