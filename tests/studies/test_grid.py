"""Sweep files: the commands of a grid are those that W&B's own agent starts; names of folders."""

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from crop_trl.commands.study import name_run
from crop_trl.commands.train import read_settings
from crop_trl.studies.grid import expand, read_grid, train_arguments
from crop_trl.studies.naming import named_run, shown
from crop_trl.studies.study import runs_of

ROOT = Path(__file__).parents[2]
VALUES = {"method": "crop", "learning_rate": 1e-05, "seed": 1, "use_vllm": True, "use_peft": False, "teacher": None}
VALUES |= {"teacher_init_kwargs": '{"dtype": "float32"}', "model_name_or_path": "a folder/x", "rate": "1e-5"}
VALUES |= {"reward_weights": [0.5, 1], "teachers": {"a": None}}
COMMANDS = [
    ["${env}", "FOO=1", "${interpreter}", "${program}", "${args}"],
    ["crop-trl", "train", "--config", "${envvar:BASE_OF_A_TEST}/a.yaml", "${args_no_boolean_flags}"],
    ["x", "${envvar:NOT_SET_AT_ALL}", "${args_no_equals}", "${args_no_hyphens}", "${args_json}", "pre${args}"],
]


def by_wandb(command: list[str], values: dict, program: str) -> list[str]:
    """What an agent makes of a command, with the functions that it calls."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    macros = utils.create_sweep_command_args({"args": {name: {"value": value} for name, value in values.items()}})
    macros |= {"interpreter": ["python"], "program": [program], "env": ["/usr/bin/env"]}
    words = []
    for word in utils.create_sweep_command(list(command)):
        words += macros[word[2:-1]] if word.startswith("${") and word.endswith("}") else [word]
    return words


@pytest.mark.parametrize("command", COMMANDS)
def test_macros_are_replaced_as_an_agent_replaces_them(monkeypatch, command):
    monkeypatch.setenv("BASE_OF_A_TEST", "some where")
    assert expand(command, VALUES, "train.py") == by_wandb(command, VALUES, "train.py")


def test_the_agent_replaces_macros_as_the_test_above_does():
    """Its loop is inside a method that talks to a server."""
    agent = pytest.importorskip("wandb.wandb_agent")
    text = " ".join(Path(agent.__file__).read_text().split())
    for line in (
        'sweep_vars["interpreter"] = ["python"] sweep_vars["program"] = [command["program"]]',
        'sweep_vars["env"] = ["/usr/bin/env"]',
        'if c.startswith("${") and c.endswith("}"): replace_list = sweep_vars.get(c[2:-1])',
    ):
        assert line in text


def sweep(tmp_path, name="grid.yaml", **content) -> Path:
    base = {"method": "grid", "command": ["crop-trl", "train", "--config", "base.yaml", "${args}"]}
    path = tmp_path / name
    path.write_text(yaml.safe_dump({**base, **content}, sort_keys=False))
    return path


def test_a_grid_is_every_combination_once_however_many_files_name_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("method: crop\nretention_ratio: 0.2\nlearning_rate: 1e-6\nseed: 3\nworld: w")
    seeds = {"method": {"values": ["crop", "opd"]}, "seed": {"values": [3, 4]}, "logging_steps": {"value": 7}}
    ratios = {"retention_ratio": {"values": [0.1, 0.2]}, "learning_rate": {"value": 0.000001}}
    runs = runs_of([sweep(tmp_path, parameters=seeds), sweep(tmp_path, "b.yaml", parameters=ratios)], name_run)
    names = ["method=crop,seed=3", "method=crop,seed=4", "method=opd,seed=3", "method=opd,seed=4"]
    assert list(runs) == [f"w/{n}" for n in (*names, "method=crop,retention_ratio=0.1,seed=3")]
    for cap, count in ((1, 1), (3, 3), (9, 4)):
        capped = sweep(tmp_path, "cap.yaml", parameters=seeds, run_cap=cap)
        assert list(runs_of([capped], name_run)) == list(runs)[:count]
    assert runs["w/method=opd,seed=4"].command(Path("runs"))[:3] == ["crop-trl", "train", "--config"]
    assert runs["w/method=opd,seed=4"].command(Path("runs"))[4:] == [
        *("--method=opd", "--seed=4", "--logging_steps=7", "--runs_dir", "runs", "--main_process_port", "0")
    ]
    # Two files of settings under one name.
    (tmp_path / "base2.yaml").write_text("method: crop\nretention_ratio: 0.2\nlearning_rate: 1e-5\nseed: 3\nworld: w")
    other = sweep(tmp_path, "c.yaml", command=["crop-trl", "train", "--config", "base2.yaml", "${args}"])
    with pytest.raises(ValueError, match=r"w/method=crop,seed=3 of '.*c.yaml' is of a run with `learning_rate` 1e-05"):
        runs_of([tmp_path / "grid.yaml", other], name_run)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"method": "bayes"}, "has `method` 'bayes'; a study runs `method: grid`."),
        ({"run_cap": 0}, "grid.yaml' has `run_cap` 0; give a whole number of at least 1."),
        ({"run_cap": "2"}, "grid.yaml' has `run_cap` '2'; give a whole number of at least 1."),
        ({"command": None}, "has no `command`; write [crop-trl, train, --config, FILE, ${args}] with your FILE."),
        ({"parameters": {"seed": {"min": 0, "max": 3}}}, "`seed` needs `values`, a list that is not empty, or"),
        ({"parameters": {"seed": [1, 2]}}, "`seed` needs `values`, a list that is not empty, or `value`"),
        ({"parameters": {"seed": {"values": []}}}, "`seed` needs `values`, a list that is not empty, or `value`"),
        ({"parameters": ["seed"]}, "`parameters` names none; write lines such as `seed: {values: [0, 1]}`."),
        ({"command": ["python", "x.py", "${args}"]}, "`command` starts 'python x.py'; a study runs `crop-trl train`."),
        ({"command": ["crop-trl", "train", "${args_yaml}"]}, "`command` has ${args_yaml}, which a study does not know"),
        (
            {"command": ["crop-trl", "train"], "parameters": {"seed": {"value": 1}}},
            "`command` takes none of the `parameters`; write ${args} where they go.",
        ),
        ({"parameters": {"seed": {"values": [1, "1"]}}}, "has run/method=crop,seed=1 twice; take out a value"),
        ({"parameters": {"num_processes": {"values": [1, 2]}}}, "has run/method=crop,seed=42 twice; take out a value"),
        ({"parameters": {"logging_steps": {"values": [1, 2]}}}, "that changes no run, such as `num_processes`."),
        (
            {"parameters": {"output_dir": {"value": "x"}}},
            "`output_dir` in a grid would be the folder of all runs; take",
        ),
        ({"parameters": {"sead": {"value": 1}}}, "`--sead` is no option of `crop-trl train`; did you mean `--seed`?"),
    ],
)
def test_a_mistake_in_a_grid_gets_one_sentence(tmp_path, content, sentence):
    content = {"command": ["crop-trl", "train", "${args}"], **content}
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        runs_of([sweep(tmp_path, **content)], name_run)
    assert len(str(caught.value).splitlines()) == 1


def test_a_name_that_stands_twice_is_refused_and_a_date_is_text(tmp_path):
    path = sweep(tmp_path, command=["crop-trl", "train", "${args_json}"])
    path.write_text(path.read_text() + "parameters:\n  run_name: {value: 2024-01-01}\n")
    assert list(read_grid(path).commands()) == [["crop-trl", "train", '{"run_name": "2024-01-01"}']]
    path.write_text(path.read_text() + "  seed: {values: [0]}\n  run_name: {value: b}\n")
    with pytest.raises(ValueError, match=r"grid.yaml' cannot be read \(`run_name` stands twice, again in line 9\)"):
        read_grid(path)


@pytest.mark.parametrize("setting", ["selector", "dataset_name", "eval_dataset_name"])
def test_a_run_keeps_its_folder_from_another_one_that_has_not_just_failed(tmp_path, setting):
    """A file of a method or of data that was changed makes another run of the same name."""
    mine = tmp_path / "mine.py"
    given = {setting: f"{mine}:f" if setting == "selector" else str(mine)}
    unknown = named_run({}, {}, given)
    mine.write_text("one")
    first = named_run({}, {}, given)
    mine.write_text("two")
    second = named_run({}, {}, given)
    assert first.key == second.key == unknown.key and "sha256" not in first.key
    # Settings that were stored before hashes of data were.
    unknown.check_same(first.settings, "here")
    first.check_same(unknown.settings, "here")
    first.claim(tmp_path / "run")
    second.check_folder(tmp_path / "run")
    for left in ("checkpoint-1", "result.json"):
        (tmp_path / "run" / left).touch()
        first.check_folder(tmp_path / "run")
        hashed = setting.removesuffix("_name") + "_sha256"
        sentence = rf"run' is of a run with `{hashed}` '\w{{8}}', and in this one it is '\w{{8}}'; give another folder"
        with pytest.raises(ValueError, match=sentence):
            second.check_folder(tmp_path / "run")
        (tmp_path / "run" / left).unlink()


def test_values_of_every_kind_reach_the_run_and_one_value_in_two_spellings_is_one_run(tmp_path):
    one = {"teacher_init_kwargs": {"a": False, "b": [None]}, "max_prompt_length": None, "reward_weights": [0.5, 1]}
    one |= {"max_prompt_length_kinds": ["original"], "model_name_or_path": "models/a", "teacher_server_urls": None}
    other = {**one, "teacher_init_kwargs": '{"b": [null], "a": false}', "model_name_or_path": "./models//b/../a/"}
    grids = [
        sweep(tmp_path, f"{i}.yaml", command=["crop-trl", "train", "${args}"],
              parameters={name: {"values": [value]} for name, value in values.items()})
        for i, values in enumerate((one, other))
    ]  # fmt: skip
    (run,) = runs_of(grids, name_run).values()
    assert run.run.settings == one
    assert "max_prompt_length=null,max_prompt_length_kinds=original~" in run.run.name
    # What was stored in the other spelling.
    run.run.check_same(other, "here")


def test_the_programs_that_a_command_may_start():
    for words in (
        "crop-trl train",
        "python -m crop_trl.commands.train",
        "/usr/bin/env A=1 python -m crop_trl.commands train",
    ):
        before, arguments = train_arguments([*words.split(), "--seed=1"])
        assert arguments == ["--seed=1"] and before == ["/usr/bin/env", "A=1"] * words.startswith("/")


def test_names_are_readable_short_and_of_one_run_each():
    def name(**given):
        defaults = {"method": "crop", "seed": 42, "learning_rate": 1e-6, "use_vllm": False, "teacher": None}
        return named_run(defaults, {"seed": 0}, {**given, "config": "configs/a.yaml"}).key

    assert name() == "a/method=crop,seed=0"
    assert name(learning_rate=1e-5, method="opd", seed=1) == "a/method=opd,learning_rate=1e-05,seed=1"
    assert name(learning_rate=1e-6, output_dir="x", report_to="wandb", save_steps=5) == name()
    assert name(use_vllm=True) == "a/method=crop,use_vllm=true,seed=0"
    assert name(selector="mine.py:f").startswith("a/selector=mine.py-f~")
    values = [
        "Qwen/Qwen3-4B",
        "other/Qwen3-4B",
        "Qwen3-4B",
        "../Qwen3-4B",
        '{"dtype": "float32"}',
        [1.0],
        "a" * 300,
        "ü",
    ]
    values += ["a b", "a-b", "a/b", "b" * 41, "b" * 42, ""]
    names = [name(teacher=value) for value in values]
    assert len(set(names)) == len(names)
    assert names[0].startswith("a/method=crop,teacher=Qwen3-4B~") and names[4].startswith(
        "a/method=crop,teacher=dtype-fl"
    )
    assert all(re.fullmatch(r"[\w.+~=,-]{1,200}", key.removeprefix("a/"), re.ASCII) for key in names)
    many = name(**{f"setting_{i}": f"value_{i}" for i in range(50)})
    assert len(many) < 200 and many != name(**{f"setting_{i}": f"value_{i}" for i in range(49)})
    assert shown(0.0001) == "0.0001" and shown(True) == "true" and shown("crop-max") == "crop-max"
    hidden = named_run({}, {}, {"hub_token": "hf_secret", "teacher_server_urls": ["http://u:secret@x/v1"]})
    assert "secret" not in json.dumps(hidden.settings) + hidden.key and "hub_token" not in hidden.own_settings


def test_runs_of_an_agent_share_no_folder_however_it_is_named(tmp_path, monkeypatch):
    file, runs = tmp_path / "base.yaml", []
    file.write_text("runs_dir: of_file\noutput_dir: other")
    monkeypatch.setenv("WANDB_SWEEP_ID", "abcd1234")
    for folder in (["--runs_dir", "here"], ["--output_dir", "here"], ["--config", str(file)], []):
        for seed in ("0", "1"):
            settings, run = read_settings([*folder, "--seed", seed])
            assert run.key.endswith(f"/method=crop,seed={seed}")
            runs.append(settings["output_dir"].removesuffix(f"/{run.key}"))
    assert runs == ["here"] * 4 + ["of_file"] * 2 + ["runs"] * 2


@pytest.mark.parametrize("path", sorted((ROOT / "examples/studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_studies_of_the_examples_can_be_read(path):
    grid = read_grid(path)
    runs = runs_of([path], name_run)
    assert len(runs) == len(list(grid.commands()))
    # Whoever reads the file is told how to run it, there or in the file that it is a part of.
    named = [Path(name) for name in re.findall(r"examples/studies/[\w*]+\.yaml", path.read_text())]
    assert any(Path(os.path.relpath(path, ROOT)).match(str(name)) for name in named) or path.stem.startswith(
        ("gsm_rates_", "premises_")
    )


def test_the_studies_of_the_paper_are_its_43_runs():
    grids = [ROOT / f"examples/studies/{name}.yaml" for name in ("table1_a", "table1_b")]
    runs = runs_of([*grids, *(ROOT / "examples/studies").glob("ablations_a_*.yaml")], name_run)
    assert len(runs) == 43 and sum(key.startswith("setting_b/") for key in runs) == 7
