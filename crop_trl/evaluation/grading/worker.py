"""The process that does the algebra of grading: one JSON request a line in, one verdict a line out.

It is started by path (see `pool.py`), so that it imports neither the caller's script nor torch.
"""

import json
import os
import signal
import sys

MEMORY_LIMIT = 4 * 2**30


def limit(resource_name: str, soft: float) -> None:
    """Lower a limit of this process where the system has it."""
    try:
        import resource

        kind = getattr(resource, resource_name)
        _, hard = resource.getrlimit(kind)
        soft = int(soft)
        resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    except (ImportError, AttributeError, ValueError, OSError):
        pass


class OutOfTime(BaseException):
    """Not an `Exception`, so that no library swallows it."""


def _out_of_time(signum, frame):
    raise OutOfTime


def main() -> None:
    # Anything a library prints must not mix with the verdicts.
    verdicts = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit("RLIMIT_AS", MEMORY_LIMIT)
    sys.setrecursionlimit(5000)
    try:
        import logging

        logging.disable(logging.CRITICAL)
        from .algebra import scalars
        from .equivalence import same
    except ImportError as error:
        print(json.dumps({"error": str(error)}), file=verdicts, flush=True)
        return
    signal.signal(signal.SIGPROF, _out_of_time)
    print(json.dumps({"used": sum(os.times()[:2])}), file=verdicts, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        seconds = request["cpu_seconds"]
        # Processor time, so that a busy machine does not change verdicts. Should the algebra sit in one long C
        # call, the kernel ends the process.
        used = sum(os.times()[:2])
        limit("RLIMIT_CPU", used + seconds + 3)
        verdict = False
        try:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            verdict = bool(same(request["gold"], request["prediction"], scalars))
            signal.setitimer(signal.ITIMER_PROF, 0)
        except (OutOfTime, Exception):  # out of memory, too, and whatever a parser raises
            pass
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps({"same": verdict, "used": sum(os.times()[:2])}), file=verdicts, flush=True)
