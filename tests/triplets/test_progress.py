"""What an interrupt does, on loops that take handlers of signals and on those that do not."""

import asyncio
import signal

import pytest

from crop_trl.triplets.progress import on_interrupt


class LoopWithoutHandlers(asyncio.SelectorEventLoop):
    """As the loops of Windows are."""

    def add_signal_handler(self, *args):
        raise NotImplementedError


def interrupt(loop: asyncio.AbstractEventLoop) -> list[str]:
    """What was called when an interrupt comes to a coroutine on this loop."""
    told = []

    async def work():
        with on_interrupt(lambda: told.append("interrupt")):
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0.05)

    try:
        loop.run_until_complete(work())
    except KeyboardInterrupt:
        told.append("ended")
    finally:
        loop.close()
    return told


@pytest.mark.parametrize(
    ("loop", "expected"), [(asyncio.SelectorEventLoop, ["interrupt"]), (LoopWithoutHandlers, ["ended"])]
)
def test_an_interrupt(loop, expected):
    """It finishes what is in flight, or ends the program as any other."""
    assert interrupt(loop()) == expected
