"""A launch that would run something else than it says is refused."""

from types import SimpleNamespace

import pytest
from transformers.training_args import OptimizerNames

from crop_trl.checks import check_launch


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
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, {"world_size": 1}, "2 processes were launched, but each would train"),
        ({"PMI_SIZE": "4"}, {"world_size": 1}, "4 processes were launched, but each would train as one of 1"),
        (
            {"ACCELERATE_MIXED_PRECISION": "bf16"},
            {"world_size": 1},
            "`mixed_precision: bf16`, which would run though `bf16` and `fp16` are false",
        ),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
            {"distributed_type": "MULTI_CPU"},
            r"FSDP was asked for, but with `use_cpu` plain data-parallel training would run; .* \(FSDP needs GPUs\)",
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
