"""How a command ends when something is wrong: one sentence and status 1, said once for all processes."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds that other processes leave the first one to say the same; its launcher then ends them.
_GRACE = 10


@contextmanager
def told(*kinds: type[BaseException], interrupted: str | None = None) -> Iterator[None]:
    """End the program with one sentence for a mistake of some kind, and with `interrupted` after Ctrl-C."""
    kinds = kinds or (ValueError, OSError, ImportError)
    try:
        yield
    except kinds as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(_GRACE)
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        if interrupted is None:
            raise
        sys.exit(interrupted)
