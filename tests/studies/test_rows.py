"""Rows of a study: from folders and files, beside those that are there, and never of two runs of one name."""

import importlib.util
import json
import sys

import pandas
import pytest
from studies.made_rows import DEFAULTS, cells, row, rows

from crop_trl.commands import study
from crop_trl.files import alone_in, read_rows
from crop_trl.studies.naming import NamedRun
from crop_trl.studies.rows import row_of, stored_rows, write_rows
from crop_trl.studies.study import Study
from crop_trl.studies.tables import HELD_OUT, compared_in, study_markdown
from crop_trl.training.results import RunResult


def test_rows_come_back_whatever_they_hold(tmp_path):
    found = {r["run"]: r for r in rows()}
    first, second = list(found)[:2]
    found[first] |= {"odd": 1, "dict": {"a": 1}, "list": [0.0], "large": 2**70}
    found[second] |= {"odd": "one", "list": [1.0, 2.0]}
    write_rows(tmp_path / "runs.parquet", found)
    again = {row["run"]: row for row in stored_rows(tmp_path / "runs.parquet")}
    assert list(again) == list(found) and again[first]["odd"] == "1" and again[second]["odd"] == "one"
    assert again[first]["large"] == str(2**70) and again[second]["large"] is None
    assert again[first]["dict"] == '{"a": 1}' and again[second]["list"] == [1.0, 2.0]
    assert all(again[key][name] == found[key][name] for key in found for name in DEFAULTS)
    assert list(read_rows(tmp_path / "runs.parquet")[0])[:3] == ["run", "world", "method"]
    write_rows(tmp_path / "none.parquet", {})
    assert stored_rows(tmp_path / "none.parquet") == []


def test_what_is_no_table_of_a_study_gets_one_sentence(tmp_path):
    right = rows()[0]
    wrong = {
        "settings": (None, "[1]", "{"),
        "evaluation": ("no JSON", "[1]"),
        "seed": ("0",),
        "accuracy_after": ("0.5",),
        "kept_share": ("0.2",),
    }
    odd = [(name, right | {name: value}) for name, values in wrong.items() for value in values]
    odd += [(name, {k: v for k, v in right.items() if k != name}) for name in ("run", "world", "method", "settings")]
    files = [(name, pandas.DataFrame([content])) for name, content in odd]
    for number, (_, content) in enumerate(files):
        content.to_parquet(tmp_path / f"{number}.parquet")
    pandas.DataFrame([{"a": 1}]).to_parquet(tmp_path / "other.parquet")
    (tmp_path / "result.json").write_text(json.dumps(right, indent=2))
    (tmp_path / "broken.parquet").write_bytes(b"no")
    said = {}
    for name in (*map("{}.parquet".format, range(len(files))), "result.json", "other.parquet", "broken.parquet"):
        with pytest.raises(ValueError) as raised:
            stored_rows(tmp_path / name)
        said[name] = str(raised.value).removeprefix(repr(str(tmp_path / name)))
    sentence = " is no table of a study: a row has no right `{}`; give the runs.parquet of one.".format
    expected = {f"{number}.parquet": sentence(name) for number, (name, _) in enumerate(files)}
    expected["result.json"] = " is no Parquet file; give the runs.parquet of a study."
    expected |= {"other.parquet": sentence("run"), "broken.parquet": said["broken.parquet"]}
    assert said == expected and "is no Parquet file" in said["broken.parquet"]


def finished(output, after: float = 0.5, seed: int = 0, rate: float = 1e-6, **evaluated: float):
    """The folder of a run whose student has these shares of right answers on benchmarks."""
    run = NamedRun("w", f"method=crop,seed={seed}", {"method": "crop", "seed": seed, "learning_rate": rate}, DEFAULTS)
    run.claim(output / run.key)
    RunResult("crop", 0.4, after, seed=seed, seconds=7.5).write(output / run.key)
    (output / run.key / "evaluation").mkdir()
    both = {"samples": 2, "problems": 1, "verdicts": {"1": [0, 1]}}
    found = {name: {"mean": mean, "pass": 0.6, **both} for name, mean in evaluated.items()}
    (output / run.key / "evaluation/results.json").write_text(json.dumps({"benchmarks": found}))
    return output / run.key


def test_what_a_student_was_evaluated_on_stays_with_its_row(tmp_path):
    """In whatever order folders and tables come, and with its own training alone."""

    def benchmarks(*others):
        (found,) = Study(tmp_path / "here", {}, others, DEFAULTS).rows.values()
        means = {name: part["mean"] for name, part in json.loads(found.get("evaluation") or "{}").items()}
        assert all(found[f"{name}_mean"] == mean for name, mean in means.items())
        assert not means or found["average"] == pytest.approx(sum(means.values()) / len(means))
        return means

    for name, measured in (("one", {"x": 0.25}), ("two", {"y": 0.75}), ("three", {"x": 0.5})):
        finished(tmp_path / name, **measured)
    for name in ("one", "two"):
        study = Study(tmp_path / name, {}, [], DEFAULTS)
        study.save()
    one, two = (tmp_path / name / "runs.parquet" for name in ("one", "two"))
    finished(tmp_path / "here")
    assert benchmarks() == {} and benchmarks(one) == {"x": 0.25} and benchmarks(two, one) == {"x": 0.25, "y": 0.75}
    study = Study(tmp_path / "here", {}, [one], DEFAULTS)
    study.save()
    assert benchmarks() == {"x": 0.25} and benchmarks(two) == {"x": 0.25, "y": 0.75}
    # A later evaluation wins, and another training has none of it.
    (tmp_path / "three/w").rename(tmp_path / "here/three")
    (tmp_path / "here/w").rename(tmp_path / "before")
    (tmp_path / "here/three").rename(tmp_path / "here/w")
    assert benchmarks(two) == {"x": 0.5, "y": 0.75}
    RunResult("crop", 0.4, 0.6, seed=0, seconds=9.5).write(tmp_path / "here/w/method=crop,seed=0")
    assert benchmarks(two) == {"x": 0.5}


def test_no_table_is_made_of_two_runs_of_one_name(tmp_path, capsys):
    """Whether they come from a folder or from a table; of the untrained student only what is asked of it counts."""
    for name, rate in (("one", 1e-6), ("two", 1e-5)):
        finished(tmp_path / name, rate=rate)
        given = {"method": "base", "learning_rate": rate, "model_name_or_path": "m"}
        base = NamedRun("w", "method=base", given, DEFAULTS)
        base.claim(tmp_path / name / base.key)
        RunResult("base", None, None, seed=0).write(tmp_path / name / base.key)
        assert study.main(["--table", "--output", str(tmp_path / name)]) == 0
    first, second = (tmp_path / name / "runs.parquet" for name in ("one", "two"))
    third = tmp_path / "two/w/method=crop,seed=0/settings.json"
    sentence = "error: w/method=crop,seed=0 of '{}' is of a run with `learning_rate` {}, and in '{}' it is {}; give "
    for output, others, said in (
        ("new", (first, second), (second, 1e-05, first, 1e-06)),
        ("one", (second,), (first, 1e-06, second, 1e-05)),
        ("two", (), (third, 2e-05, second, 1e-05)),
    ):
        third.write_text(third.read_text().replace("1e-05", "2e-05") if not others else third.read_text())
        with pytest.raises(SystemExit) as stopped:
            study.main(["--table", "--output", str(tmp_path / output), *["--rows"][: len(others)], *map(str, others)])
        assert str(stopped.value).startswith(sentence.format(*said)), stopped.value
    write_rows(tmp_path / "base.parquet", {r["run"]: r for r in read_rows(second) if r["method"] == "base"})
    assert study.main(["--table", "--output", str(tmp_path / "one"), "--rows", str(tmp_path / "base.parquet")]) == 0


def test_a_dry_run_writes_nothing_and_an_unmeasured_student_does_not_decide_the_measure(tmp_path, capsys):
    finished(tmp_path / "out", x=0.25)
    (tmp_path / "x.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n')
    (tmp_path / "out/w/method=crop,seed=0/model.safetensors").touch()
    given = ["--table", "--output", str(tmp_path / "out"), "--benchmarks", f"y={tmp_path}/x.jsonl"]
    before = sorted(tmp_path.rglob("*"))
    for options in (["--table", "--output", given[2]], given):
        assert study.main([*options, "--dry_run"]) == 0 and sorted(tmp_path.rglob("*")) == before
    assert capsys.readouterr().out.count("\ncrop-trl evaluate --model ") == 2
    # Where there is no vLLM that is said once, and what cannot be evaluated leaves no row.
    if not importlib.util.find_spec("vllm"):
        with pytest.raises(SystemExit, match=r"^error: `--benchmarks` needs vLLM: install crop-trl\[vllm\], or"):
            study.main(given)
    assert study.main([*given, "--", "--sampler", "server", "--server_url", "http://localhost:9/v1"]) == 1
    assert [row["method"] for row in read_rows(tmp_path / "out/runs.parquet")] == ["crop"]
    found = [r | {"evaluation": json.dumps({"x": {"mean": 0.5, "samples": 1, "problems": 1}})} for r in rows()]
    assert compared_in(found) == compared_in([*found, row("base", 0, None)]) == ["x"]
    assert compared_in([*found, row("tip", 0, 0.5)]) == compared_in([row("base", 0, None)]) == [HELD_OUT]


def test_what_cannot_be_compared_is_said_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    folder = finished(tmp_path / "out")
    (folder / "model.safetensors").touch()
    (tmp_path / "x.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n')
    given = ["--table", "--output", str(tmp_path / "out"), "--benchmarks", f"x={tmp_path}/x.jsonl"]
    assert study.main([*given, "--dry_run", "--against", "base"]) == 0 and "# w/method=base" in capsys.readouterr().out
    for dry in (["--dry_run"], []):
        with pytest.raises(
            SystemExit, match="^error: `--against` 'cropp' is the method of none of these runs; choose am"
        ):
            study.main([*given, *dry, "--against", "cropp", "--", "--sampler", "hf"])
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "statsmodels.stats.multitest", None)
            with pytest.raises(
                SystemExit, match=r"^error: `--against` needs the package statsmodels; install crop-trl\["
            ):
                study.main([*given, *dry, "--against", "crop", "--", "--sampler", "hf"])
    assert capsys.readouterr().out == "" and not (tmp_path / "out/runs.parquet").exists()


def test_rows_that_are_saved_while_a_study_waits_for_its_folder_stay(tmp_path, monkeypatch):
    found = {each["run"]: each for each in rows()}
    first, *others = found
    (tmp_path / "out").mkdir()
    write_rows(tmp_path / "out/runs.parquet", {first: found[first]})
    write_rows(tmp_path / "more.parquet", {run: found[run] for run in others})
    given = ["--table", "--output", str(tmp_path / "out")]
    with monkeypatch.context() as patch:

        def late(*where):
            patch.setattr(study, "alone_in", alone_in)
            assert study.main([*given, "--rows", str(tmp_path / "more.parquet")]) == 0
            return alone_in(*where)

        patch.setattr(study, "alone_in", late)
        assert study.main(given) == 0
    assert {each["run"] for each in read_rows(tmp_path / "out/runs.parquet")} == set(found)


def test_what_a_study_sets_for_each_run_is_no_option_for_all(tmp_path):
    """Else every row would have the numbers of one model."""
    finished(tmp_path / "out")
    given = ["--table", "--output", str(tmp_path / "out"), "--dry_run", "--benchmarks", "AIME24", "--"]
    for option in (
        "--model",
        "--model_revision",
        "--output=x",
        "--lab",
        "--training-run",
        "--benchmark",
        "--regrade",
        "--compare",
    ):
        name = {"--lab": "label"}.get(option, option.strip("-").partition("=")[0].replace("-", "_"))
        with pytest.raises(SystemExit, match=f"^error: `--{name}` after -- would be that of every run, and a study"):
            study.main([*given, option, *["y"] * ("=" not in option)])


def test_a_result_that_is_none_gets_one_sentence_and_not_a_number_is_none(tmp_path):
    folder = finished(tmp_path, x=0.25)
    results, evaluation = folder / "result.json", folder / "evaluation/results.json"
    run, measured = (json.loads(file.read_text()) for file in (results, evaluation))
    x = measured["benchmarks"]["x"]
    odd = [(results, run | each) for each in ({"accuracy_after": "x"}, {"interval_after": 5}, {"statistics": None})]
    odd += [(results, run | {"statistics": {"kept_share": "abc"}})]
    odd += [(evaluation, each) for each in ({}, {"benchmarks": []}, {"benchmarks": {"x": {"mean": 1}}})]
    odd += [(evaluation, {"benchmarks": {"x": x | each}}) for each in ({"mean": "a"}, {"verdicts": {"1": []}})]
    for file, content in odd:
        right = file.read_text()
        file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=f"{file}' has no right .*; .*delete it") as raised:
            row_of(folder, "w/a", DEFAULTS)
        assert len(str(raised.value).splitlines()) == 1, raised.value
        file.write_text(right)
    results.write_text(json.dumps(run | {"accuracy_after": float("nan"), "statistics": {"kept_share": float("nan")}}))
    found = row_of(folder, "w/a", DEFAULTS)
    assert found["accuracy_after"] is None and found["kept_share"] is None and found["x_mean"] == 0.25
    assert "nan" not in study_markdown([found], DEFAULTS)


def test_tables_are_printed_where_nothing_can_be_written_and_nothing_is_made_of_nothing(tmp_path, capsys):
    write_rows(tmp_path / "rows.parquet", {r["run"]: r for r in rows()})
    (tmp_path / "file").write_text("")
    given = ["--table", "--rows", str(tmp_path / "rows.parquet"), "--output"]
    with pytest.raises(SystemExit, match="holds no finished run"):
        study.main(["--table", "--output", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()
    # Nor a row of the untrained student for a benchmark that there is not.
    with pytest.raises(SystemExit, match=r"x.jsonl' does not exist"):
        study.main([*given, str(tmp_path / "none"), "--benchmarks", str(tmp_path / "x.jsonl")])
    assert len(read_rows(tmp_path / "none/runs.parquet")) == len(rows())
    with alone_in(tmp_path / "running/.lock", "here"):
        for folder, reason in (("file/out", "cannot be written"), ("running", "is in use by another run")):
            assert study.main([*given, str(tmp_path / folder)]) == 0
            told = capsys.readouterr()
            assert cells(told.out, "crop")[0] == "4" and "The tables are printed only: `output`" in told.err
            assert reason in told.err and not list((tmp_path / "running").glob("[!.]*"))
    assert study.main([*given, str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").glob("[!.]*")) == ["runs.parquet", "tables.md"]
    assert (tmp_path / "out/tables.md").read_text() in capsys.readouterr().out
