"""
Every error of docs/troubleshooting.md is brought about as the page says, and says what the page says.

So are those of `data/plain_sentences.txt`, which need no page.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import urllib3

from crop_trl import METHODS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SETUP = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
GROUPS = [
    *("Data", "Settings", "Models and teachers", "Teacher servers", "Launching and GPUs", "Triplets"),
    "Evaluation and analysis",
]


@dataclass
class Entry:
    """One error: its heading, words, remark on how to run it, and what brings it about."""

    title: str
    message: str
    mark: str
    language: str
    code: str


ENTRY = re.compile(
    r"^### (?P<title>.+)\n\n```text\n(?P<message>.+)\n```\n\n\*\*Cause\.\*\* (?:.+\n)+\n"
    r"(?:<!-- (?P<mark>.+) -->\n)?```(?P<language>python|bash)\n(?P<code>(?:.*\n)+?)```$",
    re.MULTILINE,
)
ENTRIES = [Entry(**{name: text or "" for name, text in found.groupdict().items()}) for found in ENTRY.finditer(PAGE)]


def plain_entries() -> list[Entry]:
    """Sentences that say all there is to say: a line each, and below it what brings it about."""
    parts = [part.partition("\n") for part in (ROOT / "tests/data/plain_sentences.txt").read_text().split("\n\n")]
    codes = [textwrap.dedent(code) for _, _, code in parts]
    languages = ["bash" if re.search("^crop-trl ", code, re.MULTILINE) else "python" for code in codes]
    return [
        Entry(title=message[:50], message=message, mark="", language=language, code=code)
        for (message, _, _), language, code in zip(parts, languages, codes)
    ]


@pytest.fixture(scope="module")
def teacher_port():
    """A real server process that answers as vLLM does, under the name `toy`, with 100 tokens of context."""
    program = ROOT / "tests" / "scoring" / "scripted_teacher.py"
    process = subprocess.Popen([sys.executable, str(program), "0", "toy"], stdout=subprocess.PIPE, text=True)
    port = process.stdout.readline().strip()
    # As many entries as the tokenizer of the embedded task has, but other ones.
    words = [f"w{i}" for i in range(618)]
    urllib3.request("POST", f"http://127.0.0.1:{port}/script", json={"words": words})
    yield port
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder that looks like the repository's root and can be written to; what a snippet changes is put back."""
    for name in ("examples", "benchmarks", "accelerate_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "TEACHER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    environment, methods = dict(os.environ), dict(METHODS)
    yield tmp_path
    os.environ.clear()
    os.environ.update(environment)
    METHODS.clear()
    METHODS.update(methods)


def said_by_python(code: str) -> str:
    """Words of the exception that a snippet ends in."""
    names = {"__name__": "snippet"}
    exec(SETUP, names)
    with pytest.raises((ValueError, OSError, ImportError)) as caught:
        exec(code, names)
    return str(caught.value)


def said_by_command(command: str) -> str:
    """The last line that a command prints, or the error that it ends with."""
    program, name, *arguments = shlex.split(command)
    assert program == "crop-trl"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            assert import_module(f"crop_trl.commands.{name}").main(arguments)
            text = printed.getvalue()
        except SystemExit as ended:
            text = ended.code
    return text.strip().splitlines()[-1].removeprefix("error: ")


def said_by_launch(command: str) -> str:
    """The error of a real launch."""
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *shlex.split(command.removeprefix("accelerate launch "))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"},
    )
    assert done.returncode
    # Two processes may write on one line.
    return done.stderr.split("error: ")[1].splitlines()[0]


def as_pattern(message: str) -> str:
    return ".+".join(re.escape(part) for part in message.split("…"))


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(e, id=e.title, marks=[pytest.mark.slow] if e.mark == "slow" else [])
        for e in [*ENTRIES, *plain_entries()]
    ],
)
def test_the_error_is_as_the_page_says(entry, repository, request):
    if entry.mark == "where vllm is not installed" and find_spec("vllm"):
        pytest.skip("vllm is installed")
    message, code = entry.message, entry.code
    if entry.mark == "with a server":
        port = request.getfixturevalue("teacher_port")
        message, code = (text.replace("127.0.0.1:8000", f"127.0.0.1:{port}") for text in (message, code))
    if entry.language == "python":
        said = said_by_python(code)
    else:
        *preparations, command = code.strip().replace("\\\n", " ").splitlines()
        for line in preparations:
            subprocess.run(["bash", "-c", line], check=True)
        said = said_by_launch(command) if command.startswith("accelerate") else said_by_command(command)
    assert re.fullmatch(as_pattern(message), said), f"the page says\n{message}\nand it was\n{said}"


def test_the_page_is_read_whole():
    assert len(ENTRIES) == PAGE.count("\n### ") >= 25
    assert re.findall(r"^## (.+)$", PAGE, re.MULTILINE) == GROUPS
    assert all("**Remedy.**" in part for part in PAGE.split("\n### ")[1:])
    assert len({entry.message for entry in ENTRIES}) == len(ENTRIES)
