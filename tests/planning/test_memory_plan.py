"""The arithmetic of GPU memory."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from crop_trl.planning.memory import STRATEGIES, MemorySettings, ModelShape, plan_memory, settings_from

ROOT = Path(__file__).parents[2]
SMALL = ModelShape(1024, 3072, 28, 151_936, 2048, 1024, True)
MIDDLE = ModelShape(2048, 6144, 28, 151_936, 2048, 1024, True)
LARGE = ModelShape(2560, 9728, 36, 151_936, 4096, 1024, True)
LARGEST = ModelShape(4096, 12288, 36, 151_936, 4096, 1024, False)


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(hidden_size=1024, num_hidden_layers=4, vocab_size=50_000, tie_word_embeddings=True),
        Qwen3Config(hidden_size=512, num_hidden_layers=3, vocab_size=9_000, tie_word_embeddings=False),
        LlamaConfig(hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4),
    ],
)
def test_counts_the_weights_of_a_model(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    actual = sum(p.numel() for p in model.parameters())
    assert ModelShape.of(config).parameters == pytest.approx(actual, rel=2e-3)


@pytest.mark.parametrize(("checkpointing", "measured"), [(True, 30.8), (False, 59.2)])
def test_the_peak_of_an_update_that_was_measured(checkpointing, measured):
    # benchmarks/update.py on an H200: 1.7B student, 4 rows, 64 responses of 1,499 tokens on average.
    lengths = {"rows": 4, "mean_tokens": 1_700, "longest_tokens": 4_416}
    settings = MemorySettings(teacher_placement="server", checkpointing=checkpointing, **lengths)
    assert plan_memory(MIDDLE, None, settings).allocated("update") == pytest.approx(measured, rel=0.15)


def test_the_rollout_of_a_student_without_an_engine_that_was_measured():
    # benchmarks/fits.py with colab.yaml and its student in float32 on an H200: 12.66 GiB when 976 tokens were written.
    fields = yaml.safe_load((ROOT / "examples/configs/colab.yaml").read_text())
    fields.update(use_cuda_graphs=False, dtype="float32", max_prompt_length=320, max_completion_length=656)
    plan = plan_memory(SMALL, MIDDLE, settings_from(fields, SMALL, gpu_gib=15))
    assert plan.allocated("rollout") == pytest.approx(12.66, rel=0.15)
    fields.update(max_prompt_length=512, max_completion_length=1024)
    plan = plan_memory(SMALL, MIDDLE, settings_from(fields, SMALL, gpu_gib=15))
    assert not plan.fits and "generation cache" in plan.warning and "`dtype: bfloat16`" in plan.warning


def test_cuda_graphs_keep_a_copy_and_the_cache():
    fields = yaml.safe_load((ROOT / "examples/configs/colab.yaml").read_text())
    plans = {}
    # As it is, and as its first lines advise for a card without bf16.
    for dtype in ("bfloat16", "float16"):
        plans[dtype] = plan_memory(SMALL, MIDDLE, settings_from({**fields, "dtype": dtype}, SMALL, gpu_gib=15))
        assert plans[dtype].fits
    assert plans["bfloat16"] == plans["float16"]
    plain = plan_memory(SMALL, MIDDLE, settings_from({**fields, "use_cuda_graphs": False}, SMALL, gpu_gib=15))
    # 32 rows of 1,536 tokens, 28 layers, keys and values of 1,024 each; the copy has a head of its own.
    kept = (32 * 1_536 * 28 * 2 * 1_024 * 2 + 2 * (SMALL.parameters + 1_024 * 151_936 + 20_185_088)) / 2**30
    for phase in ("scoring", "update"):
        assert plans["bfloat16"].total(phase) - plain.total(phase) == pytest.approx(kept)


def test_the_peak_of_scoring_that_was_measured():
    # benchmarks/scoring.py on an H100: 4B teacher, 8 x 4,096 tokens in batches of 3 rows, 0.98 GiB above the weights.
    settings = MemorySettings(score_tokens=13_200)
    parts = plan_memory(MIDDLE, LARGE, settings).phases["scoring"]
    assert parts["scoring activations"] == pytest.approx(0.98, rel=0.15)


@pytest.mark.parametrize(
    ("strategy", "processes", "measured"),
    [("single", 1, 77.8), ("zero2", 2, 73.8), ("zero3", 2, 75.4), ("fsdp2", 2, 69.0)],
)
def test_the_peak_of_whole_steps_that_was_measured(strategy, processes, measured):
    # benchmarks/throughput.py on H200s of 139.8 GiB: memory in use on the device, largest in the rollout.
    lengths = {"rows": 4, "mean_tokens": 700, "longest_tokens": 1_720}
    settings = MemorySettings(strategy=strategy, processes=processes, vllm_share=0.35, gpu_gib=139.8, **lengths)
    assert plan_memory(MIDDLE, LARGE, settings).peak == pytest.approx(measured, rel=0.15)


def test_what_lowers_memory_lowers_it():
    def update(**changes):
        return plan_memory(MIDDLE, LARGE, MemorySettings(**changes)).total("update")

    assert update(checkpointing=False) > update()
    assert update(rows=2) < update(rows=16)
    assert update(teacher_placement="offload") == pytest.approx(update(teacher_placement="server"))
    assert update(teacher_placement="offload") < update(teacher_bits=4) < update(teacher_bits=8) < update()
    assert update(lora_parameters=10**7) < update()
    many = {s: update(strategy=s, processes=8) for s in STRATEGIES}
    assert many["zero3"] < many["zero2"] < many["zero1"] < many["ddp"] == many["single"]


def test_says_what_does_not_fit_and_what_to_change():
    plan = plan_memory(MIDDLE, LARGE, MemorySettings(gpu_gib=16))
    assert not plan.fits
    assert "The update phase needs about" in plan.warning and "optimizer" in plan.warning and "zero2" in plan.warning
    plan = plan_memory(SMALL, LARGE, MemorySettings(gpu_gib=40, vllm_share=0.9, vllm_sleeps=True))
    assert plan.warning.startswith("The rollout phase") and "`vllm_gpu_memory_utilization`" in plan.warning
    assert plan_memory(SMALL, MIDDLE, MemorySettings(gpu_gib=80)).warning is None


def test_reads_an_adapter_and_a_server_from_the_settings():
    fields = {"use_peft": True, "lora_r": 8, "lora_target_modules": ["q_proj"], "teacher_server_urls": ["http://x/v1"]}
    settings = settings_from(fields, SMALL)
    assert settings.lora_parameters == 28 * 8 * (1024 + 2048)
    assert settings.teacher_placement == "server"


def written_for_32_gb(path):
    """What the comments of a configuration say to change for eight GPUs of 32 GB."""
    found = re.findall(r"^(\w+): .*# .*?32 GB: (\S+)", path.read_text(), flags=re.MULTILINE)
    return {name: yaml.safe_load(value.rstrip(",;")) for name, value in found}


@pytest.mark.parametrize(
    ("setting", "models", "strategy"),
    [
        ("setting_a", (MIDDLE, LARGE), "zero2"),
        ("setting_a", (MIDDLE, LARGE), "zero3"),
        ("setting_b", (LARGE, LARGEST), "zero3"),
    ],
)
def test_the_papers_settings_fit_eight_gpus(setting, models, strategy):
    path = ROOT / f"examples/configs/{setting}.yaml"
    fields, changes = yaml.safe_load(path.read_text()), written_for_32_gb(path)
    assert set(changes) >= {"per_device_train_batch_size", "score_tokens_per_batch", "vllm_gpu_memory_utilization"}
    for gpu_gib, changed in ((80, {}), (32, changes)):
        launch = {"strategy": strategy, "processes": 8, "gpu_gib": gpu_gib}
        plan = plan_memory(*models, settings_from({**fields, **changed}, models[0], **launch))
        assert plan.fits, (gpu_gib, plan.warning)


def test_an_adapter_on_modules_outside_the_layers():
    def lora(**fields):
        return settings_from({"use_peft": True, "lora_r": 8, **fields}, SMALL).lora_parameters

    # A command line gives a single module as a text.
    assert lora(lora_target_modules="q_proj") == lora(lora_target_modules=["q_proj"]) == 28 * 8 * (1024 + 2048)
    assert lora(lora_target_modules=["lm_head"]) == 8 * (1024 + 151_936)
    whole = lora(lora_modules_to_save=["embed_tokens"])
    assert whole == lora() + 1024 * 151_936
    # Taken for none, they would make it a plan of full training.
    with pytest.raises(ValueError, match="`lora_target_modules` 'c_attn' cannot be planned: choose all-linear, or"):
        lora(lora_target_modules=["c_attn"])


def test_a_dense_method_projects_every_token():
    assert settings_from({"method": "opd", "retention_ratio": 0.2}, SMALL).retention_ratio == 1.0
    assert settings_from({"method": "crop", "retention_ratio": 0.3}, SMALL).retention_ratio == 0.3


def test_a_mixture_of_experts_is_not_taken_for_a_dense_model():
    for config in (Qwen3MoeConfig(), MixtralConfig(), DeepseekV3Config()):
        with pytest.raises(ValueError, match="cannot be planned: it is a mixture of experts .* for dense models"):
            ModelShape.of(config)


NO_RUN = [
    ({"teacher_quantization": "16bit"}, {}, "`teacher_quantization` '16bit' is not known: choose one of 8bit"),
    ({"teacher_placement": "cpu"}, {}, "`teacher_placement` 'cpu' is not known"),
    ({"teacher_placement": "sharded"}, {"strategy": "zero2"}, "'sharded' needs `zero3` or `fsdp2`, and not"),
    ({"prompts_per_step": 0}, {}, "`prompts_per_step` must be a whole number of at least 1, got 0"),
    ({"prompts_per_step": 4, "num_generations": 0}, {}, "`num_generations` must be a whole number of at least 1"),
    ({"max_completion_length": "4096"}, {}, "`max_completion_length` must be a whole number .* got '4096'"),
    ({"per_device_train_batch_size": 0}, {}, "`per_device_train_batch_size` must be a whole number of at least 1"),
    ({"retention_ratio": "0.5"}, {}, "`retention_ratio` must be a number of at least 0, got '0.5'"),
    ({}, {"processes": 0}, "`num_processes` must be a whole number of at least 1, got 0"),
    ({}, {"gpu_gib": -80.0}, "`gpu_gib` must be a number of at least 1, got -80.0"),
    ({}, {"gpu_gib": float("nan")}, "`gpu_gib` must be a number of at least 1, got nan"),
    ({}, {"mean_tokens": 0}, "`mean_tokens` must be a number of at least 1, got 0"),
]


def test_what_is_generated_at_once():
    given = {"prompts_per_step": 16, "num_generations": 4, "per_device_train_batch_size": 4}
    assert settings_from(given, SMALL).generated_rows == 64
    assert settings_from(given, SMALL, processes=2).generated_rows == 32
    assert settings_from({**given, "steps_per_generation": 32}, SMALL).generated_rows == 128
    assert settings_from({**given, "generation_batch_size": 32}, SMALL).generated_rows == 32


def test_settings_that_no_run_takes():
    wrong = []
    for fields, launch, sentence in NO_RUN:
        with pytest.raises(ValueError) as refused:
            settings_from(fields, SMALL, **launch)
        if not re.search(sentence, str(refused.value)):
            wrong.append((sentence, str(refused.value)))
    assert not wrong


def test_the_commands_of_the_readme_fit_the_cards_that_it_names():
    """What the first screen tells a reader to start runs on the card that it says."""
    found = re.findall(r"<!-- fits (\d+) GiB -->\n```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert [card for card, _ in found] == ["24", "80"]
    for card, command in found:
        words = shlex.split(command.replace("\\\n", " "))
        assert words[:2] == ["crop-trl", "train"] and words[2::2] == [w for w in words[2:] if w.startswith("--")]
        fields = {name.removeprefix("--"): yaml.safe_load(value) for name, value in zip(words[2::2], words[3::2])}
        assert (fields["model_name_or_path"], fields["teacher_model_name_or_path"]) == (
            "Qwen/Qwen3-1.7B",
            "Qwen/Qwen3-4B",
        )
        plan = plan_memory(MIDDLE, LARGE, settings_from(fields, MIDDLE, gpu_gib=float(card)))
        assert plan.fits, plan
        assert not plan_memory(MIDDLE, LARGE, settings_from(fields, MIDDLE, gpu_gib=float(card) / 2)).fits
