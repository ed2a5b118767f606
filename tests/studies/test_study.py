"""`crop-trl study`: real runs, killed on their way and gone on with; what it refuses, keeps and says."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from studies.short_runs import alone, make_grid, start, wait_for

from crop_trl.commands import study, train
from crop_trl.evaluation.benchmarks import Benchmark
from crop_trl.files import read_rows
from crop_trl.planning.shape import shape_of
from crop_trl.studies.naming import NamedRun, named_run
from crop_trl.studies.running import Task, run_tasks
from crop_trl.studies.study import PlannedRun, Study, chosen_runs, runs_of
from crop_trl.training.checkpoints import last_with_steps_left
from crop_trl.training.results import RunResult

MUST = {"world", "method", "retention_ratio", "num_counterfactuals", "learning_rate", "seed", "commit"}
MUST |= {"accuracy_before", "accuracy_after", "accuracy_after_low", "length_after", "passes", "seconds", "tokens"}
MUST |= {"kept_share", "gap_kept_first", "gap_kept_last", "run", "settings"}


def run_as_agent(folder: Path, grid: Path, monkeypatch, capsys, **values) -> None:
    """One run of a grid by the command of `wandb agent`, without a server, and once more when it is finished."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    base = folder / "base.yaml"
    base.write_text(base.read_text() + f"runs_dir: {folder / 'out'}\n")
    parameters = {name: {"value": value} for name, value in values.items()}
    flags = utils.create_sweep_command_args({"args": parameters})["args"]
    command = [f for w in yaml.safe_load(grid.read_text())["command"] for f in (flags if w == "${args}" else [w])]
    assert command[:4] == ["crop-trl", "train", "--accelerate_config", "cpu"]
    (folder / "config.yaml").write_text(yaml.safe_dump({"wandb_version": 1, **parameters}))
    environment = {"WANDB_MODE": "offline", "WANDB_SWEEP_ID": "abcd1234", "WANDB_RUN_ID": "run1"}
    environment |= {"WANDB_DIR": str(folder), "WANDB_DATA_DIR": str(folder / "data")}
    environment["WANDB_SWEEP_PARAM_PATH"] = str(folder / "config.yaml")
    words = [sys.executable, "-m", "crop_trl.commands", *command[1:]]
    done = subprocess.run(words, env={**alone(), **environment}, capture_output=True, text=True)
    assert done.returncode == 0 and "on 8 held-out problems" in done.stdout, done.stderr
    assert len(list(folder.glob("wandb/offline-run-*-run1/run-run1.wandb"))) == 1
    with monkeypatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        capsys.readouterr()
        train.main(command[4:])
        assert "is finished; nothing is left to do." in capsys.readouterr().out


@pytest.mark.multiprocess
def test_a_study_that_is_killed_goes_on_and_ends_with_a_row_for_each_run(tmp_path, monkeypatch, capsys):
    """An agent has finished one run; the kill leaves one half done, and the last fails."""
    grid = make_grid(tmp_path, retention_ratio=[0.2, 0.5], method=["random"])
    fails = make_grid(tmp_path, "fails.yaml", max_prompt_length=[5], method=["random"])
    output = tmp_path / "out"
    first, second = (output / f"short/method=random,{more}seed=0" for more in ("", "retention_ratio=0.5,"))
    run_as_agent(tmp_path, grid, monkeypatch, capsys, retention_ratio=0.2, method="random")
    # Had it been killed before its result, it would have gone on from the first.
    assert {path.name for path in first.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}
    process = start(output, grid, fails)
    wait_for((second / "checkpoint-1").is_dir, process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    assert len(children) == 2 and not psutil.wait_procs(children, timeout=1800)[1]
    process.communicate()
    saved = (first / "result.json").stat().st_mtime_ns
    process = start(output, grid, fails, options=("--jobs", "2"))
    said = process.communicate()[0]
    assert process.returncode == 1, said
    assert "Runs: 1 finished, 2 to go, 2 at a time." in said
    assert re.search(r"\n.*retention_ratio=0\.5\S* is finished: \d+\.\d% before, \d+\.\d% after\.\n", said), said
    assert "error: No row is left of 16: " in said and "1 failed: short/method=random,max_prompt_length=5" in said
    assert (first / "result.json").stat().st_mtime_ns == saved
    assert "Resuming from" in (second / "log.txt").read_text()
    assert json.loads((second / "result.json").read_text())["steps"] == 2
    rows = read_rows(output / "runs.parquet")
    assert [row["retention_ratio"] for row in rows] == [0.2, 0.5] and MUST <= set(rows[0])
    assert [sum(row["problems_after"]) / 8 for row in rows] == [row["accuracy_after"] for row in rows]
    assert [row["world"] for row in rows] == ["short"] * 2 and rows[1]["kept_share"] > 2 * rows[0]["kept_share"]

    # Tables, with a benchmark that is measured for them.
    heldout = tmp_path / "eval_dataset_name.jsonl"
    options = ["--table", "--against", "random", "--benchmarks", f"short={heldout}", "--jobs", "2"]
    options += "-- --sampler hf --samples 2 --max_tokens 32".split()
    assert study.main(["--output", str(output), "--dry-run", *options]) == 0
    assert capsys.readouterr().out.count("\ncrop-trl evaluate --model ") == 3 and not list(output.rglob("evaluation*"))
    assert study.main(["--output", str(output), *options]) == 0
    printed = capsys.readouterr().out
    assert "## Benchmarks (%)" in printed and "| random, retention_ratio 0.5 |" in printed
    assert (output / "tables.md").read_text() in printed
    rows = read_rows(output / "runs.parquet")
    assert sorted(row["method"] for row in rows) == ["base", "random", "random"] and "| base " in printed
    assert all(row["average"] == row["short_mean"] for row in rows)
    assert all((row["seconds"] or 0) > 0 or row["method"] == "base" for row in rows)
    evaluated = (first / "evaluation/results.json").stat().st_mtime_ns
    study.main(["--output", str(output), *options])
    assert (first / "evaluation/results.json").stat().st_mtime_ns == evaluated
    capsys.readouterr()
    # Asked otherwise than it was.
    (tmp_path / "other.jsonl").write_text(heldout.read_text().replace('problem": "', 'problem": "Now: '))
    for was, now, sentence in (
        (f"short={heldout}", f"short={tmp_path}/other.jsonl", "was evaluated on 'short' with problems '"),
        (f"short={heldout}", f"short={tmp_path}/none.jsonl", "none.jsonl' does not exist"),
        ("32", "16", "was evaluated on 'short' with max_tokens 32, not 16; ask as before, or delete its evaluation"),
    ):
        with pytest.raises(SystemExit, match=re.escape(sentence)):
            study.main(["--output", str(output), *({was: now}.get(word, word) for word in options)])

    # Without the run that fails. Checkpoints went with the row of their run, now weights may go.
    assert not list(output.rglob("checkpoint-*")) and len(list(output.rglob("*.safetensors"))) == 2
    assert study.main([str(grid), "--output", str(output)]) == 0 and len(list(output.rglob("*.safetensors"))) == 2
    assert study.main([str(grid), "--output", str(output), "--discard_models"]) == 0
    assert not list(output.rglob("*.safetensors"))
    benchmark = Benchmark("AIME24", (), 8, 1000, "AIME24")
    everything = study.Study(output, {}, [], study.train_parser().defaults())
    left = everything.evaluations(["--benchmark", "AIME24"], [benchmark], print)
    assert [task.name for task in left] == ["short/method=base"]
    # The untrained student is asked as the trained ones are.
    assert shlex.join(["--chat_template_kwargs", '{"mood": "calm"}', "--conversational"]) in shlex.join(left[0].command)
    assert "2 finished runs have no weights here and are not measured." in capsys.readouterr().out

    # On another machine the rows are all that is left.
    rows = read_rows(output / "runs.parquet")
    shutil.copy(output / "runs.parquet", tmp_path / "rows.parquet")
    for elsewhere in (["--rows", str(tmp_path / "rows.parquet")], []):
        assert study.main([str(grid), "--output", str(tmp_path / "elsewhere"), *elsewhere]) == 0
        assert "Runs: 2 finished, 0 to go" in capsys.readouterr().out
    assert read_rows(tmp_path / "elsewhere/runs.parquet") == rows
    # There, too, it is known how they were evaluated.
    other = ["--output", str(tmp_path / "elsewhere"), *options]
    assert study.main(other) == 0 and "not known" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="was evaluated on 'short' with max_tokens 32, not 16"):
        study.main(["16" if word == "32" else word for word in other])
    assert not list((tmp_path / "elsewhere").glob("*/*"))
    # Another run under the name of a finished one.
    base = tmp_path / "base.yaml"
    base.write_text(base.read_text().replace("max_steps: 2", "max_steps: 3"))
    for folder in ("elsewhere", "out"):
        with pytest.raises(
            SystemExit, match="error: .*method=random.* is of a run with `max_steps` 2, and in this one"
        ):
            study.main([str(grid), "--output", str(tmp_path / folder), "--dry_run"])


def test_a_mistake_gets_one_sentence(tmp_path):
    grid = str(make_grid(tmp_path, seed=[0]))
    for words, sentence in (
        ([grid, "--gpus", "0,,1"], "error: `--gpus` names '', which is no GPU; give numbers such as 0,1."),
        ([grid, "--only", "crop"], "error: `--only` takes settings such as method=crop, got 'crop'."),
        ([grid, "--only", "seed=1"], "error: `--only`: no run has seed=1; there is 0."),
        ([grid, "--jobs", "0"], "error: `jobs` must be a whole number of at least 1, got 0."),
        ([], "error: No GRID.yaml is given; name one, or say `--table` for the tables of what is there."),
        (["--table"], "holds no finished run; leave out `--table` to run them first."),
        ([grid, "--table"], "holds no finished run of these grids; leave out `--table` to run them first."),
        ([grid, "--against", "opd"], "error: `--against` and `--benchmarks` are for tables; add `--table` once"),
        ([grid, "--benchmarks", "AIME24"], "error: `--against` and `--benchmarks` are for tables; add `--table` once"),
        (
            [grid, "--rows", str(tmp_path / "none.parquet")],
            "none.parquet' is no file; give the runs.parquet of a study.",
        ),
        ([str(tmp_path / "none.yaml")], "none.yaml' cannot be read"),
        (["--table", "--", "--samples", "2"], "goes to `crop-trl evaluate`; name what it measures by `--benchmarks`."),
        ([grid, "--gpu", "0", "--tabel"], "error: `--tabel` is no option of `crop-trl study`; did you mean `--table`?"),
    ):
        with pytest.raises(SystemExit) as stopped:
            study.main(["--output", str(tmp_path / "out"), *words])
        assert sentence in str(stopped.value) and len(str(stopped.value).splitlines()) == 1, stopped.value


def test_only_takes_those_runs_of_the_grids_that_have_the_settings(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    runs = runs_of([Path("examples/studies/gsm_rates.yaml")], study.name_run)
    some = chosen_runs(runs, ["learning_rate=1e-5", "method=crop", "method=opd", "num_counterfactuals=1"])
    assert set(some) == {"gsm/method=crop,seed=0", "gsm/method=opd,seed=0"}
    assert chosen_runs(runs, []) == runs and len(chosen_runs(runs, ["heatmap=false", "method=opd"])) == 3


def test_what_a_run_would_be_refused_for_is_known_before_any_starts(tmp_path, capsys):
    mistakes = {
        "method": ("crpo", "Unknown method 'crpo': choose one of base, "),
        "retention_ratio": (1.5, "`retention_ratio` must lie in (0, 1], got 1.5"),
        "beta": (0.1, "`beta=0.1` does not work here"),
        "reward": ("acc", "`reward` 'acc' is not known"),
        "dataset_name": ("./none.jsonl", "`dataset_name` './none.jsonl' does not exist"),
        "eval_dataset_revision": ("v2", "`eval_dataset_revision` 'v2' is for the hub, and "),
        "teacher_revision": ("v2", "`teacher_revision` 'v2' is for the hub, and "),
        "model_revision": ("v2", "`model_revision` 'v2' is for the hub, and "),
        "model_name_or_path": ("runs/no/model", "`model_name_or_path` 'runs/no/model' is no folder here"),
        "teacher_model_name_or_path": (None, "`--teacher_model_name_or_path` is not set"),
        "teachers": ({"a": {"placement": "offload"}, "b": "org/t"}, "`teacher_model_name_or_path` None is no folder"),
        "teacher_init_kwargs": ({"dtype": "float17"}, "`dtype` 'float17' in `teacher_init_kwargs` is no type"),
        "seed": (-1, "`seed` must be a whole number of at least 0, got -1"),
        "prompt_template": ("Solve it.", "`prompt_template` must contain {problem} exactly once"),
        "chat_template_kwargs": ("{mood: calm", "`chat_template_kwargs` "),
        "prompts_per_step": (3, "`prompts_per_step` 3 x `num_generations` 4 = 12 responses do not divide"),
    }
    grids = [make_grid(tmp_path, f"{name}.yaml", **{name: [value]}) for name, (value, _) in mistakes.items()]
    mistakes["large"] = (None, "`seed` must be below 2**32, got 4294967296.")
    grids.append(make_grid(tmp_path, "large.yaml", seed=[2**32]))
    mistakes["command"] = (None, "`command` starts '/no/program', and there is no such program here; mend it")
    grids.append(make_grid(tmp_path, "command.yaml", seed=[7]))
    grids[-1].write_text(grids[-1].read_text().replace("- crop-trl", "- /no/program\n- crop-trl"))
    options = [str(make_grid(tmp_path, seed=[0])), *map(str, grids), "--output", str(tmp_path / "out")]
    assert study.main([*options, "--dry_run"]) == 1
    states = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines() if line.startswith("# ")]
    assert states.pop(0) == "to run"
    for state, (_, sentence) in zip(states, mistakes.values(), strict=True):
        assert state.startswith(f"would be refused. {sentence}"), state
    for settings, sentence in (({}, "needs `use_cuda_graphs`"), ({"use_peft": [True]}, "turn `use_peft` off")):
        grid = make_grid(tmp_path, "together.yaml", **settings, **({"use_cuda_graphs": [True]} if settings else {}))
        assert study.main([str(grid), "--output", str(tmp_path / "out"), "--dry_run", "--sample_together"]) == 1
        assert sentence in capsys.readouterr().out
    with pytest.raises(SystemExit, match="error: short/method=crpo,seed=0: Unknown method 'crpo'"):
        study.main(options)
    assert not list(tmp_path.glob("out/*/*"))


def test_the_result_tells_whether_a_run_is_finished(tmp_path, capsys):
    runs = runs_of([make_grid(tmp_path, seed=[0, 1, 2])], study.name_run)
    here = Study(tmp_path / "out", runs, [], study.train_parser().defaults())
    tasks = []
    for seed, (key, end) in enumerate(zip(runs, ("exit 3", "rm $1/result.json", "echo '{}' > $1/settings.json"))):
        runs[key].run.claim(tmp_path / key)
        RunResult("crop", 0.1, 0.2, seed=seed).write(tmp_path / key)
        folder = tmp_path / "out" / key
        words = ["sh", "-c", f"cp $0/* $1; {end}", str(tmp_path / key), str(folder)]
        tasks.append(Task(key, words, folder / "log.txt"))
    run_tasks(tasks, 1, [], here.ended)
    said = capsys.readouterr().out
    assert [row["seed"] for row in read_rows(tmp_path / "out/runs.parquet")] == [0] and here.failed == list(runs)[1:]
    assert "seed=0 failed with status 3 after its result. The end of" in said and not here.left
    assert "seed=1 ended without a result. The end of" in said
    # Whatever wrote that, the others go on.
    assert re.search(r"seed=2 failed: .*seed=2 of '.*seed=2/settings.json' is of a run with `", said)


def test_files_that_cannot_be_read_fail_their_run_alone_until_they_are_deleted(tmp_path, capsys):
    grid, output = make_grid(tmp_path, seed=[0, 1, 2, 3]), tmp_path / "out"
    runs = runs_of([grid], study.name_run)
    result, settings, gone, _ = folders = [output / key for key in runs]
    for seed, (folder, planned) in enumerate(zip(folders, runs.values())):
        planned.run.claim(folder)
        RunResult("crop", 0.1, 0.2, seed=seed).write(folder)
    (result / "result.json").write_text('{"method"')
    (settings / "result.json").unlink()
    (settings / "checkpoint-1").mkdir()
    (settings / "settings.json").write_text('{"method"')
    (gone / "settings.json").unlink()
    given = [str(grid), "--output", str(output)]
    assert study.main([*given, "--dry_run"]) == 1
    said = capsys.readouterr().out
    states = [line.partition(": ")[2] for line in said.splitlines() if line.startswith("# ")]
    assert states == [*["failed, as said above"] * 3, "finished"]
    assert study.main(given) == 1
    said += capsys.readouterr().out
    for folder, name, what in ((result, "result.json", "it"), (settings, "settings.json", "the folder")):
        sentence = f"{str(folder / name)!r} is not whole JSON (cut off, perhaps); delete {what} and train again."
        assert said.count(f" failed: {sentence}") == 2, said
    sentence = f"{str(gone / 'settings.json')!r} is gone; delete the folder and train again."
    assert said.count(f" failed: {sentence}") == 2, said
    assert said.count("Runs: 1 finished, 0 to go, 1 at a time.") == 2
    assert f"3 failed: {', '.join(list(runs)[:3])}. Once what is said above is mended, the same command" in said
    assert len(read_rows(output / "runs.parquet")) == 1
    (result / "result.json").unlink()
    shutil.rmtree(settings)
    shutil.rmtree(gone)
    assert study.main([*given, "--dry_run"]) == 0 and "Runs: 1 finished, 3 to go" in capsys.readouterr().out


def test_the_disk_that_a_study_takes(tmp_path):
    defaults = {"method": "crop", "model_name_or_path": "examples/tiny_math/models/student", "use_peft": False}
    defaults |= {"save_strategy": "steps", "save_steps": 5, "save_total_limit": None, "max_steps": 20, "seed": 0}
    weights = 4 * shape_of(defaults["model_name_or_path"], offline=True).parameters

    def disk(jobs: int = 1, discard_models: bool = False, seeds: int = 1, **settings) -> float:
        runs = [named_run(defaults, {}, {**settings, "seed": seed}) for seed in range(seeds)]
        runs = {run.key: PlannedRun(run, [], []) for run in runs}
        return Study(tmp_path, runs, [], defaults, discard_models)._disk(jobs) / weights

    assert disk() == 1 + 4 * 4
    # Weights stay, checkpoints are of those that run.
    assert disk(seeds=5) == 5 + 4 * 4 and disk(seeds=5, jobs=2) == 5 + 2 * 4 * 4
    assert disk(seeds=5, jobs=2, discard_models=True) == 2 * (1 + 4 * 4)
    # As many as may stay, two at least, and the next; a share of the steps; none; a number that is not known.
    assert disk(save_total_limit=1) == disk(save_total_limit=2) == 1 + 4 * 3 and disk(save_steps=0.5) == 1 + 4 * 2
    none = ({"save_steps": 0}, {"save_steps": -1}, {"max_steps": -1}, {"save_strategy": "no"})
    assert all(disk(**settings) == 1 for settings in none) and disk(model_name_or_path=None) == 0


def test_the_checkpoint_that_a_run_goes_on_from_leaves_a_step(tmp_path):
    """Killed after the last step, before its result."""
    for name, text in (("9", '{"global_step": 9}'), ("10", '{"global_step": 10}'), ("11", "{")):
        (tmp_path / f"checkpoint-{name}").mkdir()
        (tmp_path / f"checkpoint-{name}/trainer_state.json").write_text(text)
    assert last_with_steps_left(tmp_path, 10) == str(tmp_path / "checkpoint-9")
    assert last_with_steps_left(tmp_path, -1) == str(tmp_path / "checkpoint-10")
    assert last_with_steps_left(tmp_path, 9) is None


def test_what_is_wrong_with_one_run_leaves_the_others(tmp_path, capsys):
    """Its folder goes while it runs, or is a file; its result is cut off or has no settings; its signal has no name."""
    result = "{'method': 'opd', 'accuracy_before': 0.25, 'accuracy_after': 0.5, 'seed': 0}".replace("'", '"')
    scripts = {
        "deleted": 'rm -r "$1"; exit 1',
        "signalled": "kill -40 $$",
        "cut": 'echo {} > "$1/settings.json"; echo \'{"method"\' > "$1/result.json"',
        "bare": f"echo '{result}' > \"$1/result.json\"",
        "whole": f'echo {{}} > "$1/settings.json"; echo \'{result}\' > "$1/result.json"',
        "file": "true",
    }
    (tmp_path / "world").mkdir()
    (tmp_path / "world/file").touch()
    here = Study(tmp_path, {}, [], {})
    folders = {name: tmp_path / "world" / name for name in scripts}
    tasks = [
        Task(f"world/{name}", ["sh", "-c", script, "sh", str(folders[name])], folders[name] / "log.txt")
        for name, script in scripts.items()
    ]
    run_tasks(tasks, 10**12, [], here.ended)
    said = capsys.readouterr().out
    assert sorted(here.failed) == [f"world/{name}" for name in sorted(scripts) if name != "whole"], said
    assert [row["run"] for row in read_rows(tmp_path / "runs.parquet")] == ["world/whole"]
    assert "world/signalled was ended by signal 40 (Real-time signal 6). The end of " in said
    assert f"world/cut failed: {str(folders['cut'] / 'result.json')!r} is not whole JSON" in said
    # The next start says of the broken one so again, and does not train it.
    run = PlannedRun(NamedRun("world", "cut", {}, {}), [], [])
    again = Study(tmp_path, {"world/cut": run}, [], {})
    assert again.failed == ["world/cut"] and not again.tasks() and list(again.rows) == ["world/whole"]

    # What may be deleted may lie elsewhere.
    (tmp_path / "elsewhere").mkdir()
    (folders["whole"] / "checkpoint-1").symlink_to(tmp_path / "elsewhere")
    whole = {"world/whole": PlannedRun(NamedRun("world", "whole", {}, {}), [], [])}
    Study(tmp_path, whole, [], {}).discard()
    assert not list(folders["whole"].glob("checkpoint-*")) and (tmp_path / "elsewhere").is_dir()


def test_models_of_runs_that_were_not_asked_for_stay(tmp_path):
    folder = tmp_path / "world" / "method=opd,seed=0"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    here = Study(tmp_path, {}, [], {}, discard_models=True)
    here.rows["world/method=opd,seed=0"] = {"run": "world/method=opd,seed=0"}
    here.save()
    assert (folder / "model.safetensors").is_file()
