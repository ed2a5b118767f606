"""What a launched test script needs beside its own work."""

import hashlib
import os
from dataclasses import dataclass

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType

from crop_trl import CROPConfig, CROPTrainer

MAX_LENGTH = 12


@dataclass
class EverythingSplit(CROPConfig):
    """ZeRO-3 leaves small weights whole, which would be every weight of these models."""

    def __post_init__(self):
        super().__post_init__()
        if self.deepspeed_plugin is not None and self.deepspeed_plugin.zero_stage == 3:
            zero = self.deepspeed_plugin.deepspeed_config["zero_optimization"]
            zero["stage3_param_persistence_threshold"] = 0


class FixedRollouts(CROPTrainer):
    """Samples by a hash of the prompt and of the response's place among that prompt's responses."""

    masks, rounded = None, None

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, **kwargs):
        first = self.accelerator.process_index * len(prompt_ids)
        completions = []
        for row, ids in enumerate(prompt_ids):
            digest = hashlib.sha256(repr((list(ids), (first + row) % num_generations)).encode()).digest()
            completions.append([5 + byte % 40 for byte in digest[: 1 + digest[0] % MAX_LENGTH]])
        return completions, None

    def _log_update(self, inputs, terms, logprobs, *rest):
        # A type of fewer digits than fp32 shows in the values, whatever they are stored as by now.
        self.rounded = torch.equal(logprobs, logprobs.bfloat16().float())
        super()._log_update(inputs, terms, logprobs, *rest)

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        mask = output["rollout"].selection.mask
        padded = torch.zeros(len(mask), MAX_LENGTH, dtype=torch.int, device=mask.device)
        padded[:, : mask.size(1)] = mask
        self.masks = self.accelerator.gather(padded)
        return output


def accelerator_settings() -> dict:
    """Settings with which several processes train on what the machine has: GPUs, or CPUs over gloo."""
    if torch.cuda.is_available():
        return {"use_cpu": False}
    # CPUs compute in bf16 too.
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        # It would compile an operator for sums in shared memory, which inference alone asks for.
        import deepspeed

        deepspeed.ops.__compatible_ops__ = {}
        # With `use_cpu` plain data parallelism would run instead.
        return {"use_cpu": False, "ddp_backend": "gloo"}
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        _let_fsdp_run_on_cpus()
        return {"use_cpu": False}
    return {"use_cpu": True}


def _let_fsdp_run_on_cpus() -> None:
    """
    Accelerate offers FSDP on accelerators alone, while torch's `fully_shard` runs on CPUs too: tell it of one GPU for
    each process, and place tensors on the CPU all the same. Everything after that is the real thing.
    """

    def set_device(state):
        if state.device is None:
            state.device = torch.device("cpu")

    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = set_device


def whole_weights(trainer) -> torch.Tensor:
    """All trainable parameters in one fp64 vector on the CPU, gathered from wherever they are spread."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    named = sorted((name, p) for name, p in model.named_parameters() if p.requires_grad)
    if any(hasattr(p, "ds_id") for _, p in named):
        import deepspeed

        with deepspeed.zero.GatheredParameters([p for _, p in named]):
            return torch.cat([p.detach().double().flatten().cpu() for _, p in named])
    return torch.cat(
        [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().double().flatten().cpu() for _, p in named]
    )


def local_share(model) -> float:
    """Share of a model's weights that this process holds at rest."""
    held = whole = 0
    for parameter in model.parameters():
        held += parameter.to_local().numel() if hasattr(parameter, "to_local") else parameter.numel()
        whole += getattr(parameter, "ds_numel", parameter.numel())
        if hasattr(parameter, "ds_id"):
            held += parameter.ds_tensor.numel()
    return held / whole
