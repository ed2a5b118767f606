"""The files that users start from."""

import re
from pathlib import Path

import pytest
import yaml
from trl import ModelConfig, TrlParser

from crop_trl.commands.launch import launch_file
from crop_trl.planning.memory import launch_of, plan_memory, settings_from
from crop_trl.planning.shape import shape_of
from crop_trl.runs import ScriptArguments, TrainConfig

ROOT = Path(__file__).parents[2]
ON_A_CPU = ["--use_cpu", "true", "--bf16", "false", "--use_vllm", "false", "--teacher_placement", "resident"]


@pytest.mark.parametrize("name", ["setting_a", "setting_b"])
@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_the_papers_settings_hold_on_any_number_of_gpus(tmp_path, monkeypatch, name, processes):
    monkeypatch.setattr("crop_trl.checks.launched_processes", lambda: processes)
    monkeypatch.setattr("crop_trl.checks.check_launch", lambda args: None)  # which would look for them
    arguments = ["--config", str(ROOT / "examples" / "configs" / f"{name}.yaml"), "--output_dir", str(tmp_path)]
    _, args, model = TrlParser((ScriptArguments, TrainConfig, ModelConfig)).parse_args_and_config(
        [*arguments, *ON_A_CPU]
    )
    responses = args.per_device_train_batch_size * args.gradient_accumulation_steps * processes
    assert responses == 144 * 4
    # Every batch of rollouts is one update.
    assert args.windows_per_generation == 1
    assert (args.max_steps, args.max_prompt_length, args.max_completion_length) == (115, 1024, 4096)
    assert (args.method, args.retention_ratio, args.score_top_k) == ("crop", 0.2, 16)
    assert (args.learning_rate, args.weight_decay, args.epsilon, args.epsilon_high) == (1e-6, 0.01, 0.2, 0.28)
    assert (args.warmup_steps, args.max_grad_norm, args.adam_beta1, args.adam_beta2) == (0, 1.0, 0.9, 0.999)
    assert (args.lr_scheduler_type, args.min_tokens, args.iw_max_weight) == ("constant", 1, 1.5)
    assert (args.credit_num_negatives, args.credit_seed, args.credit_lambda, args.lambda_opd) == (1, 42, None, 1.0)
    # What the paper leaves open.
    assert (args.temperature, args.num_iterations, args.adam_epsilon) == (1.0, 1, 1e-8)
    assert (args.seed, args.selector_seed, args.stop_token_ids) == (42, 42, None)
    assert args.chat_template_kwargs == {"enable_thinking": name == "setting_a"}
    assert not args.shuffle_dataset and args.reward_weights == [0.0]
    assert model.model_name_or_path == {"setting_a": "Qwen/Qwen3-1.7B-Base", "setting_b": "Qwen/Qwen3-4B-Base"}[name]


@pytest.mark.parametrize("path", sorted((ROOT / "accelerate_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_launch_file_says_what_it_is_for(path):
    text = path.read_text()
    assert text.startswith("# ")
    settings = yaml.safe_load(text)
    name = path.stem.removesuffix("_8gpu")
    expected = 8 if path.stem.endswith("_8gpu") else 1 if name in ("cpu", "single_gpu") else 2
    assert settings["num_processes"] == expected
    if name.startswith("zero"):
        assert settings["deepspeed_config"]["zero_stage"] == int(name[-1])
    if name == "fsdp2":
        assert settings["fsdp_config"]["fsdp_version"] == 2


@pytest.mark.parametrize(
    ("name", "launch", "student", "teacher"),
    [("setting_a", "zero2_8gpu", "1.7B", "4B"), ("setting_b", "zero3_8gpu", "4B", "8B")],
)
@pytest.mark.parametrize("gpu_gib", [31.5, 79.0])
def test_the_papers_settings_fit_eight_gpus(name, launch, student, teacher, gpu_gib):
    """Also with the values for 32 GB that stand beside the others in the file."""
    text = (ROOT / "examples" / "configs" / f"{name}.yaml").read_text()
    if gpu_gib < 40:
        text, changed = re.subn(r"^(\w+): [^#\n]*# 32 GB: ([\d.]+).*$", r"\1: \2", text, flags=re.MULTILINE)
        assert changed == 3
    strategy, processes = launch_of(launch_file(launch))
    shapes = [shape_of(size) for size in (student, teacher)]
    settings = settings_from(yaml.safe_load(text), shapes[0], strategy=strategy, processes=processes, gpu_gib=gpu_gib)
    plan = plan_memory(*shapes, settings)
    assert plan.fits, plan.warning
