"""One policy for all requests over HTTP, for threads and for tasks."""

import asyncio
import threading
import time

import pytest

from crop_trl.retries import Stopped, Transient, retry_after, retrying
from crop_trl.text import Redactor


@pytest.fixture
def no_jitter(monkeypatch):
    """Pauses as long as they can be."""
    monkeypatch.setattr("random.uniform", lambda low, high: high)


class Failing:
    """Raises what it is given, one after the other, then returns."""

    def __init__(self, *errors):
        self.errors, self.calls = list(errors), 0

    def __call__(self):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


def in_thread(function, stopping=None, **options):
    return retrying(stopping or threading.Event(), **options)(function)


def in_task(function, stopping=None, **options):
    async def call():
        return function()

    async def main():
        event = asyncio.Event()
        if stopping is not None and stopping.is_set():
            event.set()
        return await retrying(event, **options)(call)

    return asyncio.run(main())


@pytest.mark.parametrize("call", [in_thread, in_task])
def test_the_pauses_are_told(call, no_jitter):
    waits = []
    errors = [Transient("a"), Transient("b", "rate_limit", retry_after=0.02), Transient("c"), Transient("d")]
    found = call(Failing(*errors), longest=0.05, on_wait=lambda error, seconds: waits.append((str(error), seconds)))
    assert found == "answer"
    # What the server asked for and some jitter, or longer each time up to the longest.
    assert waits == [("a", 0.05), ("b", pytest.approx(0.07)), ("c", 0.05), ("d", 0.05)]


@pytest.mark.parametrize("call", [in_thread, in_task])
def test_attempts_depend_on_the_error(call):
    def attempts(error):
        return 2 if str(error) == "gone" else 4

    for text, calls in (("gone", 2), ("busy", 4)):
        failing = Failing(*(Transient(text) for _ in range(9)))
        with pytest.raises(Transient, match=text):
            call(failing, longest=0.0, attempts=attempts)
        assert failing.calls == calls


@pytest.mark.parametrize("call", [in_thread, in_task])
def test_any_other_error_is_not_repeated_and_a_stop_ends_the_waiting(call):
    failing = Failing(ValueError("no"))
    with pytest.raises(ValueError):
        call(failing, longest=1.0)
    assert failing.calls == 1
    stopping, failing = threading.Event(), Failing(*(Transient("busy", retry_after=600.0) for _ in range(9)))
    stopping.set()
    with pytest.raises(Stopped):
        call(failing, stopping, longest=600.0)
    assert failing.calls == 1


def test_a_stop_from_elsewhere_wakes_a_thread():
    stopping = threading.Event()
    with pytest.raises(Stopped):
        in_thread(
            Failing(Transient("busy", retry_after=600.0)),
            stopping,
            longest=1.0,
            on_wait=lambda error, seconds: threading.Timer(0.05, stopping.set).start(),
        )


def test_growing_pauses(no_jitter):
    waits = []
    stopping = threading.Event()
    stopping.wait = lambda seconds: waits.append(seconds)  # returns None: not stopped, and no time passes
    in_thread(Failing(*(Transient("busy") for _ in range(8))), stopping, longest=60.0)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]


def test_retry_after_forms():
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 300))
    assert retry_after({"Retry-After": "1.5"}) == 1.5
    assert 0 < retry_after({"Retry-After": date}) <= 301
    values = ("soon", "", "-3", "nan", "Fri, 99 Foo", "Mon, 01 Jan 2001 00:00:00 GMT")
    assert [retry_after({"Retry-After": value}) for value in values] == [None] * 6
    assert [retry_after({"Retry-After": value}) for value in ("86400", "inf")] == [600, 600]
    assert retry_after({"Retry-After": "Mon, 01 Jan 2020 00:00:00 +99999999999999"}) is None
    assert retry_after({}) is None


def test_keys_are_taken_out():
    redact = Redactor("sk-abc/def+12345", "another-secret")
    text = redact.message("a sk-abc/def+12345 b sk-abc%2Fdef%2B12345 c sk-abc***345 Bearer xyz another-secret\nd")
    assert not any(part in text for part in ("12345", "***", "xyz", "another", "\n"))
    assert redact.content("Take sk-latex and sk-abc/def+12345") == "Take sk-latex and [key]"
    assert Redactor("none").content("none of them") == "none of them"
