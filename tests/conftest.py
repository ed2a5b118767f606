"""Settings for every test."""

import os
import signal

# Two workers share two cores; more threads than cores would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure():
    """Background jobs inherit ignored interrupts; programs under test are to start as from a terminal."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """What starts several processes comes first: one worker does all of it while the other begins with the rest."""
    items.sort(key=lambda item: item.get_closest_marker("multiprocess") is None)
