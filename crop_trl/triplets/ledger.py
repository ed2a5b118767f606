"""The ledger: every answer that was paid for, on disk before anything uses it.

One JSONL file that only grows. A line is an answer and the key of the request that it answers, so a rerun finds what
was asked before and asks the rest. Writes of concurrent requests share an fsync: each `append` returns when its own
line is on disk, and while one fsync is under way the lines of everybody else gather for the next.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

FORMAT = 1


class LedgerError(RuntimeError):
    """A ledger, or what is made of it, that cannot be used or written; the message names the file and the remedy."""


def request_key(**request: Any) -> str:
    """A hash of everything that decides what a request asks."""
    return hashlib.sha256(json.dumps(request, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Ledger:
    """
    The answers of one output directory, open for one process.

    Args:
        path (`str` or `Path`):
            The file; made when missing. A lock file stands beside it.
        on_entry (callable, *optional*):
            Called with every entry that is there already.

    Attributes:
        dropped (`int`): Bytes of a half-written last line that were cut off on opening.
        unreadable (`int`): Complete lines that could not be read; they are left where they are, and skipped.

    Raises:
        `LedgerError`: another process has it open, or the file is something else.
    """

    def __init__(self, path: str | Path, on_entry: Callable[[dict[str, Any]], None] | None = None):
        self.path = Path(path)
        self.dropped = self.unreadable = 0
        self._index: dict[str, tuple[int, int]] = {}  # key -> place in the file: 17,000 answers need no memory
        self._waiting: list[tuple[bytes, asyncio.Future]] = []
        self._flush_task: asyncio.Task | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._lock = FileLock(f"{self.path}.lock", timeout=0)  # flock: gone with the process, kill -9 included
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout:
            raise LedgerError(
                f"{self.path} is in use by another process; wait for that run to end or give another `output`."
            ) from None
        except OSError as error:
            raise LedgerError(
                f"{self.path} cannot be made ({error.strerror}); give an `output` that can be a directory to write in."
            ) from None
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._size = self._recover(on_entry or (lambda entry: None))
        except BaseException:
            self._lock.release()
            raise

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: str) -> bool:
        return key in self._index

    def get(self, key: str) -> dict[str, Any] | None:
        """The entry of a request, or `None` when it was never answered."""
        if key not in self._index:
            return None
        start, length = self._index[key]
        return json.loads(os.pread(self._file, length, start))

    async def append(self, entry: Mapping[str, Any]) -> None:
        """
        Put an entry on disk; when this returns, it is there.

        Raises:
            `LedgerError`: it could not be written (a full disk).
        """
        line = _line(entry)
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((line, written))
        if self._flush_task is None:
            self._flush_task = asyncio.create_task(self._flush())
        # Shielded: a caller that is cancelled must not take the other lines of its batch with it.
        start = await asyncio.shield(written)
        if "key" in entry:
            self._index[entry["key"]] = (start, len(line))

    def close(self) -> None:
        """Close the file and let another process have it."""
        self._writer.shutdown(wait=True)
        os.close(self._file)
        self._lock.release()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    async def _flush(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                start = self._size
                try:
                    data = b"".join(line for line, _ in batch)
                    await asyncio.get_running_loop().run_in_executor(self._writer, self._write, data)
                except OSError as error:
                    failure = LedgerError(f"{self.path} cannot be written ({error.strerror}); make room and run again.")
                    for _, written in batch:
                        if not written.done():
                            written.set_exception(failure)
                    continue
                for line, written in batch:
                    if not written.done():
                        written.set_result(start)
                    start += len(line)
        finally:
            self._flush_task = None

    def _write(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)  # half a line here would spoil the next one
            raise
        self._size += len(data)

    def _recover(self, on_entry: Callable[[dict[str, Any]], None]) -> int:
        """Index the file, cut off a half-written last line, and return the size."""
        size = 0
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines):
                entry = _entry(line)
                started = _line({"ledger_format": FORMAT}).startswith(line)  # even its first line may be half written
                if number == 0 and not started:
                    raise LedgerError(
                        f"{self.path} is not a ledger of this program; move it away or give another `output`."
                    )
                if not line.endswith(b"\n"):
                    if entry is None:
                        self.dropped = len(line)
                        os.ftruncate(self._file, size)
                        break
                    # Only the line's end is missing. The answer is whole and paid for, so it is kept.
                    os.write(self._file, b"\n")
                    line += b"\n"
                if entry is None:
                    self.unreadable += 1
                else:
                    if "key" in entry:
                        self._index[entry["key"]] = (size, len(line))
                    on_entry(entry)
                size += len(line)
        if size == 0:
            header = _line({"ledger_format": FORMAT})
            os.write(self._file, header)
            size = len(header)
            folder = os.open(self.path.parent, os.O_RDONLY)
            os.fsync(folder)  # the file's name must survive a power cut as well as its contents
            os.close(folder)
        os.fsync(self._file)
        return size


def read_entries(path: str | Path) -> Iterator[dict[str, Any]]:
    """The readable answers of a ledger, without opening it for writing: a run may be going on."""
    try:
        with open(path, "rb") as lines:
            for line in lines:
                entry = _entry(line)
                if entry is not None and "key" in entry:
                    yield entry
    except FileNotFoundError:
        return


def _line(entry: Mapping[str, Any]) -> bytes:
    # ASCII only: a lone surrogate in an answer would otherwise be an answer that cannot be stored.
    return json.dumps(entry, separators=(",", ":")).encode("ascii") + b"\n"


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
