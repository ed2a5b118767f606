import json
from pathlib import Path

import pytest

from .running import ENVIRONMENT, PROBLEMS


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def benchmark(tmp_path) -> Path:
    path = tmp_path / "sums.jsonl"
    rows = [{"id": f"q{n}", "problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(PROBLEMS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
