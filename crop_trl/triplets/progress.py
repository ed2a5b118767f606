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

from tqdm import tqdm

from .candidates import STATUSES
from .costs import Account

# A terminal that closes sends SIGHUP: the requests in flight are paid for all the same.
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def progress_bar(total: int, account: Account, show: bool) -> Iterator[Callable[[str], None]]:
    """A bar with counts by status, tokens and cost so far; gives what counts a problem, by its status."""
    statuses, bar = Counter(), None
    with suppress(OSError):
        bar = tqdm(total=total, desc="triplets", unit="problem", smoothing=0.05, disable=not show)

    def finished(status: str) -> None:
        statuses[status] += 1
        read, written = (sum(row[name] for row in account.rows) / 1e6 for name in ("input", "output"))
        counts = " ".join(f"{name}={statuses[name]}" for name in STATUSES if statuses[name])
        spent = "" if account.cost is None else f" ${account.cost:.2f}"
        with suppress(OSError):
            if bar is not None:
                bar.set_postfix_str(f"{counts} in={read:.2f}M out={written:.2f}M{spent}", refresh=False)
                bar.update()

    try:
        yield finished
    finally:
        with suppress(OSError):
            if bar is not None:
                bar.close()


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
