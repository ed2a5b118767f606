"""How a request over HTTP is repeated: `Retry-After` first, else longer each time, in sight, and ended at once."""

import asyncio
import email.utils
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import tenacity

from .text import say

LONGEST_RETRY_AFTER = 600.0  # seconds; who asks for more has a quota, not a rate limit


class Transient(RuntimeError):
    """A request got no answer; a later one may. `cause` is one word for it, to be counted."""

    def __init__(self, message: str, cause: str = "", retry_after: float | None = None):
        super().__init__(message)
        self.cause, self.retry_after = cause, retry_after


class Stopped(Exception):
    """The work is ending; nothing new may be sent."""


class Waiting:
    """Says why requests wait: many do at the same time, and short pauses are no news."""

    def __init__(self):
        self._quiet_until = 0.0

    def __call__(self, error: Transient, seconds: float) -> None:
        if seconds >= 1 and time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + max(10.0, seconds)
            say(f"Waiting {seconds:.0f} s until requests are sent again ({error}).")


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of a `Retry-After` header, which is a number or a date."""
    value = headers.get("Retry-After") or ""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return None
    return min(seconds, LONGEST_RETRY_AFTER) if seconds >= 0 else None


def retrying(
    stopping: threading.Event | asyncio.Event,
    *,
    longest: float,
    attempts: Callable[[Transient], float] = lambda error: float("inf"),
    on_wait: Callable[[Transient, float], None] = lambda error, seconds: None,
) -> tenacity.Retrying | tenacity.AsyncRetrying:
    """Calls (awaits) a function until it raises no [`Transient`], has had its `attempts`, or `stopping` is set."""
    backoff = tenacity.wait_random_exponential(multiplier=1, max=longest)

    def wait(state: tenacity.RetryCallState) -> float:
        asked = state.outcome.exception().retry_after
        # Jitter on top of Retry-After too, or all that were told the same second come back in it.
        return backoff(state) if asked is None else asked + min(1.0, backoff(state))

    def sleep(seconds: float) -> None:
        if stopping.wait(seconds):
            raise Stopped

    async def sleep_async(seconds: float) -> None:
        if not stopping.is_set():
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stopping.wait(), seconds)
        if stopping.is_set():
            raise Stopped

    threads = isinstance(stopping, threading.Event)
    return (tenacity.Retrying if threads else tenacity.AsyncRetrying)(
        retry=tenacity.retry_if_exception_type(Transient),
        wait=wait,
        stop=lambda state: state.attempt_number >= attempts(state.outcome.exception()),
        before_sleep=lambda state: on_wait(state.outcome.exception(), state.upcoming_sleep),
        sleep=sleep if threads else sleep_async,
        reraise=True,
    )
