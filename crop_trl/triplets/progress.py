"""What a run tells the person in front of it, and how that person stops it.

Nothing in here may end a run: a pipe to `head` that closes, or a terminal that goes away, must not cost the answers
that are in flight.
"""

import asyncio
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tqdm import tqdm

from .costs import Account
from .outcome import STATUSES

# A terminal that closes sends SIGHUP: the requests in flight are paid for all the same.
INTERRUPTS = ("SIGINT", "SIGTERM", "SIGHUP")


def say(text: str) -> None:
    """Print a line for people; if nobody can read it any more, do nothing."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass


class Progress:
    """
    A progress bar with counts by status, tokens and cost so far.

    Args:
        total (`int`): Problems of the run.
        account ([`Account`]): Where tokens and cost are read from.
        show (`bool`): Whether there is anything to see.
    """

    def __init__(self, total: int, account: Account, show: bool):
        self._account = account
        self._statuses: Counter = Counter()
        self._bar: tqdm | None = None
        if show:
            self._try(self._open, total)

    def _open(self, total: int) -> None:
        self._bar = tqdm(total=total, desc="triplets", unit="problem", smoothing=0.05)

    def finished(self, status: str) -> None:
        """Count a problem."""
        self._statuses[status] += 1
        if self._bar is not None:
            self._try(self._advance)

    def _advance(self) -> None:
        self._bar.set_postfix_str(self._text(), refresh=False)
        self._bar.update()

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is None:
            say(text)
        else:
            self._try(self._bar.write, text, sys.stderr)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._bar is not None:
            self._try(self._bar.close)

    def _try(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except OSError:
            if self._bar is not None:
                self._bar.disable, self._bar = True, None

    def _text(self) -> str:
        total, cost = self._account.total, self._account.cost
        counts = " ".join(f"{name}={self._statuses[name]}" for name in STATUSES if self._statuses[name])
        spent = "" if cost is None else f" ${cost:.2f}"
        return f"{counts} in={total['input'] / 1e6:.2f}M out={total['output'] / 1e6:.2f}M{spent}"


class on_interrupt:
    """SIGINT, SIGTERM and SIGHUP call a function once; the second time they do what they did before."""

    def __init__(self, call: Callable[[], None]):
        self._call = call

    def __enter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._set: list[int] = []
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may handle signals
        for number in (getattr(signal, name) for name in INTERRUPTS if hasattr(signal, name)):
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # `nohup` means it
            # Loops of Windows take no handlers: there a first signal does what it did before.
            with suppress(NotImplementedError):
                self._loop.add_signal_handler(number, self._fire)
                self._set.append(number)

    def __exit__(self, *exception: Any) -> None:
        while self._set:
            self._loop.remove_signal_handler(self._set.pop())

    def _fire(self) -> None:
        self.__exit__()
        self._call()
