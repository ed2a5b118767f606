"""Processes side by side, as many as there are places; whatever ends this program ends them too."""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from tqdm import tqdm

from ..files import InUseError, alone_in
from ..text import masked_arguments

_LOOK = 0.2
_BEGIN = "== started: "
# Seconds that a process has to end by itself.
_GRACE = 5


@dataclass(frozen=True)
class Task:
    """A command whose output goes to the end of a file; `lock` is held while somebody is at it."""

    name: str
    command: list[str]
    log: Path
    lock: Path | None = None

    @property
    def is_held(self) -> bool:
        """Whether somebody is at it now."""
        if self.lock is None or not self.lock.is_file():
            return False
        try:
            with alone_in(self.lock, self.name):
                return False
        except InUseError:
            return True


def run_tasks(
    tasks: Iterable[Task], jobs: int, gpus: Sequence[str], ended: Callable[[Task, int | OSError], None]
) -> None:
    """
    Run commands, `jobs` at a time, dealt over `gpus` if there are any; `ended` is told of each its status, or why it
    could not start. What another process is at has its turn after that.
    """
    waiting, running, told = list(tasks), {}, set()
    jobs = min(jobs, len(waiting))
    free = deque(range(jobs))
    environment = dict(os.environ)
    if jobs > 1:
        # Or each would take all cores for itself.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // jobs)))
    with _ending_with(running):
        while waiting or running:
            for task in list(waiting) if free else ():
                if task.is_held:
                    if task.name not in told:
                        tqdm.write(f"{task.name} is being trained by another process; its turn is when that has ended.")
                    told.add(task.name)
                elif free:
                    waiting.remove(task)
                    place = free.popleft()
                    own = {"CUDA_VISIBLE_DEVICES": gpus[place % len(gpus)]} if gpus else {}
                    try:
                        running[place] = _start(task, {**environment, **own})
                    except OSError as error:
                        free.append(place)
                        ended(task, error)
            time.sleep(_LOOK)
            for place, (task, process) in list(running.items()):
                if process.poll() is not None:
                    del running[place]
                    free.append(place)
                    if process.returncode > 0 and task.is_held:
                        waiting.append(task)  # it gave way to the other
                    else:
                        ended(task, process.returncode)


@contextmanager
def samplers(folder: Path, gpus: Sequence[str], slots: int) -> Iterator[tuple[list[str], Callable[[], None]]]:
    """
    A process on each GPU that samples for up to `slots` runs there, none with 0: the options of these runs, and what
    raises `OSError` where such a process has ended.
    """
    started: dict[str, tuple[Task, subprocess.Popen]] = {}

    def check() -> None:
        for task, process in started.values():
            if process.poll() is not None:
                raise OSError(
                    f"The process that samples for the runs has ended; {str(task.log)!r} says why. The same command "
                    "goes on."
                )

    with tempfile.TemporaryDirectory() as own, _ending_with(started):  # names of sockets are short
        prefix = str(Path(own, "sampler"))
        command = [sys.executable, "-m", "crop_trl.models.shared_sampling", prefix, "--slots", str(slots)]
        for gpu in (gpus or [None]) * bool(slots):
            card = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
            task = Task("sampler", command, folder / f"sampler.{gpu or 0}.txt")
            started[task.log.name] = _start(task, {**os.environ, **card})
        yield ["--shared_sampler", prefix] * bool(slots), check


def _start(task: Task, environment: dict[str, str]) -> tuple[Task, subprocess.Popen]:
    task.log.parent.mkdir(parents=True, exist_ok=True)
    with open(task.log, "a", encoding="utf-8") as log:
        command = shlex.join(masked_arguments(task.command)).replace("\n", "\\n")
        log.write(f"{_BEGIN}{command}\n")
        log.flush()
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        return task, subprocess.Popen(task.command, env=environment, preexec_fn=end_with_parent, **streams)


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Let Linux send this process a signal when the one that started it is gone, be it by kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


@contextmanager
def _ending_with(running: dict):
    """End all that runs, children of children too, when the block does."""
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))}
    try:
        yield
    finally:
        # Nothing is to come between.
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        processes = []
        for _, process in running.values():
            with suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                processes += [*parent.children(recursive=True), parent]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        for process in psutil.wait_procs(processes, timeout=_GRACE)[1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def last_lines(log: Path, count: int = 12) -> list[str]:
    """The end of what a task's last start said, without the states of a progress bar."""
    if not log.is_file():
        return ["(it is gone)"]
    text = log.read_bytes().decode("utf-8", "replace").rpartition(_BEGIN)[2].partition("\n")[2]
    lines = [line.rpartition("\r")[2] for line in text.split("\n")]
    return [line for line in lines if line.strip()][-count:]
