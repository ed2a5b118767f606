"""`crop-trl plan`: what it reads, and whether a run fits."""

from pathlib import Path

import pytest
from transformers import MixtralConfig

from crop_trl.commands.launch import launch_file
from crop_trl.commands.plan import main
from crop_trl.planning.memory import launch_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num_processes: 2", ("ddp", 2)),
        ("num_processes: 2\ndeepspeed_config: {zero_stage: 0}", ("ddp", 2)),
        ("num_processes: 2\ndeepspeed_config: {zero_stage: 3}", ("zero3", 2)),
        ("num_processes: 2\nfsdp_config: {fsdp_version: 1}", "`fsdp_version` in .* must be 2, got 1"),
        ("deepspeed_config: {deepspeed_config_file: a.json}", "must be 0, 1, 2 or 3, got None"),
    ],
)
def test_reads_a_launch_file(tmp_path, text, expected):
    (tmp_path / "launch.yaml").write_text(text)
    if isinstance(expected, tuple):
        assert launch_of(str(tmp_path / "launch.yaml")) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            launch_of(str(tmp_path / "launch.yaml"))


def test_reads_a_launch_file_of_ours_by_name():
    assert launch_of(launch_file("zero2_8gpu")) == ("zero2", 8) and launch_of(launch_file("fsdp2")) == ("fsdp2", 2)


def test_the_command_says_whether_it_fits(capsys):
    assert main(["--student", "1.7B", "--teacher", "4B", "--gpu-gib", "16"]) == 1
    assert "It does not fit. The update phase" in capsys.readouterr().out
    assert main(["--student", "1.7B", "--teacher_server_urls", "http://localhost:8000/v1"]) == 0
    assert "1.7B, taught by a server: single, 1 x 80 GiB." in capsys.readouterr().out
    colab = ["--config", str(ROOT / "examples/configs/colab.yaml"), "--student", "0.6B", "--teacher", "1.7B"]
    own = ["--selector", f"{ROOT / 'examples/custom_selector.py'}:rare"]
    for more in ([], own):
        assert main([*colab, *more, "--gpu_gib", "15"]) == 0 and "It fits." in capsys.readouterr().out


def test_a_model_whose_name_says_its_size_is_planned_without_a_connection(capsys, monkeypatch):
    asked = []

    def read(name, local_files_only):
        asked.append((name, local_files_only))
        raise OSError

    monkeypatch.setattr("crop_trl.planning.shape.AutoConfig.from_pretrained", read)
    assert main(["--student", "Qwen/Qwen3-1.7B-Base", "--teacher", "4B"]) == 0
    assert asked == [("Qwen/Qwen3-1.7B-Base", True)]
    assert "Qwen/Qwen3-1.7B-Base is not here; taken as the Qwen3 shape 1.7B." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--student", "9B", "--teacher", "4B"], "error: '9B' cannot be read; name a folder, or one of"),
        (["--student", "1.7B"], "error: Student or teacher is not known"),
        (["--student", "MIXTURE", "--teacher", "4B"], "cannot be planned: it is a mixture of experts"),
        (["--student", "4B", "--teacher", "4B", "--num_processes", "0"], "`num_processes` must be a whole number"),
        (["--accelerate_config", "zero4", "--student", "4B", "--teacher", "4B"], "'zero4' is no launch file: choose"),
    ],
)
def test_what_cannot_be_planned(tmp_path, arguments, sentence):
    folder = tmp_path / "Qwen3-8B"  # a name that says a size
    MixtralConfig().save_pretrained(folder)
    with pytest.raises(SystemExit) as ended:
        main([str(folder) if word == "MIXTURE" else word for word in arguments])
    assert sentence in ended.value.code
