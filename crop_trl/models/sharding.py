"""Models whose weights are spread over processes, by DeepSpeed ZeRO-3 or by FSDP2.

Every forward of such a model gathers weights from all processes, so each process has to make the same number of them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.utils import get_int_from_env, patch_environment
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.integrations import deepspeed as hf_deepspeed
from trl.distributed import DistributedBackend
from trl.models import prepare_deepspeed

from .compilation import decoder_layers


def _flag(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("true", "1")


_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def launched_processes() -> int:
    """How many processes the launcher says it started; 1 without a launcher."""
    return get_int_from_env(_SIZES, 1)


def _zero_stage(args) -> int:
    return 0 if args.deepspeed_plugin is None else args.deepspeed_plugin.zero_stage


def _fsdp_version(args) -> int:
    """Version of FSDP that the launcher or the arguments ask for; 0: none."""
    if _flag("ACCELERATE_USE_FSDP"):
        return int(os.environ.get("FSDP_VERSION", "1"))
    return int((args.fsdp_config or {}).get("version", 1)) if args.fsdp else 0


def launch_kind(args) -> str:
    """How a run shares its work: `"deepspeed"`, `"fsdp"`, or `"plain"` for one process or data parallelism."""
    return "deepspeed" if _zero_stage(args) > 0 else "fsdp" if _fsdp_version(args) > 0 else "plain"


def check_launch(args) -> None:
    """
    Raise `ValueError` when the launcher asked for something other than what would run, or than what the teacher needs.

    Args:
        args ([`~crop_trl.CROPConfig`]): After its devices are set up.
    """
    launched, joined = launched_processes(), args.world_size
    fsdp, on_cpu = _fsdp_version(args), args.distributed_state.distributed_type.value == "MULTI_CPU"
    left = next((name for name in _SIZES if os.environ.get(name) == str(launched)), None)
    if left is not None and "LOCAL_RANK" not in os.environ and launched != joined:
        raise ValueError(
            f"The environment says `{left}` {launched}, but {joined} would train; unset it if an earlier launch left "
            "it, or start the processes with `accelerate launch`."
        )
    if "LOCAL_RANK" in os.environ and launched != joined:
        remedy = (
            "FSDP needs GPUs, so launch with DeepSpeed or plain data parallelism where there are none"
            if fsdp
            else "on CPUs set `ddp_backend` to 'gloo' for DeepSpeed and `use_cpu` to true for anything else"
        )
        raise ValueError(
            f"The launcher started {launched} processes, but each would train as one of {joined}; {remedy}."
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"One process sees {args.n_gpu} GPUs and would split each batch over them in threads, which is not "
            "supported; start it with `accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes "
            f"{args.n_gpu}`, or set CUDA_VISIBLE_DEVICES to one of them."
        )
    together = args.vllm_tensor_parallel_size
    if args.use_vllm and args.vllm_mode == "colocate" and joined % max(1, together):
        raise ValueError(
            f"`vllm_tensor_parallel_size` {together} does not divide the {joined} processes of this run, which share "
            "an engine in groups of that size; change one of them."
        )
    if args.teacher_server_urls and joined > 1 and args.teacher_server_timeout >= args.ddp_timeout:
        raise ValueError(
            f"`teacher_server_timeout` {args.teacher_server_timeout:g} is not less than `ddp_timeout` "
            f"{args.ddp_timeout:g}, after which processes give up on one that waits for a server; raise `ddp_timeout`."
        )
    for setting, asked, how in (
        ("DeepSpeed", _zero_stage(args) > 0, "DeepSpeed on CPUs takes `ddp_backend` 'gloo'"),
        ("FSDP", fsdp > 0, "FSDP needs GPUs"),
    ):
        if asked and on_cpu:
            raise ValueError(
                f"{setting} was asked for, but with `use_cpu` plain data-parallel training would run; leave `use_cpu` "
                f"false ({how}), or launch without it."
            )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision in ("bf16", "fp16") and not (args.bf16 or args.fp16):
        raise ValueError(
            f"The launch file says `mixed_precision: {precision}`, which would run though `bf16` and `fp16` are false; "
            "launch with `--mixed_precision no`, or set one of the two."
        )
    if _zero_stage(args) == 3:
        zero = args.deepspeed_plugin.deepspeed_config["zero_optimization"]
        if zero.get("stage3_gather_16bit_weights_on_model_save") is False:
            raise ValueError(
                "With `zero3_save_16bit_model: false` the saved model would have no weights; set it to true in the "
                "launch file (`stage3_gather_16bit_weights_on_model_save` in a DeepSpeed configuration)."
            )
    if fsdp == 1:
        raise ValueError("FSDP version 1 is not supported, it flattens the output head; set `fsdp_version` to 2.")
    if args.teacher_placement == "sharded" and _zero_stage(args) != 3 and fsdp != 2:
        raise ValueError(
            "`teacher_placement` 'sharded' needs a launch with DeepSpeed ZeRO-3 or FSDP2 on several processes, such as "
            "accelerate_configs/zero3.yaml; choose 'resident' for any other."
        )


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether the model in training is spread over processes, so that each must make as many forwards as the others."""
    backend = DistributedBackend(accelerator)
    return backend.is_zero3 or backend.fsdp_version == 2


def keep_full_outputs(accelerator: Accelerator) -> None:
    """
    Make FSDP2 leave the type of what a model returns alone, and sum gradients in fp32.

    By default log-probabilities would be rounded to the type of mixed precision, three digits for bf16, after all care
    was taken to compute them in fp32. Called before the model is wrapped.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    policy = getattr(plugin, "mixed_precision_policy", None)
    if isinstance(policy, MixedPrecisionPolicy):
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=policy.param_dtype,
            reduce_dtype=torch.float32,
            output_dtype=None,
            cast_forward_inputs=policy.cast_forward_inputs,
        )


def gather_by_layer(model: torch.nn.Module, accelerator: Accelerator) -> None:
    """
    Make ZeRO-3 gather the weights of a decoder layer at once, not matrix by matrix; nothing under anything else.

    By default it waits for a collective and runs hooks of its own around each of a layer's dozen modules, and a small
    student's update is bound by that. An adapter's student is left as it is: where some weights of a layer are trained
    and others not, DeepSpeed drops some that the backward pass needs, unless checkpointing repeats the forward. Called
    before DeepSpeed wraps the model.

    Args:
        model (`torch.nn.Module`): Student or teacher.
        accelerator ([`~accelerate.Accelerator`]): Of the run.
    """
    kinds = {type(layer) for layer in decoder_layers(model)}
    alike = len({parameter.requires_grad for parameter in model.parameters()}) == 1
    if kinds and alike and DistributedBackend(accelerator).is_zero3:
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, list(kinds))


@contextmanager
def load_whole() -> Iterator[None]:
    """
    Let `from_pretrained` give every process all weights.

    Otherwise it splits them as it loads under ZeRO-3, and under FSDP it may read them in the first process alone, since
    it takes every model for the one that is going to be trained.
    """
    reference = hf_deepspeed._hf_deepspeed_config_weak_ref
    config = None if reference is None else reference()
    hf_deepspeed.unset_hf_deepspeed_config()
    try:
        with patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
            yield
    finally:
        if config is not None:
            hf_deepspeed.set_hf_deepspeed_config(config)


def shard_teacher(teacher: PreTrainedModel, accelerator: Accelerator) -> torch.nn.Module:
    """
    Spread a teacher's weights over all processes.

    Args:
        teacher ([`~transformers.PreTrainedModel`]):
            In evaluation mode, patched by [`~crop_trl.scoring.head.add_token_head`].
        accelerator ([`~accelerate.Accelerator`]):
            Of a run under ZeRO-3 or FSDP2.

    Returns:
        `torch.nn.Module` to call in its place.
    """
    if DistributedBackend(accelerator).is_zero3:
        gather_by_layer(teacher, accelerator)
        return prepare_deepspeed(teacher, accelerator)
    # A unit for each decoder layer: as a single one, the model would be gathered whole in every forward.
    for layer in decoder_layers(teacher):
        fully_shard(layer)
    # Embedding and head are dropped after a forward too, since no backward follows.
    fully_shard(teacher, reshard_after_forward=True)
    return teacher
