"""A launch that would run something else than it says is refused."""

from types import SimpleNamespace

import pytest
from accelerate.utils import DeepSpeedPlugin, patch_environment
from transformers.training_args import OptimizerNames

from crop_trl.checks import check_launch


def zero3_without_weights() -> DeepSpeedPlugin:
    with patch_environment(accelerate_mixed_precision="no"):
        return DeepSpeedPlugin(zero_stage=3, zero3_save_16bit_model=False)


def asked_for(**settings) -> SimpleNamespace:
    defaults = {
        "method": "crop",
        "ignore_data_skip": True,
        "deepspeed_plugin": None,
        "fsdp": None,
        "fsdp_config": None,
        "teacher_placement": "resident",
    }
    defaults |= {"n_gpu": 1, "use_vllm": False, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 1}
    defaults |= {
        "bf16": False,
        "fp16": False,
        "teacher_server_urls": None,
        "teacher_server_timeout": 600.0,
        "ddp_timeout": 1800,
        "optim": OptimizerNames.ADAMW_TORCH,
    }
    state = SimpleNamespace(distributed_type=SimpleNamespace(value=settings.pop("distributed_type", "MULTI_GPU")))
    args = SimpleNamespace(**{**defaults, "world_size": 2, "distributed_state": state, **settings})
    args.each_teacher = {"teacher": args}
    return args


@pytest.mark.parametrize(
    ("environment", "settings", "sentence"),
    [
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, {"world_size": 1}, "started 2 processes, but each would train as one"),
        ({"PMI_SIZE": "4"}, {"world_size": 1}, "The environment says `PMI_SIZE` 4, but 1 would train; unset it"),
        ({"WORLD_SIZE": "0"}, {"world_size": 1}, "The environment says `WORLD_SIZE` 0, but 1 would train"),
        (
            {"ACCELERATE_MIXED_PRECISION": "bf16"},
            {"world_size": 1},
            "`mixed_precision: bf16`, which would run though `bf16` and `fp16` are false",
        ),
        (
            {"WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            {"deepspeed_plugin": zero3_without_weights()},
            "With `zero3_save_16bit_model: false` the saved model would have no weights",
        ),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
            {"distributed_type": "MULTI_CPU"},
            r"FSDP was asked for, but with `use_cpu` plain data-parallel training would run; .* \(FSDP needs GPUs\)",
        ),
        # Without this, one sentence would send to `use_cpu` and the other away from it.
        (
            {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
            {"world_size": 1},
            "would train as one of 1; FSDP needs GPUs, so launch with DeepSpeed or plain data parallelism",
        ),
        (
            {},
            {"distributed_type": "MULTI_CPU", "deepspeed_plugin": SimpleNamespace(zero_stage=2)},
            "DeepSpeed was asked for, but with `use_cpu` plain",
        ),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, {}, "FSDP version 1 is not supported"),
        (
            {},
            {"world_size": 1, "n_gpu": 4},
            "One process sees 4 GPUs .* --num_processes 4`, or set CUDA_VISIBLE_DEVICES",
        ),
        (
            {},
            {"world_size": 3, "use_vllm": True, "vllm_tensor_parallel_size": 2},
            "`vllm_tensor_parallel_size` 2 does not divide the 3 processes",
        ),
        (
            {},
            {"teacher_server_urls": ["http://a"], "teacher_server_timeout": 3600.0},
            "`teacher_server_timeout` 3600 is not less than `ddp_timeout` 1800",
        ),
        ({}, {"teacher_placement": "sharded"}, "'sharded' needs a launch with DeepSpeed ZeRO-3 or FSDP2"),
        (
            {},
            {"teacher_placement": "sharded", "deepspeed_plugin": SimpleNamespace(zero_stage=2)},
            "'sharded' needs a launch with DeepSpeed ZeRO-3 or FSDP2",
        ),
    ],
)
def test_a_launch_that_would_run_something_else_is_refused(monkeypatch, environment, settings, sentence):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=sentence):
        check_launch(asked_for(**settings))
