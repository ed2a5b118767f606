"""Generations on disk: one JSONL file per benchmark, written before anything is graded; what makes a run resumable."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..files import read_object, write_text
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
        tokens (`int`, *optional*): Its length, where the sampler told it.
        truncated (`bool`): Whether the length limit ended it.
        gold (`str`): The right answer, so that a run can be graded again on its own.
    """

    id: str
    sample: int
    seed: int
    text: str
    tokens: int | None
    truncated: bool
    gold: str

    @property
    def key(self) -> tuple[str, int]:
        """Problem and number of the sample."""
        return self.id, self.sample


class Store:
    """
    The generations of one benchmark in one run.

    Args:
        folder (`Path`): The run's output folder.
        name (`str`): Name of the benchmark.
        settings (`dict`, *optional*): What new generations are made with; stored together with the first of them.
    """

    def __init__(self, folder: str | Path, name: str, settings: dict[str, Any] | None = None):
        self.new_settings = settings
        self._ready = False
        self.folder = Path(folder) / "generations"
        safe = "".join(char if char.isalnum() or char in "-_." else "_" for char in name)
        self.path = self.folder / f"{safe}.jsonl"
        self.settings_path = self.folder / f"{safe}.settings.json"

    def check_settings(self) -> None:
        """
        Compare the settings with those of the stored generations. A file without generations takes any settings.

        Raises:
            `ValueError`: they differ; the message names the first setting.
        """
        if not self.settings_path.is_file() or not self.read():
            return
        stored, settings = self.settings(), self.new_settings or {}
        for name in sorted(set(stored) | set(settings)):
            if stored.get(name) != settings.get(name):
                raise ValueError(
                    f"`--output` {str(self.folder.parent)!r} holds generations made with {name} "
                    f"{stored.get(name)!r}, not {settings.get(name)!r}; use the same settings to go on, or another "
                    "folder."
                )

    def _prepare(self) -> None:
        """Store the settings, and drop what a crash left of lines: then every line is a generation."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.new_settings is not None:
            write_text(self.settings_path, json.dumps(self.new_settings, indent=1, sort_keys=True) + "\n")
        self._ready = True
        if not self.path.is_file():
            return
        # Line by line: a file of long responses does not fit into memory twice.
        with open(self.path, "rb") as lines:
            whole = all(line.endswith(b"\n") and _generation(line) for line in lines)
        if not whole:
            temporary = self.path.with_name(self.path.name + ".part")
            with open(self.path, "rb") as lines, open(temporary, "wb") as kept:
                kept.writelines(line.rstrip(b"\n") + b"\n" for line in lines if _generation(line))
                kept.flush()
                os.fsync(kept.fileno())
            os.replace(temporary, self.path)

    def settings(self) -> dict[str, Any]:
        """What the generations were made with."""
        return read_object(self.settings_path, "delete it to draw anew")

    def read(self) -> dict[tuple[str, int], Generation]:
        """What is there, by problem and sample, the first of each. What a crash left of a line is passed over."""
        found: dict[tuple[str, int], Generation] = {}
        if not self.path.is_file():
            return found
        with open(self.path, "rb") as lines:  # a cut may also go through a character
            for line in lines:
                if generation := _generation(line):
                    found.setdefault(generation.key, generation)
        return found

    def append(self, generations: Iterable[Generation]) -> None:
        """
        Add generations; they are on disk when this returns. Only the first call binds the folder to the settings: a run
        that fails before its first response leaves it free.

        Raises:
            `OSError`: they could not be written (a full disk); the message names the folder.
        """
        lines = "".join(json.dumps(asdict(generation), ensure_ascii=False) + "\n" for generation in generations)
        try:
            if not self._ready:
                self._prepare()
            with open(self.path, "ab") as file:
                # A lone surrogate, which UTF-8 cannot hold, becomes the escape that JSON reads back.
                file.write(lines.encode("utf-8", "backslashreplace"))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(
                f"`--output` {str(self.folder.parent)!r} cannot be written ({error.strerror}); make room and run the "
                "same command again: what was written is kept."
            ) from None


def _generation(line: bytes) -> Generation | None:
    try:
        generation = Generation(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return None
    kinds = {"id": str, "sample": int, "seed": int, "text": str, "tokens": int | None, "truncated": bool, "gold": str}
    return generation if all(_is(getattr(generation, name), kind) for name, kind in kinds.items()) else None


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


@contextmanager
def drawing_in(folder: str | Path) -> Iterator[None]:
    """
    Keep a second run from drawing into the same folder meanwhile; it would draw everything twice.

    Args:
        folder (`str` or `Path`): The run's output folder; made if needed.

    Raises:
        `ValueError`: another process draws there, or the folder cannot be written.
    """
    lock = FileLock(Path(folder) / "generations" / "lock", timeout=0)  # gone with the process, kill -9 included
    try:
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"`--output` {str(folder)!r} is in use by another run; wait for it to end, or give another folder."
        ) from None
    except OSError as error:
        raise ValueError(
            f"`--output` {str(folder)!r} cannot be written ({error.strerror}); give a folder to write in."
        ) from None
    try:
        yield
    finally:
        lock.release()


def stored_names(folder: str | Path) -> list[str]:
    """Benchmarks that a run has generations of."""
    settings = (Path(folder) / "generations").glob("*.settings.json")
    names = sorted(path.name.removesuffix(".settings.json") for path in settings)
    return [name for name in names if Store(folder, name).read()]


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
