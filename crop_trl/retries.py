"""How a request over HTTP is repeated: `Retry-After` first, else jittered and longer each time, in sight, and ended at
once. Teacher servers (threads) and the endpoints that write triplets (tasks) share this; tenacity does the repeating.
"""

import asyncio
import email.utils
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import tenacity

LONGEST_RETRY_AFTER = 600.0  # seconds; who asks for more has a quota, not a rate limit


class Transient(RuntimeError):
    """
    A request got no answer; a later one may.

    Args:
        message (`str`): What came instead, without secrets.
        cause (`str`): One word for it, to be counted.
        retry_after (`float`, *optional*): Seconds after which the server wants to be asked again.
    """

    def __init__(self, message: str, cause: str = "", retry_after: float | None = None):
        super().__init__(message)
        self.cause, self.retry_after = cause, retry_after


class Stopped(Exception):
    """The work is ending; nothing new may be sent."""


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of a `Retry-After` header, which is a number or a date."""
    value = headers.get("Retry-After") or ""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError):
            return None
    return min(seconds, LONGEST_RETRY_AFTER) if seconds >= 0 else None


def retrying(
    stopping: threading.Event | asyncio.Event,
    *,
    longest: float,
    attempts: Callable[[Transient], float] = lambda error: float("inf"),
    on_wait: Callable[[Transient, float], None] = lambda error, seconds: None,
) -> tenacity.Retrying | tenacity.AsyncRetrying:
    """
    Something that calls a function until it no longer raises [`Transient`].

    Args:
        stopping (`threading.Event` or `asyncio.Event`): Once set, waiting ends at once in [`Stopped`]. Its kind decides
            whether a function is called or awaited.
        longest (`float`): Longest pause in seconds; `Retry-After` goes first, and may be longer.
        attempts (`Callable`, *optional*): How often to try in all, by the error; the last error is raised as it is.
        on_wait (`Callable`, *optional*): Told what went wrong, and how many seconds are waited.
    """
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
