"""How much GPU memory a run takes, by arithmetic.

A step has three phases that hold different things: the rollout (the engine is awake), scoring (the teacher works) and
the update (gradients and activations). Each is the sum of its parts; the largest decides. Nothing is loaded and no GPU
is needed: the shapes of the models and the settings are enough.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig

from ..methods import METHODS
from ..scoring.topk import TILE_ELEMENTS
from ..training.checks import check_number, check_teacher
from .shape import ModelShape, adapter_parameters

GIB = 2**30
STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp2")
# Of an NVIDIA driver, cuBLAS and NCCL in each process, outside what PyTorch counts.
CONTEXT_GIB = 1.0
# What a sleeping engine keeps: captured graphs and workspaces.
SLEEPING_ENGINE_GIB = 1.5
# Elements that DeepSpeed sends at once, by its defaults.
_BUCKET = 5e8


@dataclass(frozen=True)
class MemorySettings:
    """
    What of a run's settings memory depends on. Defaults are those of [`~crop_trl.CROPConfig`].

    Args:
        strategy (`str`): One of `STRATEGIES`.
        processes (`int`): GPUs.
        rows (`int`): `per_device_train_batch_size`.
        mean_tokens, longest_tokens (`int`): Prompt and response together, on average and at most.
        retention_ratio (`float`): Share of tokens that the update projects; 1 for dense methods.
        checkpointing (`bool`): `gradient_checkpointing`.
        score_tokens (`int`): `score_tokens_per_batch`.
        teacher_placement (`str`): `resident`, `offload`, `sharded`, or `server`.
        teacher_bits (`int`): 16, 8 or 4.
        lora_parameters (`int`): Trained weights when the student is an adapter; 0 trains all.
        student_bytes (`int`): Of a weight as the student is loaded (`dtype`): 4, or 2. DeepSpeed makes it 2.
        generated_rows (`int`): Responses that the student itself writes at once; 0 with an engine.
        vllm_share (`float`): `vllm_gpu_memory_utilization` of a colocated engine; 0 without one.
        vllm_sleeps (`bool`): `vllm_enable_sleep_mode`.
        gpu_gib (`float`): Memory of a GPU.
    """

    strategy: str = "single"
    processes: int = 1
    rows: int = 8
    mean_tokens: int = 1_700
    longest_tokens: int = 5_120
    retention_ratio: float = 0.2
    checkpointing: bool = True
    score_tokens: int = 16_384
    teacher_placement: str = "resident"
    teacher_bits: int = 16
    lora_parameters: int = 0
    student_bytes: int = 4
    generated_rows: int = 0
    vllm_share: float = 0.0
    vllm_sleeps: bool = True
    gpu_gib: float = 80.0

    def __post_init__(self):
        if self.strategy not in STRATEGIES:
            raise ValueError(f"`strategy` {self.strategy!r} is not known: choose one of {', '.join(STRATEGIES)}.")
        if self.teacher_placement == "sharded" and self.strategy not in ("zero3", "fsdp2"):
            raise ValueError(
                f"`teacher_placement` 'sharded' needs `zero3` or `fsdp2`, and the launch is {self.strategy!r}; choose "
                "'resident' or 'offload'."
            )
        check_number("processes", self.processes, 1, whole=True)
        for name in ("gpu_gib", "mean_tokens", "longest_tokens"):
            check_number(name, getattr(self, name), 1)

    @property
    def bytes_of_weight(self) -> int:
        """Of the student's, outside the optimizer."""
        return 2 if self.strategy in ("zero1", "zero2", "zero3") else self.student_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """
    GiB on one GPU, by phase and part.

    Args:
        phases (`dict[str, dict[str, float]]`): Parts of `rollout`, `scoring` and `update`.
        gpu_gib (`float`): What there is.
    """

    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    gpu_gib: float = 80.0

    def total(self, phase: str) -> float:
        """GiB of one phase."""
        return sum(self.phases[phase].values())

    def allocated(self, phase: str) -> float:
        """GiB that PyTorch's allocator counts in a phase: without driver and engine."""
        return sum(v for part, v in self.phases[phase].items() if part not in ("CUDA context", "vLLM"))

    @property
    def peak(self) -> float:
        """GiB of the largest phase."""
        return max(map(self.total, self.phases))

    @property
    def fits(self) -> bool:
        """Whether the largest phase leaves a twentieth of the GPU for fragmentation."""
        return self.peak <= 0.95 * self.gpu_gib

    @property
    def warning(self) -> str | None:
        """One sentence when it does not fit: which phase, what is largest in it, what to change first."""
        if self.fits:
            return None
        phase = max(self.phases, key=self.total)
        parts = self.phases[phase]
        largest = max((p for p in parts if p in _REMEDIES), key=parts.get)
        return (
            f"The {phase} phase needs about {self.peak:.1f} GiB, more than 95 % of a GPU's {self.gpu_gib:.0f} GiB, "
            f"most of what can be changed for {largest} ({parts[largest]:.1f} GiB): {_REMEDIES[largest]}."
        )

    def table(self) -> str:
        """A Markdown table, parts by phases."""
        parts = list(dict.fromkeys(part for phase in self.phases.values() for part in phase))
        lines = ["| GiB on each GPU | " + " | ".join(self.phases) + " |", "|---|" + "--:|" * len(self.phases)]
        for part in parts:
            cells = [f"{phase[part]:.1f}" if phase.get(part) else "" for phase in self.phases.values()]
            lines.append(f"| {part} | " + " | ".join(cells) + " |")
        totals = [f"**{self.total(phase):.1f}**" for phase in self.phases]
        return "\n".join([*lines, "| **all** of " + f"{self.gpu_gib:.0f} | " + " | ".join(totals) + " |"])


_REMEDIES = {
    "optimizer": "share it with `zero2` or `fsdp2` over several GPUs or over more of them, or train an adapter "
    "(`use_peft`)",
    "student weights": "share them with `zero3` or `fsdp2`, or take a smaller student",
    "gradients": "share them with `zero2`, or train an adapter (`use_peft`)",
    "teacher weights": "set `teacher_placement` to 'offload' or 'sharded', or put the teacher on a server",
    "update activations": "lower `per_device_train_batch_size`, or turn `gradient_checkpointing` on if it is off",
    "scoring activations": "lower `score_tokens_per_batch`",
    "generation cache": "generate with vLLM (`use_vllm`), load an adapter's student in 16 bits (`dtype: bfloat16`), or "
    "lower `prompts_per_step` or `max_completion_length`",
    "vLLM": "lower `vllm_gpu_memory_utilization`",
}


def _student(shape: ModelShape, s: MemorySettings) -> dict[str, float]:
    """Weights, gradients and optimizer of the student, in bytes."""
    trained = s.lora_parameters or shape.parameters
    frozen = shape.parameters if s.lora_parameters else 0
    shared = s.processes
    if s.strategy in ("zero1", "zero2", "zero3"):
        # DeepSpeed trains bf16 weights and keeps fp32 ones with the optimizer.
        weights = 2 * (trained + frozen) / (shared if s.strategy == "zero3" else 1)
        gradients = 2 * trained / (1 if s.strategy == "zero1" else shared)
        optimizer = 12 * trained / shared
    else:
        parts = shared if s.strategy == "fsdp2" else 1
        # Peft keeps the adapter on 16-bit weights in fp32.
        weights = ((4 if frozen else s.student_bytes) * trained + s.student_bytes * frozen) / parts
        each = 4 if frozen else s.student_bytes
        gradients, optimizer = each * trained / parts, 2 * each * trained / parts
    return {"student weights": weights, "gradients": gradients, "optimizer": optimizer}


def _generation(shape: ModelShape, s: MemorySettings) -> float:
    """Keys and values of all responses at their longest, in the type of the weights, in bytes."""
    tokens = s.generated_rows * s.longest_tokens
    cache = 2 * shape.layers * shape.keys * s.bytes_of_weight
    # One layer at a time: the cache grows by being copied, and attention repeats keys and values for every query head.
    layer = 2 * (shape.keys + shape.queries) * s.bytes_of_weight
    # Scores of the next token in fp32: as they come, as the temperature leaves them, and as probabilities.
    return tokens * (cache + layer) + 3 * 4 * s.generated_rows * shape.vocab


def _update(shape: ModelShape, s: MemorySettings) -> dict[str, float]:
    """What forward and backward of the largest micro-batch add, in bytes."""
    tokens = max(s.rows * s.mean_tokens, s.longest_tokens)
    bf16_weights = s.bytes_of_weight == 2
    residual = 2 if bf16_weights else 4
    kept = shape.saved_bytes_per_token - (10 * shape.hidden if bf16_weights else 0)
    if s.checkpointing:
        # The input of every layer, and one layer at a time in full, with its gradients.
        layers = tokens * (shape.layers * residual * shape.hidden + 1.5 * kept)
    else:
        layers = tokens * shape.layers * kept
    # Autocast keeps a bf16 copy of each weight it has cast until the forward pass is over.
    copies = 0 if bf16_weights else 2 * (shape.parameters if s.strategy != "fsdp2" else shape.layer_parameters)
    chosen = s.retention_ratio * tokens
    # Tiles of 4,096 tokens by 32,768 entries in fp32, a few of them; the hidden states that are projected.
    head = 4 * 4 * min(chosen, 4_096) * min(shape.vocab, 32_768) + 8 * chosen * shape.hidden
    buckets = 0
    if s.strategy.startswith("zero") and s.processes > 1:
        buckets = 2 * 2 * min(_BUCKET, shape.parameters)
    if s.strategy in ("zero3", "fsdp2"):
        buckets += 2 * (2 * shape.layer_parameters + shape.vocab * shape.hidden)
    return {"update activations": max(layers + head, layers + copies), "communication": buckets}


def _scoring(shape: ModelShape, s: MemorySettings) -> float:
    # The head comes after the layers: a tile of fp32 logits beside the hidden states.
    head = 4 * TILE_ELEMENTS + s.score_tokens * 4 * shape.hidden
    return max(s.score_tokens * shape.working_bytes_per_token, head)


def settings_from(
    fields: Mapping[str, Any],
    student: ModelShape,
    *,
    strategy: str = "single",
    processes: int = 1,
    gpu_gib: float = 80.0,
    mean_tokens: int | None = None,
) -> MemorySettings:
    """
    The part of a run's settings that memory depends on.

    Args:
        fields (mapping): Of a [`~crop_trl.CROPConfig`] and [`~trl.ModelConfig`], or of a YAML file of them; what is not
            in it has its default.
        student ([`ModelShape`]): For the size of an adapter.
        strategy, processes, gpu_gib: See [`MemorySettings`].
        mean_tokens (`int`, *optional*): By default a third of the longest, as reasoning models write.

    Returns:
        [`MemorySettings`]

    Raises:
        `ValueError`: a setting that a run would refuse, or an adapter whose size is not known.
    """

    def get(name, default):
        value = fields.get(name)
        return default if value is None else value

    def count(name, default):
        value = get(name, default)
        return None if value is None else check_number(name, value, 1, whole=True)

    check_number("processes", processes, 1, whole=True)
    quantization, urls, init_kwargs = (
        get(f"teacher_{n}", None) for n in ("quantization", "server_urls", "init_kwargs")
    )
    check_teacher(get("teacher_placement", "resident"), quantization, urls, init_kwargs)
    longest = count("max_prompt_length", 1024) + count("max_completion_length", 4096)
    method = METHODS.get(get("method", "crop"))
    dense = method is not None and method.score is None
    colocated = get("use_vllm", False) and get("vllm_mode", "colocate") == "colocate"
    rows = count("per_device_train_batch_size", 8)
    windows = count("steps_per_generation", count("gradient_accumulation_steps", 1))
    prompts = count("prompts_per_step", None)
    in_a_step = rows * windows * processes if prompts is None else prompts * count("num_generations", 4)
    generated = max(1, count("generation_batch_size", in_a_step) // processes)
    own = get("model_init_kwargs", {})
    dtype = (json.loads(own) if isinstance(own, str) else own).get("dtype") or get("dtype", "float32")
    adapter = 0
    if get("use_peft", False):
        modules = get("lora_target_modules", None), get("lora_modules_to_save", None)
        adapter = adapter_parameters(student, count("lora_r", 16), *modules)
    share = check_number("vllm_gpu_memory_utilization", get("vllm_gpu_memory_utilization", 0.3), 0)
    if share > 1:
        raise ValueError(f"`vllm_gpu_memory_utilization` is a share of the GPU, at most 1, got {share}.")
    remote = bool(get("teacher_server_urls", None))
    return MemorySettings(
        strategy=strategy,
        processes=processes,
        rows=rows,
        mean_tokens=max(1, longest // 3) if mean_tokens is None else mean_tokens,
        longest_tokens=longest,
        retention_ratio=1.0 if dense else check_number("retention_ratio", get("retention_ratio", 0.2), 0),
        checkpointing=get("gradient_checkpointing", True),
        score_tokens=count("score_tokens_per_batch", 16_384),
        teacher_placement="server" if remote else get("teacher_placement", "resident"),
        teacher_bits={None: 16, "8bit": 8, "4bit": 4}[get("teacher_quantization", None)],
        lora_parameters=adapter,
        student_bytes=4 if str(dtype).endswith("float32") else 2,
        generated_rows=0 if get("use_vllm", False) else generated,
        vllm_share=share if colocated else 0.0,
        vllm_sleeps=get("vllm_enable_sleep_mode", False),
        gpu_gib=gpu_gib,
    )


def plan_memory(student: ModelShape, teacher: ModelShape | None, settings: MemorySettings) -> MemoryPlan:
    """
    GPU memory of a run.

    Args:
        student, teacher ([`ModelShape`]): The models; no teacher for one on a server.
        settings ([`MemorySettings`]): The rest.

    Returns:
        [`MemoryPlan`]
    """
    s = settings
    own = _student(student, s)
    fixed = {"student weights": own["student weights"], "optimizer": own["optimizer"]}
    weights = 0.0
    if teacher is not None and s.teacher_placement != "server":
        head = teacher.vocab * teacher.hidden * (1 if teacher.tied else 2)
        weights = (teacher.parameters - head) * s.teacher_bits / 8 + 2 * head
        if s.teacher_placement == "sharded":
            weights = weights / s.processes + 2 * (2 * teacher.layer_parameters + teacher.vocab * teacher.hidden)
    at_rest = 0.0 if s.teacher_placement == "offload" else weights
    scorers = [shape for shape in (teacher if s.teacher_placement != "server" else None, student) if shape is not None]
    engine = {"rollout": s.vllm_share * s.gpu_gib * GIB}
    asleep = SLEEPING_ENGINE_GIB * GIB if s.vllm_share and s.vllm_sleeps else engine["rollout"]
    phases = {
        "rollout": {
            **fixed,
            "teacher weights": at_rest,
            "generation cache": _generation(student, s),
            "vLLM": engine["rollout"],
        },
        "scoring": {
            **fixed,
            "teacher weights": weights,
            "scoring activations": _scoring(scorers[0], s),
            "vLLM": asleep,
        },
        "update": {
            **fixed,
            "gradients": own["gradients"],
            "teacher weights": at_rest,
            **_update(student, s),
            "vLLM": asleep,
        },
    }
    for parts in phases.values():
        parts["CUDA context"] = CONTEXT_GIB * GIB
    return MemoryPlan({name: {p: v / GIB for p, v in parts.items()} for name, parts in phases.items()}, s.gpu_gib)


def warn_of_memory(args, student: str, teacher: str | None, model_fields: Mapping[str, Any] | None = None) -> None:
    """
    Warn, before a model is loaded, when a run cannot fit the GPU of this process.

    Silent without a GPU, and for models whose configuration cannot be read or planned: loading them says why.

    Args:
        args ([`~crop_trl.CROPConfig`]): Settings of the run.
        student, teacher (`str`): Where the models come from.
        model_fields (mapping, *optional*): Of [`~trl.ModelConfig`], for the size of an adapter.
    """
    if not torch.cuda.is_available() or args.use_cpu:
        return
    try:
        trust = {"trust_remote_code": args.trust_remote_code}
        student_shape = ModelShape.of(AutoConfig.from_pretrained(student, **trust))
        remote = teacher is None or bool(args.teacher_server_urls)
        teacher_shape = None if remote else ModelShape.of(AutoConfig.from_pretrained(teacher, **trust))
        stage = args.deepspeed_plugin.zero_stage if args.deepspeed_plugin is not None else 0
        is_fsdp = str(args.distributed_state.distributed_type).endswith("FSDP")
        settings = settings_from(
            {**vars(args), **(model_fields or {})},
            student_shape,
            strategy=f"zero{stage}" if stage else "fsdp2" if is_fsdp else "ddp" if args.world_size > 1 else "single",
            processes=args.world_size,
            gpu_gib=torch.cuda.mem_get_info(args.device)[1] / GIB,
        )
    except (OSError, ValueError):
        return
    warning = plan_memory(student_shape, teacher_shape, settings).warning
    if warning:
        warnings.warn(warning, stacklevel=2)
