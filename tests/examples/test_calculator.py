"""The example in which a student calls a calculator, one step of it."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_one_step(tmp_path, monkeypatch, capsys):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    arguments = ["--method", "crop", "--steps", "1", "--held_out", "8"]
    monkeypatch.setattr("sys.argv", ["examples/calculator.py", *arguments])
    runpy.run_path("examples/calculator.py", run_name="__main__")
    *_, answer, numbers = capsys.readouterr().out.strip().splitlines()
    assert re.fullmatch(r"Right before \d.*%, after \d.*%; [1-9]\.\d calls an answer\.", numbers)
    steps = re.findall(r"(\d+) ([-+*/]) (\d+) =\[ (-?\d+)\]", answer)
    assert steps and len(steps) == answer.count("=")
    for a, sign, b, result in steps:
        assert eval(f"{a} {sign.replace('/', '//')} {b}") == int(result)
