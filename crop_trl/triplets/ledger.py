"""The ledger: every answer that was paid for, on disk before anything uses it.

A [`~crop_trl.files.JsonlStore`] in which a line is an answer and the key of the request that it answers, so a rerun
finds what was asked before and asks the rest.
"""

import asyncio
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import files
from .settings import TripletSettings

LONGEST_ENTRY = 64_000  # bytes that the disk must have for each request in flight


class LedgerError(RuntimeError):
    """What was paid for, or is made of it, cannot be written; the message names the file and the remedy."""


def request_key(**request: Any) -> str:
    """A hash of everything that decides what a request asks."""
    return hashlib.sha256(json.dumps(request, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Ledger:
    """The answers of one output directory, open for one process; `on_entry` is called with each that is there."""

    def __init__(self, path: str | Path, on_entry: Callable[[dict[str, Any]], None] = lambda entry: None):
        self.path = Path(path)
        self._index: dict[str, tuple[int, int]] = {}  # key -> place in the file: 17,000 answers need no memory

        def found(place: tuple[int, int], entry: dict[str, Any]) -> None:
            if "key" in entry:
                self._index[entry["key"]] = place
            on_entry(entry)

        with ExitStack() as opened:
            opened.enter_context(files.alone_in(f"{self.path}.lock", f"`output` {str(self.path.parent)!r}"))
            self._store = files.JsonlStore(self.path, found)
            opened.callback(self._store.close)
            self._writer = opened.enter_context(ThreadPoolExecutor(1, thread_name_prefix="ledger"))
            self._opened = opened.pop_all()

    @property
    def spoiled(self) -> tuple[int, int]:
        """Bytes of a half-written last line that was cut off on opening, and whole lines that cannot be read."""
        return self._store.dropped, self._store.unreadable

    def __len__(self) -> int:
        return len(self._index)

    def get(self, key: str) -> dict[str, Any] | None:
        """The entry of a request, or `None` when it was never answered."""
        return self._store.get(self._index[key]) if key in self._index else None

    async def append(self, entry: Mapping[str, Any]) -> None:
        """Put an entry on disk; when this returns, it is there. Raises [`LedgerError`] (a full disk)."""
        loop = asyncio.get_running_loop()
        try:
            (place,) = await loop.run_in_executor(self._writer, self._store.append, [entry])
        except OSError as error:
            raise self._failure(error) from None
        if "key" in entry:
            self._index[entry["key"]] = place

    def close(self) -> None:
        """Close the file and let another process have it."""
        self._opened.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _failure(self, error: OSError) -> LedgerError:
        if isinstance(error, FileNotFoundError):
            return LedgerError(f"{self.path} is no longer there; leave it where it is while a run goes on.")
        return LedgerError(f"{self.path} cannot be written ({error.strerror}); make room and run again.")

    def check_room(self, requests: int) -> None:
        """Raise [`LedgerError`] where the disk may not hold the answers of so many requests, before they are sent."""
        try:
            free = shutil.disk_usage(self.path.parent).free
        except OSError as error:
            raise self._failure(error) from None
        if free < requests * LONGEST_ENTRY:
            raise LedgerError(
                f"The disk of {self.path} has only {free / 1e6:.1f} MB left, too little for the answers of {requests} "
                "requests in flight; make room and run again."
            )


@dataclass
class Known:
    """What the answers of earlier runs tell about the models that gave them."""

    askers: set[tuple[str, str]] = field(default_factory=set)  # models and versions of the templates
    # Digests of endpoint and request fields that have had an answer -> how they take requests for JSON.
    served: dict[str, str | None] = field(default_factory=dict)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Read an entry of the ledger."""
        if "key" in entry:
            self.askers.add((entry["model"], entry["templates"]))
            served = entry.get("served")
            self.served[served] = entry.get("mode") or self.served.get(served)


def served_digest(settings: TripletSettings) -> str:
    """Tells apart what an endpoint may turn down for all requests alike: its model, a parameter, a limit."""
    return request_key(endpoint=settings.endpoint, fields=settings.request_fields())
