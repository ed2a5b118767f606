"""What the benchmarks answer to options that cannot work, before anything is started, and how they count."""

import sys

import fits
import pytest
import throughput
from trainers import StepClock


@pytest.mark.parametrize(
    ("script", "options", "sentence"),
    [
        (throughput, ["--launch", "zero9"], "--launch 'zero9' is not known: choose among cpu, ddp, fsdp2"),
        (throughput, ["--launch", "ddp", "--student", "3B"], "invalid choice: '3B'"),
        (throughput, ["--launch", "ddp", "--processes", "0"], "--processes must be at least 1, got 0"),
        (
            throughput,
            ["--launch", "ddp", "--processes", "3", "--prompts", "2", "--rows", "2"],
            "--prompts 2 x 4 responses do not divide into --processes 3 x --rows 2",
        ),
        (throughput, ["--compare", "ddp-2", "zero2-2"], "--compare 'ddp-2' has no result in"),
        (throughput, [], "say what to do: --launch, --compare or --prepare"),
        (fits, ["--config", "run.yaml", "--teacher", "3B"], "invalid choice: '3B'"),
        (fits, ["--config", "nowhere.yaml"], "error: 'nowhere.yaml' cannot be read (No such file or directory)"),
    ],
)
def test_options_that_cannot_work(tmp_path, monkeypatch, capsys, script, options, sentence):
    output = ["--results", str(tmp_path / "results")] if script is throughput else []
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *options, *output])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code not in (0, None)
    assert sentence in (ended.value.code if isinstance(ended.value.code, str) else capsys.readouterr().err)
    if options:
        assert not list(tmp_path.iterdir())


def test_steps_that_compiled_are_not_counted():
    clock = StepClock("cpu")
    clock.rows = [{"method": "crop", "step": s, "compiling": c} for s, c in ((50, 40), (31, 20), (3, 0), (4, 0.01))]
    assert clock.median("step", "crop") == 3.5
    assert clock.median("step", "crop", skip=3) == 4
    clock.rows = clock.rows[:2]
    assert clock.median("step", "crop") == 31
