"""Command lines and files of settings: what is read, and the sentence for what is wrong."""

import re

import pytest
from trl import ModelConfig

from crop_trl.commands.options import OptionParser, SettingsParser
from crop_trl.runs import ScriptArguments, TrainConfig


def settings(*argv: str) -> dict:
    return SettingsParser("train", (ScriptArguments, TrainConfig, ModelConfig), "Train.").settings(list(argv))


def test_only_what_is_given_is_read_and_the_command_line_wins(tmp_path):
    (tmp_path / "run.yaml").write_text("retention_ratio: 0.5\ndataset_name: a.jsonl\nlearning_rate: 1e-4")
    options = ["--retention_ratio=0.3", "--use_vllm", "--lora_target_modules", "q_proj", "v_proj", "--seed", "1"]
    assert settings("--config", str(tmp_path / "run.yaml"), *options) == {
        **{"retention_ratio": 0.3, "dataset_name": "a.jsonl", "use_vllm": True, "seed": 1, "learning_rate": 1e-4},
        "lora_target_modules": ["q_proj", "v_proj"],
    }


def test_a_method_and_a_selector_exclude_each_other_where_both_are_asked_for(tmp_path):
    (tmp_path / "run.yaml").write_text("method: tip")
    file = ["--config", str(tmp_path / "run.yaml")]
    assert settings(*file, "--selector", "mine.py:f") == {"selector": "mine.py:f"}
    with pytest.raises(ValueError, match="`method` 'crop' and `selector` 'mine.py:f' exclude each other; give one."):
        settings(*file, "--method", "crop", "--selector", "mine.py:f")
    (tmp_path / "run.yaml").write_text("selector: mine.py:f")
    assert settings(*file, "--method", "crop") == {"method": "crop"}


def test_values_as_a_sweep_writes_them(tmp_path):
    """As Python shows them."""
    (tmp_path / "run.yaml").write_text("max_prompt_length: null\nreward_weights: [1, 2]\nteachers: {a: b}")
    read = settings(
        *("--config", str(tmp_path / "run.yaml"), "--num_generations=None", "--heatmap", "None", "--use_vllm=True"),
        *("--max_prompt_length_kinds=['original', 'counterfactual']", "--lora_target_modules=[]", "--seed", "1"),
        *("--teacher_init_kwargs={'a': False, 'b': None}", '--model_init_kwargs={"a": false}', "--report_to=None"),
        "--prompt_template={problem}",
    )
    assert read == {
        **{"max_prompt_length": None, "reward_weights": [1, 2], "teachers": {"a": "b"}, "num_generations": None},
        **{"heatmap": None, "use_vllm": True, "max_prompt_length_kinds": ["original", "counterfactual"], "seed": 1},
        **{"lora_target_modules": [], "teacher_init_kwargs": '{"a": false, "b": null}', "report_to": None},
        **{"model_init_kwargs": '{"a": false}', "prompt_template": "{problem}"},
    }
    for wrong in ("--seed=None", "--reward_weights=[a]", "--max_steps=[1]"):
        with pytest.raises(ValueError, match="invalid (int|float) value: '(None|.a.|.1.)'"):
            settings(wrong)


@pytest.mark.parametrize(
    ("options", "text", "sentence"),
    [
        (["--retention_rato", "1"], None, "`--retention_rato` is no option of `crop-trl train`; did you mean `--reten"),
        (["stray"], None, "`stray` is no option of `crop-trl train`; `crop-trl train --help` lists them."),
        (["--max_steps", "few"], None, "Argument --max_steps/--max-steps: invalid int value: 'few'"),
        ([], "use_vlm: true", "`use_vlm` in 'run.yaml' is no setting; did you mean `use_vllm`?"),
        ([], "", "holds no settings; write lines such as `name: value`."),
        ([], "- a", "holds no settings; write lines such as `name: value`."),
        ([], "a: [1", "cannot be read (while parsing a flow sequence"),
        (["--config", "none.yaml"], None, "'none.yaml' cannot be read (No such file or directory)"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(tmp_path, monkeypatch, options, text, sentence):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "run.yaml").write_text(text)
        options = ["--config", "run.yaml"]
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        settings(*options)
    assert len(str(caught.value).splitlines()) == 1


def test_options_of_a_command_of_its_own():
    parser = OptionParser("audit", "Compare.")
    parser.add_argument("--train", required=True)
    parser.add_argument("--output")
    with pytest.raises(ValueError, match="`--outptu` is no option of `crop-trl audit`; did you mean `--output`"):
        parser.parse_args(["--train", "a", "--outptu", "b"])
    with pytest.raises(ValueError, match="The following arguments are required: --train; `crop-trl audit --help`"):
        parser.parse_args([])
