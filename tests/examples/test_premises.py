"""The study of the premises: its grids and the script that draws them name the same worlds."""

import runpy
from pathlib import Path

import pytest
import yaml

from crop_trl.commands.study import name_run
from crop_trl.studies.rows import write_rows
from crop_trl.studies.study import runs_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/studies/draw_premises.py"


def test_the_grids_bring_every_point_of_the_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    base = yaml.safe_load((ROOT / "examples/configs/tiny_math.yaml").read_text())
    runs = runs_of(sorted((ROOT / "examples/studies").glob("premises_*.yaml")), name_run)
    gain = {"random": 0.0, "crop": 0.01, "opd": 0.02}
    rows = {}
    for key, planned in runs.items():
        settings = base | planned.run.settings
        accuracy = 0.5 + 0.05 * settings["seed"] + gain[settings["method"]]
        rows[key] = {**settings, "run": key, "settings": "{}", "accuracy_after": accuracy}
    assert len(rows) == 108
    other = "tiny/method=crop,max_steps=20,seed=0"
    rows[other] = {**rows["tiny/method=crop,seed=0"], "run": other, "accuracy_after": 0.9}
    write_rows(tmp_path / "runs.parquet", rows)
    script = runpy.run_path(str(SCRIPT))
    found = script["gains"](list(rows.values()))
    wanted = {(name, value, "crop") for name, (_, values) in script["PREMISES"].items() for value in values}
    wanted |= {(name, value, "opd") for name, value, _ in wanted if name != "conditions" or value == 4}
    assert set(found) == wanted
    for (_, _, method), each in found.items():
        assert each == pytest.approx([100 * gain[method]] * 3)
    monkeypatch.setattr(
        "sys.argv", ["draw_premises.py", str(tmp_path / "runs.parquet"), "--output", str(tmp_path / "a.png")]
    )
    script["main"]()
    assert "sharpness 1.5, crop: +1.0 (+1.0 to +1.0), 3 seeds" in capsys.readouterr().out
    assert (tmp_path / "a.png").stat().st_size > 10_000
