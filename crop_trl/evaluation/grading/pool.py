"""Processes that compare answers by algebra and can be killed.

Why processes: math-verify guards itself with signals, which only the main thread can have, and a big-integer power in C
answers to no signal at all. A worker that does not answer in time is killed and replaced; the caller only ever waits
for a pipe, in any thread.
"""

import atexit
import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path

# This package alone, under another name: importing crop_trl could bring torch into every worker.
BOOTSTRAP = """
import importlib.util, sys
folder = sys.argv[1]
file = folder + "/worker.py"
spec = importlib.util.spec_from_file_location("grading", file, submodule_search_locations=[folder])
module = importlib.util.module_from_spec(spec)
sys.modules["grading"] = module
spec.loader.exec_module(module)
module.main()
"""
START_SECONDS = 120.0


class GradingFailed(Exception):
    """There is no verdict: the workers died or stalled, or the time for all comparisons was used up."""


class WorkerFailed(Exception):
    """The worker died or did not answer in time."""


class Worker:
    """One process and its pipes. Not thread-safe: the pool hands it to one caller at a time."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOTSTRAP, str(Path(__file__).parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the caller
        )
        self.used: float | None = None  # its processor time at its last answer
        self.buffer = b""

    def wait_until_ready(self) -> None:
        """Wait for the start. Raises `ImportError` without math-verify."""
        if self.used is None and "error" in (hello := self._read(START_SECONDS)):
            raise ImportError(hello["error"])

    def ask(self, request: dict, seconds: float) -> bool:
        """Send a request and wait for its answer. Raises [`WorkerFailed`]; the worker is unusable then."""
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise WorkerFailed("a grading process died") from None
        return self._read(seconds)["same"]

    def _read(self, seconds: float) -> dict:
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self.buffer:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise WorkerFailed("a grading process stalled")
                chunk = os.read(self.process.stdout.fileno(), 65536)
                if not chunk:
                    raise WorkerFailed("a grading process died")
                self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        answer = json.loads(line)
        self.used = answer.get("used")
        return answer

    def kill(self) -> float:
        """End the process at once and reap it. Returns the processor time that it spent on its last request."""
        self.process.kill()
        spent = 0.0
        if self.process.returncode is None:
            _, status, usage = os.wait4(self.process.pid, 0)
            self.process.returncode = os.waitstatus_to_exitcode(status)
            spent = usage.ru_utime + usage.ru_stime - self.used if self.used is not None else 0.0
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # what the worker did not read any more
                pipe.close()
        return spent


class Budget:
    """Seconds of workers that the comparisons of one call may take together."""

    def __init__(self, seconds: float):
        self.left = seconds
        self.lock = threading.Lock()

    def spend(self, seconds: float) -> None:
        """Take off what a comparison took."""
        with self.lock:
            self.left -= seconds


class GradingPool:
    """A few worker processes, started when first needed and kept; by default one for each core of this process, at most
    8. A comparison may take `cpu_seconds` of processor time; after `wall_seconds` a worker is killed."""

    def __init__(self, size: int | None = None, cpu_seconds: float = 3.0, wall_seconds: float = 20.0):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        cores //= int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # the processes of a distributed run share the cores
        self.size = size or max(1, min(8, cores))
        self.cpu_seconds = cpu_seconds
        self.wall_seconds = wall_seconds
        self.slots = threading.BoundedSemaphore(self.size)
        self.lock = threading.Lock()
        self.idle: list[Worker] = []
        self.everyone: set[Worker] = set()

    def same(self, gold: str, prediction: str, budget: Budget | None = None) -> bool:
        """Whether two normalised answers are the same; `False` when the processor time for that runs out. Raises
        [`GradingFailed`] without a verdict, also from a second process, and `ImportError` without math-verify."""
        request = {"gold": gold, "prediction": prediction, "cpu_seconds": self.cpu_seconds}
        failure = WorkerFailed()
        for _ in range(2):
            with self.slots:
                if budget is not None and budget.left <= 0:
                    raise GradingFailed("the time for grading was used up")
                worker, started = self._take(), None
                try:
                    worker.wait_until_ready()
                    started = time.monotonic()
                    verdict = worker.ask(request, self.wall_seconds)
                except WorkerFailed as failed:
                    if self._drop(worker) >= self.cpu_seconds:
                        return False  # it had its time, in one long call that no signal interrupts
                    failure = failed
                    continue
                except BaseException:
                    self._drop(worker)
                    raise
                finally:
                    if budget is not None and started is not None:
                        budget.spend(time.monotonic() - started)
                with self.lock:
                    self.idle.append(worker)
                return verdict
        raise GradingFailed(str(failure))

    def _take(self) -> Worker:
        with self.lock:
            if self.idle:
                return self.idle.pop()
            worker = Worker()
            self.everyone.add(worker)
            return worker

    def _drop(self, worker: Worker) -> float:
        with self.lock:
            self.everyone.discard(worker)
        return worker.kill()

    def close(self) -> None:
        """Kill all workers; the pool starts new ones when it is used again."""
        with self.lock:
            workers, self.idle, self.everyone = list(self.everyone), [], set()
        for worker in workers:
            worker.kill()


_pool: GradingPool | None = None
_pool_lock = threading.Lock()


def shared_pool() -> GradingPool:
    """The pool of this process."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = GradingPool()
            atexit.register(_pool.close)
        return _pool


def _forget_pool() -> None:
    # A forked child must not talk through its parent's pipes.
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
