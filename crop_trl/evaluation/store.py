"""Generations on disk: one JSONL file per benchmark, written before anything is graded; what makes a run resumable."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..files import JsonlStore, read_entries, read_object, write_json
from .benchmarks import Benchmark


@dataclass(frozen=True)
class Generation:
    """One response to a problem, as it was drawn, and the right answer, so that it can be graded again."""

    id: str
    sample: int
    seed: int
    text: str
    tokens: int | None
    truncated: bool
    gold: str


class Store:
    """The generations of one benchmark in one run; `settings` is what new ones are made with."""

    def __init__(self, folder: str | Path, name: str, settings: dict[str, Any] | None = None):
        self.new_settings = settings
        self.output = Path(folder)
        safe = "".join(char if char.isalnum() or char in "-_." else "_" for char in name)
        self.path = self.output / "generations" / f"{safe}.jsonl"
        self.settings_path = self.path.with_name(f"{safe}.settings.json")
        self._file: JsonlStore | None = None

    def settings(self) -> dict[str, Any]:
        """What the generations were made with."""
        return read_object(self.settings_path, "delete it to draw anew")

    def read(self) -> dict[tuple[str, int], Generation]:
        """What is there, by problem and sample, the first of each. What a crash left of a line is passed over."""
        found: dict[tuple[str, int], Generation] = {}
        for entry in read_entries(self.path):
            with suppress(TypeError):
                generation = Generation(**entry)
                found.setdefault((generation.id, generation.sample), generation)
        return found

    def append(self, generations: Iterable[Generation]) -> None:
        """Add generations; they are on disk when this returns. Only the first call binds the folder to the settings: a
        run that fails before its first response leaves it free."""
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                if self.new_settings is not None:
                    write_json(self.settings_path, self.new_settings)
                self._file = JsonlStore(self.path)
            self._file.append([asdict(generation) for generation in generations])
        except OSError as error:
            said = "make room and run the same command again: what was written is kept"
            raise OSError(f"`--output` {str(self.output)!r} cannot be written ({error.strerror}); {said}.") from None

    def close(self) -> None:
        """Close the file, where it was written to."""
        if self._file is not None:
            self._file.close()
            self._file = None


def stored_names(folder: str | Path) -> list[str]:
    """Benchmarks that a run has generations of."""
    files = (Path(folder) / "generations").glob("*.settings.json")
    names = sorted(read_object(path, "delete it to draw anew")["benchmark"] for path in files)
    return [name for name in names if Store(folder, name).read()]


def pending_chunks(
    benchmark: Benchmark, done: Iterable[tuple[str, int]], size: int, independent: bool = False
) -> list[list[tuple[int, int]]]:
    """What is left to generate, as (index of the problem, sample) in chunks of `size`.

    Where responses are `independent` these are full. Else chunks are cut from the whole list, sample after sample, so
    that one holds a sample of each of its problems, and those with anything missing come whole. A chunk is then the
    same whether the run was interrupted or not: with a seed of its own it gives the same responses."""
    done = set(done)
    if independent:
        samples = range(benchmark.samples)
        left = [(i, s) for s in samples for i, example in enumerate(benchmark.examples) if (example.id, s) not in done]
        return [left[start : start + size] for start in range(0, len(left), size)]
    chunks = []
    for sample in range(benchmark.samples):
        for start in range(0, len(benchmark.examples), size):
            chunk = [(index, sample) for index in range(start, min(start + size, len(benchmark.examples)))]
            if any((benchmark.examples[index].id, sample) not in done for index, sample in chunk):
                chunks.append(chunk)
    return chunks
