"""Models spread over processes, by ZeRO-3 or FSDP2: every process has to make the same number of forwards."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from accelerate import Accelerator
from accelerate.utils import get_int_from_env, parse_flag_from_env, patch_environment
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.integrations import deepspeed as hf_deepspeed
from trl.distributed import DistributedBackend
from trl.models import prepare_deepspeed

from .compilation import decoder_layers


def launched_processes() -> int:
    """How many processes the launcher says it started; 1 without a launcher."""
    return get_int_from_env(("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"), 1)


def zero_stage(args) -> int:
    """Stage of DeepSpeed's ZeRO that the launcher or the arguments ask for; 0: none."""
    return 0 if args.deepspeed_plugin is None else args.deepspeed_plugin.zero_stage


def fsdp_version(args) -> int:
    """Version of FSDP that the launcher or the arguments ask for; 0: none."""
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return int(os.environ.get("FSDP_VERSION", "1"))
    return int((args.fsdp_config or {}).get("version", 1)) if args.fsdp else 0


def launch_name(args) -> str:
    """How a run shares its work: `"ZeRO-2"`, `"FSDP2"` or the like, `"no sharding"` for plain data parallelism too."""
    zero, fsdp = zero_stage(args), fsdp_version(args)
    return f"ZeRO-{zero}" if zero else f"FSDP{fsdp}" if fsdp else "no sharding"


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether the model in training is spread over processes, so that each must make as many forwards as the others."""
    backend = DistributedBackend(accelerator)
    return backend.is_zero3 or backend.fsdp_version == 2


def keep_full_outputs(accelerator: Accelerator) -> None:
    """Make FSDP2 leave outputs alone, which it rounds to bf16, and sum gradients in fp32; before wrapping."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    policy = getattr(plugin, "mixed_precision_policy", None)
    if isinstance(policy, MixedPrecisionPolicy):
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32, output_dtype=None)


def gather_by_layer(model: torch.nn.Module, accelerator: Accelerator) -> None:
    """Make ZeRO-3 gather a decoder layer's weights at once, before it wraps; not where some are frozen."""
    kinds = {type(layer) for layer in decoder_layers(model)}
    alike = len({parameter.requires_grad for parameter in model.parameters()}) == 1
    if kinds and alike and DistributedBackend(accelerator).is_zero3:
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, list(kinds))


@contextmanager
def load_whole() -> Iterator[None]:
    """Let `from_pretrained` give every process all weights, also under ZeRO-3 and FSDP."""
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
    """Spread a teacher's weights over all processes; returns the module to call in its place."""
    if DistributedBackend(accelerator).is_zero3:
        gather_by_layer(teacher, accelerator)
        return prepare_deepspeed(teacher, accelerator)
    # A unit for each decoder layer: as a single one, the model would be gathered whole in every forward.
    for layer in decoder_layers(teacher):
        fully_shard(layer)
    # Embedding and head are dropped after a forward too, since no backward follows.
    fully_shard(teacher, reshard_after_forward=True)
    return teacher
