"""What an interrupt does."""

import asyncio
import signal

from crop_trl.triplets.progress import on_interrupt


def test_a_first_interrupt_is_told_and_a_second_ends_the_program():
    told = []

    async def work():
        with on_interrupt(lambda: told.append("interrupt")):
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(0.05)

    loop = asyncio.SelectorEventLoop()
    try:
        loop.run_until_complete(work())
    except KeyboardInterrupt:
        told.append("ended")
    finally:
        loop.close()
    assert told == ["interrupt", "ended"]
