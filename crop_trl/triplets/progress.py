"""What a run tells the person in front of it, and how that person stops it.

Nothing in here may end a run: a pipe to `head` that closes, or a terminal that goes away, must not cost the answers
that are in flight.
"""

import asyncio
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tqdm import tqdm

from .candidates import STATUSES
from .costs import Account

# A terminal that closes sends SIGHUP: the requests in flight are paid for all the same.
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Progress:
    """A progress bar with counts by status, tokens and cost so far."""

    def __init__(self, total: int, account: Account, show: bool):
        self._account = account
        self._statuses: Counter = Counter()
        self._bar: tqdm | None = None
        if show:
            with suppress(OSError):
                self._bar = tqdm(total=total, desc="triplets", unit="problem", smoothing=0.05)

    def finished(self, status: str) -> None:
        """Count a problem."""
        self._statuses[status] += 1
        if self._bar is not None:
            with suppress(OSError):
                self._bar.set_postfix_str(self._text(), refresh=False)
                self._bar.update()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()

    def _text(self) -> str:
        cost, rows = self._account.cost, self._account.rows
        read, written = (sum(row[name] for row in rows) / 1e6 for name in ("input", "output"))
        counts = " ".join(f"{name}={self._statuses[name]}" for name in STATUSES if self._statuses[name])
        spent = "" if cost is None else f" ${cost:.2f}"
        return f"{counts} in={read:.2f}M out={written:.2f}M{spent}"


@contextmanager
def on_interrupt(call: Callable[[], None]) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP call a function once; the second time they do what they did before."""
    loop = asyncio.get_running_loop()
    handled: list[int] = []

    def give_back() -> None:
        while handled:
            loop.remove_signal_handler(handled.pop())

    def fire() -> None:
        give_back()
        call()

    if threading.current_thread() is threading.main_thread():  # no other may handle signals
        for number in INTERRUPTS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` means it
                loop.add_signal_handler(number, fire)
                handled.append(number)
    try:
        yield
    finally:
        give_back()
