"""Evaluations of a dozen sums, started as users start them."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from crop_trl.commands import evaluate

from .server import ChatServer

ROOT = Path(__file__).parents[2]
STUDENT = ROOT / "examples" / "tiny_math" / "models" / "student"
PROBLEMS = 12


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "crop_trl.commands.evaluate", *map(str, arguments)]


# One thread: a model this small is only slowed down by more, all the more beside other work.
ENVIRONMENT = {**os.environ, "OPENAI_API_KEY": "key-of-the-test", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run(*arguments: str) -> subprocess.CompletedProcess:
    """The command in this process; those that are killed or kept from writing have one of their own."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            evaluate.main(list(map(str, arguments)))
        except SystemExit as stopped:
            code = 1
            print(stopped.code, file=err)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def kill_after(lines: int, file: Path, *arguments: str) -> None:
    """Start a run and kill it for good once its file has so many lines."""
    process = subprocess.Popen(
        command(*arguments), cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not (file.is_file() and file.read_bytes().count(b"\n") >= lines):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()


def sum_of(request: dict) -> int:
    first, _, second = request["messages"][0]["content"].split("?")[0].removeprefix("What is ").split(" ")
    return int(first) + int(second)


def answer(request: dict):
    """Right for even seeds; q1 has no box, q2 runs into the limit, q3 thinks (in the server's own field)."""
    right = sum_of(request) + request["seed"] % 2
    if right // 2 == 1:
        return f"It is {right}."
    if right // 2 == 2:
        return {"finish_reason": "length", "message": {"role": "assistant", "content": "It is \\boxed{"}}
    if right // 2 == 3:
        message = {"role": "assistant", "content": f"\\boxed{{{right}}}", "reasoning_content": "maybe \\boxed{6}"}
        return {"message": message}
    return f"It is \\boxed{{{right}}}."


def server_arguments(server: ChatServer, benchmark: Path, output: Path) -> list:
    return ["--model", "toy", "--sampler", "server", "--server_url", server.url, "--benchmark", f"sums={benchmark}",
            "--samples", 2, "--base_seed", 10, "--output", output]  # fmt: skip
