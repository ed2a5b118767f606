"""Real server processes, and the real program as a process beside it."""

import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from triplets.running import KEY, REPORTED, generate

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def host() -> subprocess.Popen:
    """The process whose forks are the servers; it ends with this one."""
    command = [sys.executable, str(Path(__file__).with_name("scripted_server.py")), "--host"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextmanager
def servers() -> Iterator[Callable[..., str]]:
    """Start scripted servers; each call returns an address, all end with the block."""
    processes = []

    def start(*options: str) -> str:
        print(json.dumps(options), file=host().stdin, flush=True)
        address, process = host().stdout.readline().split()
        processes.append(int(process))
        return address

    try:
        yield start
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)


@pytest.fixture
def start_server() -> Iterator[Callable[..., str]]:
    """[`servers`] for one test."""
    with servers() as start:
        yield start


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., subprocess.Popen]:
    """Start `crop-trl triplets` with a key in its environment; no file can hold more than `file_size`."""

    def start_as_from_a_terminal(file_size: int | None) -> None:
        # Tests that run in the background inherit ignored interrupts, which the program then rightly ignores as well.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        if file_size:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))

    def run(*options: str, key: str | None = KEY, file_size: int | None = None) -> subprocess.Popen:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
        environment |= {"PYTHONPATH": str(ROOT), "OPENAI_LOG": "debug"} | ({"OPENAI_API_KEY": key} if key else {})
        return subprocess.Popen(
            [sys.executable, "-m", "crop_trl.commands.triplets", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=tmp_path,
            preexec_fn=lambda: start_as_from_a_terminal(file_size),
        )

    return run


@pytest.fixture
def problems(tmp_path: Path) -> Callable[..., str]:
    """Write a JSONL file of problems, given as texts or as whole rows."""

    def write(*rows: str | dict, name: str = "problems.jsonl") -> str:
        path = tmp_path / name
        with open(path, "w", encoding="utf-8") as file:
            for number, row in enumerate(rows):
                row = row if isinstance(row, dict) else {"id": f"p{number:04d}", "problem": row, "answer": str(number)}
                file.write(json.dumps(row) + "\n")
        return str(path)

    return write


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run over `REPORTED`, for all tests together."""
    folder = tmp_path_factory.mktemp("finished")
    rows = ({"id": f"p{number:04d}", "problem": text, "answer": number} for number, text in enumerate(REPORTED))
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch, servers() as start:
        patch.setenv("OPENAI_API_KEY", KEY)
        generate(start(), str(folder / "problems.jsonl"), folder / "out")
    return folder / "out"


@pytest.fixture
def output(finished: Path, tmp_path: Path) -> str:
    """A copy of it."""
    return str(shutil.copytree(finished, tmp_path / "out"))


@pytest.fixture(autouse=True)
def key_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
