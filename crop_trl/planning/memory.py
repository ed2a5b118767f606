"""How much GPU memory a run takes, by arithmetic: rollout, scoring and update hold different things, the largest
decides."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from trl import ModelConfig

from ..checks import check_number, check_teacher
from ..config import CROPConfig
from ..files import read_yaml
from ..methods import METHODS
from ..models.sharding import fsdp_version, zero_stage
from ..scoring.placement import AVERAGE, MODEL, STUDENT
from ..scoring.topk import TILE_ELEMENTS
from ..text import markdown_table
from .shape import ModelShape, adapter_parameters

GIB = 2**30
STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp2")
# Of an NVIDIA driver, cuBLAS and NCCL in each process, outside what PyTorch counts.
CONTEXT_GIB = 1.0
# What a sleeping engine keeps: captured graphs and workspaces.
SLEEPING_ENGINE_GIB = 1.5
# What a run has that does not say.
_DEFAULTS = {f.name: f.default for kind in (ModelConfig, CROPConfig) for f in fields(kind)}
# Elements that DeepSpeed sends at once, by its defaults.
_BUCKET = 5e8


@dataclass(frozen=True)
class MemorySettings:
    """What of a run's settings memory depends on."""

    strategy: str = "single"  # one of STRATEGIES
    processes: int = 1
    rows: int = 8  # per_device_train_batch_size
    mean_tokens: int = 1_700  # of prompt and response together
    longest_tokens: int = 5_120
    retention_ratio: float = 0.2  # what the update projects; 1 for dense methods
    checkpointing: bool = True
    score_tokens: int = 16_384
    teacher_placement: str = "resident"  # or "offload", "sharded", "server", which takes nothing here
    teacher_bits: int = 16
    lora_parameters: int = 0  # 0 trains all
    student_bytes: int = 4  # of a weight as it is loaded; DeepSpeed makes it 2
    generated_rows: int = 0  # responses that the student itself writes at once; 0 with an engine
    cuda_graphs: bool = False  # which keep a copy of the student, and the cache
    vllm_share: float = 0.0  # of a colocated engine
    vllm_sleeps: bool = True
    gpu_gib: float = 80.0

    def __post_init__(self):
        if self.teacher_placement == "sharded" and self.strategy not in ("zero3", "fsdp2"):
            raise ValueError(f"`teacher_placement` 'sharded' needs `zero3` or `fsdp2`, and not {self.strategy!r}.")
        for name in ("gpu_gib", "mean_tokens", "longest_tokens"):
            check_number(name, getattr(self, name), 1)

    @property
    def bytes_of_weight(self) -> int:
        """Of the student's, outside the optimizer."""
        return 2 if self.strategy in ("zero1", "zero2", "zero3") else self.student_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """GiB on one GPU: parts of the phases `rollout`, `scoring` and `update`, and what there is."""

    phases: dict[str, dict[str, float]]
    gpu_gib: float

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
        parts = dict.fromkeys(part for phase in self.phases.values() for part in phase)
        rows = [[p, *(f"{x[p]:.1f}" if x.get(p) else "" for x in self.phases.values())] for p in parts]
        rows.append([f"**all** of {self.gpu_gib:.0f}", *(f"**{self.total(phase):.1f}**" for phase in self.phases)])
        return markdown_table(["GiB on each GPU", *self.phases], rows, right=True, padded=True).strip()


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
    "sampling copy": "generate with vLLM (`use_vllm`), or turn `use_cuda_graphs` off",
    "vLLM": "lower `vllm_gpu_memory_utilization`",
}


def _student(shape: ModelShape, s: MemorySettings) -> dict[str, float]:
    """Weights, gradients and optimizer of the student, in bytes."""
    trained = s.lora_parameters or shape.parameters
    frozen = shape.parameters if s.lora_parameters else 0
    if s.strategy in ("zero1", "zero2", "zero3"):
        # DeepSpeed trains bf16 weights and keeps fp32 ones with the optimizer.
        weights = 2 * (trained + frozen) / (s.processes if s.strategy == "zero3" else 1)
        gradients = 2 * trained / (1 if s.strategy == "zero1" else s.processes)
        optimizer = 12 * trained / s.processes
    else:
        parts = s.processes if s.strategy == "fsdp2" else 1
        each = 4 if frozen else s.student_bytes  # Peft keeps the adapter on 16-bit weights in fp32
        weights = (each * trained + s.student_bytes * frozen) / parts
        gradients, optimizer = each * trained / parts, 2 * each * trained / parts
    return {"student weights": weights, "gradients": gradients, "optimizer": optimizer}


def _generation(shape: ModelShape, s: MemorySettings) -> float:
    """Keys and values of all responses at their longest, in the type of the weights, in bytes."""
    if s.cuda_graphs:
        return s.generated_rows * s.longest_tokens * 2 * shape.layers * shape.keys * 2
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
    copies = 0 if bf16_weights else 2 * (shape.layer_parameters if s.strategy == "fsdp2" else shape.parameters)
    chosen = s.retention_ratio * tokens
    # Tiles of 4,096 tokens by 32,768 entries in fp32, a few of them; the hidden states that are projected.
    head = 4 * 4 * min(chosen, 4_096) * min(shape.vocab, 32_768) + 8 * chosen * shape.hidden
    buckets = 0
    if s.strategy.startswith("zero") and s.processes > 1:
        buckets = 2 * 2 * min(_BUCKET, shape.parameters)
    if s.strategy in ("zero3", "fsdp2"):
        buckets += 2 * (2 * shape.layer_parameters + shape.vocab * shape.hidden)
    return {"update activations": max(layers + head, layers + copies), "communication": buckets}


def settings_from(
    given: Mapping[str, Any],
    student: ModelShape,
    *,
    strategy: str = "single",
    processes: int = 1,
    gpu_gib: float = 80.0,
    mean_tokens: int | None = None,
) -> MemorySettings:
    """What memory depends on of a run's settings; sequences are a third of the longest by default."""

    def get(name):
        value = given.get(name)
        return _DEFAULTS[name] if value is None else value

    def count(name):
        value = get(name)
        return None if value is None else check_number(name, value, 1, whole=True)

    check_number("num_processes", processes, 1, whole=True)
    if get("teachers"):
        raise ValueError("`teachers` names several, and memory is planned for one; leave it out and give the largest.")
    check_teacher({name: get(name) for name in _DEFAULTS if name.startswith("teacher_")})
    placement, bits = get("teacher_placement"), {None: 16, "8bit": 8, "fp8": 8, "4bit": 4}[get("teacher_quantization")]
    source = get("teacher_source")
    if get("teacher_server_urls") or source == STUDENT or (source != MODEL and get("use_peft")):
        placement = "server"
    elif source == AVERAGE:  # in fp32, and in the shares that the student is in
        placement, bits = "sharded" if strategy in ("zero3", "fsdp2") else "resident", 32
    longest = count("max_prompt_length") + count("max_completion_length")
    method = METHODS.get(get("method"))
    dense = method is not None and method.score is None
    rows, prompts = count("per_device_train_batch_size"), count("prompts_per_step")
    steps, at_once = count("steps_per_generation"), count("generation_batch_size")
    if not at_once and (steps or prompts is None):
        at_once = rows * (steps or count("gradient_accumulation_steps")) * processes
    generated = max(1, (at_once or prompts * count("num_generations")) // processes)
    own = get("model_init_kwargs") or {}
    dtype = (json.loads(own) if isinstance(own, str) else own).get("dtype") or get("dtype")
    adapter = 0
    if get("use_peft"):
        adapter = adapter_parameters(student, count("lora_r"), get("lora_target_modules"), get("lora_modules_to_save"))
    share = check_number("vllm_gpu_memory_utilization", get("vllm_gpu_memory_utilization"), 0)
    return MemorySettings(
        strategy=strategy,
        processes=processes,
        rows=rows,
        mean_tokens=max(1, longest // 3) if mean_tokens is None else mean_tokens,
        longest_tokens=longest,
        retention_ratio=1.0 if dense else check_number("retention_ratio", get("retention_ratio"), 0),
        checkpointing=get("gradient_checkpointing"),
        score_tokens=count("score_tokens_per_batch"),
        teacher_placement=placement,
        teacher_bits=bits,
        lora_parameters=adapter,
        student_bytes=4 if str(dtype).endswith("float32") else 2,
        generated_rows=0 if get("use_vllm") else generated,
        cuda_graphs=get("use_cuda_graphs"),
        vllm_share=share if get("use_vllm") and get("vllm_mode") == "colocate" else 0.0,
        vllm_sleeps=get("vllm_enable_sleep_mode"),
        gpu_gib=gpu_gib,
    )


def launch_of(file: str | Path) -> tuple[str, int]:
    """Strategy and number of processes of a launch file. Raises `ValueError` for one that a run refuses."""
    launch = read_yaml(file)
    processes = int(launch.get("num_processes") or 1)
    if "deepspeed_config" in launch:
        stage = (launch["deepspeed_config"] or {}).get("zero_stage")
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"`zero_stage` in {str(file)!r} must be 0, 1, 2 or 3, got {stage!r}.")
        if stage:
            return f"zero{stage}", processes
    if "fsdp_config" in launch:
        version = (launch["fsdp_config"] or {}).get("fsdp_version", 1)
        if version != 2:
            raise ValueError(f"`fsdp_version` in {str(file)!r} must be 2, got {version!r}.")
        return "fsdp2", processes
    return ("single" if processes == 1 else "ddp"), processes


def plan_memory(student: ModelShape, teacher: ModelShape | None, settings: MemorySettings) -> MemoryPlan:
    """GPU memory of a run; `teacher` may be `None` where it takes none."""
    s = settings
    own = _student(student, s)
    gradients = own.pop("gradients")
    weights, scorer = 0.0, student
    if teacher is not None and s.teacher_placement != "server":
        scorer = teacher
        layers = teacher.layers * teacher.layer_parameters  # the head stays as it is when they are quantised
        weights = layers * s.teacher_bits / 8 + 2 * (teacher.parameters - layers)
        if s.teacher_placement == "sharded":
            weights = weights / s.processes + 2 * (2 * teacher.layer_parameters + teacher.vocab * teacher.hidden)
    at_rest = 0.0 if s.teacher_placement == "offload" else weights
    # The head comes after the layers: a tile of fp32 logits beside the hidden states.
    head = 4 * TILE_ELEMENTS + s.score_tokens * 4 * scorer.hidden
    scoring = max(s.score_tokens * scorer.working_bytes_per_token, head)
    awake = s.vllm_share * s.gpu_gib * GIB
    asleep = SLEEPING_ENGINE_GIB * GIB if s.vllm_share and s.vllm_sleeps else awake
    cache = {"generation cache": _generation(student, s)}
    if s.cuda_graphs:
        # Linear layers and the head in 16 bits. From the first rollout on, all of it stays.
        head = student.vocab * student.hidden
        copy = 2 * (student.layers * student.layer_parameters + head + s.lora_parameters) + s.student_bytes * head
        cache = {"sampling copy": copy, **cache}
        own |= cache
    phases = {
        "rollout": {"teacher weights": at_rest, **cache, "vLLM": awake},
        "scoring": {"teacher weights": weights, "scoring activations": scoring, "vLLM": asleep},
        "update": {"gradients": gradients, "teacher weights": at_rest, **_update(student, s), "vLLM": asleep},
    }
    for name, parts in phases.items():
        parts = {**own, **parts, "CUDA context": CONTEXT_GIB * GIB}
        phases[name] = {part: size / GIB for part, size in parts.items()}
    return MemoryPlan(phases, s.gpu_gib)


def warn_of_memory(args, student: str, model_fields: Mapping[str, Any] | None = None) -> None:
    """Warn, before a model is loaded, when a run cannot fit the GPU of this process; silent where there is none."""
    if not torch.cuda.is_available() or args.use_cpu:
        return
    try:

        def shape(model: str, given: Mapping[str, Any] | None) -> ModelShape:
            revision = (given or {}).get("revision") or "main"
            loading = {"trust_remote_code": args.trust_remote_code, "revision": revision}
            return ModelShape.of(AutoConfig.from_pretrained(model, **loading))

        student_shape = shape(student, args.model_init_kwargs)
        teacher = student if args.teacher_source != MODEL else args.teacher_model_name_or_path
        remote = teacher is None or bool(args.teacher_server_urls)
        teacher_shape = None if remote else shape(teacher, args.teacher_kwargs)
        zero, whole = zero_stage(args), "ddp" if args.world_size > 1 else "single"
        settings = settings_from(
            {**vars(args), **(model_fields or {})},
            student_shape,
            strategy=f"zero{zero}" if zero else "fsdp2" if fsdp_version(args) else whole,
            processes=args.world_size,
            gpu_gib=torch.cuda.mem_get_info(args.device)[1] / GIB,
        )
    except (OSError, ValueError):  # loading the model says why
        return
    warning = plan_memory(student_shape, teacher_shape, settings).warning
    if warning:
        warnings.warn(warning, stacklevel=2)
