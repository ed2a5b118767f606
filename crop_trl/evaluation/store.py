"""Generations on disk: one JSONL file per benchmark, written before anything is graded; what makes a run resumable."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .benchmarks import Benchmark


@dataclass(frozen=True)
class Generation:
    """
    One response.

    Args:
        id (`str`): Of the problem.
        sample (`int`): Which of the k samples.
        seed (`int`): What it was drawn with.
        text (`str`): The response, thinking part included.
        tokens (`int`): Its length.
        truncated (`bool`): Whether the length limit ended it.
        gold (`str`): The right answer, so that a run can be graded again on its own.
    """

    id: str
    sample: int
    seed: int
    text: str
    tokens: int
    truncated: bool
    gold: str

    @property
    def key(self) -> tuple[str, int]:
        return self.id, self.sample


class Store:
    """
    The generations of one benchmark in one run.

    Args:
        folder (`Path`): The run's output folder.
        name (`str`): Name of the benchmark.
    """

    def __init__(self, folder: str | Path, name: str):
        self.folder = Path(folder) / "generations"
        safe = "".join(char if char.isalnum() or char in "-_." else "_" for char in name)
        self.path = self.folder / f"{safe}.jsonl"
        self.settings_path = self.folder / f"{safe}.settings.json"

    def check_settings(self, settings: dict[str, Any]) -> None:
        """
        Compare with those that the stored generations were made with, and store them when there are none.

        Raises:
            `ValueError`: they differ; the message names the first setting.
        """
        if self.settings_path.is_file():
            stored = json.loads(self.settings_path.read_text(encoding="utf-8"))
            for name in sorted(set(stored) | set(settings)):
                if stored.get(name) != settings.get(name):
                    raise ValueError(
                        f"`--output` {str(self.folder.parent)!r} holds generations made with {name} "
                        f"{stored.get(name)!r}, not {settings.get(name)!r}; use the same settings to go on, or another "
                        "folder."
                    )
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.settings_path, json.dumps(settings, indent=1, sort_keys=True) + "\n")

    def settings(self) -> dict[str, Any]:
        """What the generations were made with."""
        return json.loads(self.settings_path.read_text(encoding="utf-8"))

    def read(self) -> dict[tuple[str, int], Generation]:
        """What is there, by problem and sample. A last line that a crash cut off is dropped."""
        found: dict[tuple[str, int], Generation] = {}
        if not self.path.is_file():
            return found
        with open(self.path, encoding="utf-8") as lines:
            for line in lines:
                try:
                    generation = Generation(**json.loads(line))
                except (json.JSONDecodeError, TypeError):
                    continue
                found[generation.key] = generation
        return found

    def append(self, generations: Iterable[Generation]) -> None:
        """Add generations; they are on disk when this returns."""
        lines = "".join(json.dumps(asdict(generation), ensure_ascii=False) + "\n" for generation in generations)
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab") as file:
            if file.tell() and not self._ends_with_newline():
                file.write(b"\n")  # a crash cut the last line off; it must not swallow the next one
            file.write(lines.encode("utf-8", errors="replace"))
            file.flush()
            os.fsync(file.fileno())

    def _ends_with_newline(self) -> bool:
        with open(self.path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"


def stored_names(folder: str | Path) -> list[str]:
    """Benchmarks that a run has generations of."""
    return sorted(
        path.name.removesuffix(".settings.json") for path in (Path(folder) / "generations").glob("*.settings.json")
    )


def pending_chunks(benchmark: Benchmark, done: Iterable[tuple[str, int]], size: int) -> list[list[tuple[int, int]]]:
    """
    What is left to generate, as (index of the problem, sample) in chunks.

    Chunks are cut from the whole list, sample after sample, and a chunk holds one sample of each of its problems. A
    chunk is the same whether the run was interrupted or not: with a seed of its own it gives the same responses.

    Args:
        benchmark ([`Benchmark`]): What is asked.
        done (iterable of (id, sample)): What is there.
        size (`int`): Problems in a chunk.

    Returns:
        `list[list[tuple[int, int]]]`: Chunks with anything missing, whole.
    """
    done = set(done)
    chunks = []
    for sample in range(benchmark.samples):
        for start in range(0, len(benchmark.examples), size):
            chunk = [(index, sample) for index in range(start, min(start + size, len(benchmark.examples)))]
            if any((benchmark.examples[index].id, sample) not in done for index, sample in chunk):
                chunks.append(chunk)
    return chunks


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is either whole or not there."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
