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


class WorkerFailed(Exception):
    """The worker died or was killed; `reason` is `"time"`, `"died"` or why it could not start."""


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
        self.ready = False
        self.buffer = b""

    def ask(self, request: dict, seconds: float) -> dict:
        """Send a request and wait for its answer. Raises [`WorkerFailed`]; the worker is unusable then."""
        if not self.ready:
            hello = self._read(START_SECONDS)
            if "error" in hello:
                raise ImportError(hello["error"])
            self.ready = True
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise WorkerFailed("died") from None
        return self._read(seconds)

    def _read(self, seconds: float) -> dict:
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self.buffer:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise WorkerFailed("time")
                chunk = os.read(self.process.stdout.fileno(), 65536)
                if not chunk:
                    raise WorkerFailed("died")
                self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    def kill(self) -> None:
        """End the process at once and reap it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # what the worker did not read any more
                pipe.close()


class GradingPool:
    """
    A few worker processes, started when first needed and kept.

    Args:
        size (`int`, *optional*):
            Most workers at once; by default this process's share of the cores, at most 8.
        cpu_seconds (`float`, *optional*, defaults to `3.0`):
            Processor time that one comparison may take.
        wall_seconds (`float`, *optional*, defaults to `20.0`):
            Time after which a worker is killed, whatever it does.
    """

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

    def same(self, gold: str, prediction: str) -> bool:
        """
        Whether two normalised answers are the same; `False` when that takes too long.

        Raises:
            `ImportError`: math-verify is not installed.
        """
        request = {"gold": gold, "prediction": prediction, "cpu_seconds": self.cpu_seconds}
        with self.slots:
            for attempt in range(2):
                worker = self._take()
                try:
                    answer = worker.ask(request, self.wall_seconds)
                except BaseException as failure:
                    self._drop(worker)
                    # A worker may have been killed from outside (out of memory, say): one more try, in a fresh one.
                    if isinstance(failure, WorkerFailed) and str(failure) == "died" and attempt == 0:
                        continue
                    if isinstance(failure, WorkerFailed):
                        return False
                    raise
                with self.lock:
                    self.idle.append(worker)
                return answer["same"]
        return False

    def _take(self) -> Worker:
        with self.lock:
            if self.idle:
                return self.idle.pop()
            worker = Worker()
            self.everyone.add(worker)
            return worker

    def _drop(self, worker: Worker) -> None:
        with self.lock:
            self.everyone.discard(worker)
        worker.kill()

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
