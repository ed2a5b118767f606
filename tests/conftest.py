"""Settings for every test."""

import gc
import os
import signal
import sys

from hypothesis import HealthCheck, settings

import crop_trl.commands  # noqa: F401  # which reads metadata of packages once

# Two workers share two cores; more threads than cores would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# No example may be too slow for a busy machine.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Modules stay, and every search for garbage, of which each trainer starts one, would look through all of them.
gc.disable()
frozen = 0


def pytest_configure(config):
    # Background jobs inherit ignored interrupts; programs under test are to start as from a terminal.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    gc.enable()
    pytest_runtest_logfinish()


def pytest_runtest_logfinish():
    """Set aside what was imported."""
    global frozen
    if len(sys.modules) > frozen + 100:
        gc.collect()
        gc.freeze()
        frozen = len(sys.modules)


def pytest_collection_modifyitems(items):
    """What starts several processes comes first: one worker does all of it while the other begins with the rest."""
    items.sort(key=lambda item: item.get_closest_marker("multiprocess") is None)
