"""Checks of settings, before a model is loaded: functions of named values that raise `ValueError`, or warn."""

import importlib.util
import math
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .files import check_local
from .methods import get_method
from .methods.divergence import TARGET_DIVERGENCES
from .models.sharding import fsdp_version, launched_processes, zero_stage
from .prompts import TEACHER, needs_negatives
from .scoring.placement import AVERAGE, MODEL, PLACEMENTS, QUANTIZATIONS, SOURCES, STUDENT, dtype_of
from .scoring.server_http import parse_address
from .text import masked

# What the masked distillation loss does not define, by field: the only value that works, and why.
FIXED = {
    "beta": (0.0, "there is no KL term to a reference model beside the teacher"),
    "sync_ref_model": (False, "there is no reference model to synchronise"),
    "loss_type": ("dapo", "the loss is a mean over the kept tokens of the global batch"),
    "importance_sampling_level": ("token", "selection works on tokens"),
    "top_entropy_quantile": (1.0, "which tokens are kept is the method's choice"),
    "entropy_coef": (0.0, "dropped tokens have no entropy in the sparse update"),
    "use_adaptive_entropy": (False, "dropped tokens have no entropy in the sparse update"),
    "off_policy_mask_threshold": (None, "it would drop whole responses behind the budget's back"),
    "vllm_importance_sampling_correction": (False, "it would drop whole responses; the gap to the engine is logged"),
}


# Sampling that leaves the student's distribution alone.
_HARMLESS = (("num_beams", 1), ("renormalize_logits", True), ("renormalize_logits", False), ("use_cache", True))
NEUTRAL_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "min_p": None}

# `stop_token_ids`: all ends that student and teacher declare.
DECLARED = "declared"
# `distillation_loss` that reads more of the teacher than the sampled token.
TOPK = "topk"


def check_number(name: str, value, low: float, whole: bool = False):
    """Return a setting that is a finite number of at least `low`; `whole`: an `int`."""
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value) or value < low:
        raise ValueError(f"`{name}` must be a {'whole ' if whole else ''}number of at least {low}, got {value!r}.")
    return value


def check_numbers(values: Mapping[str, Any], low: float, whole: bool = False, optional: bool = False) -> None:
    """[`check_number`] for several settings by name; `optional`: they may be `None`."""
    for name, value in values.items():
        if not (optional and value is None):
            check_number(name, value, low, whole)


def check_length_schedule(schedule: Mapping[str, int], longest: int | None) -> None:
    """`completion_length_schedule` maps steps to limits that rise up to `longest`."""
    steps = sorted(schedule, key=lambda step: int(step) if str(step).isdecimal() else 0)
    limits = [schedule[step] for step in steps]
    whole = all(type(limit) is int and limit > 0 for limit in limits) and all(str(s).isdecimal() for s in steps)
    if not whole or limits != sorted(limits) or (limits and longest is not None and limits[-1] > longest):
        raise ValueError(
            f"`completion_length_schedule` must name steps and limits that rise up to `max_completion_length` "
            f'({longest}), such as {{"50": 1024, "100": 2048}}, got {schedule}.'
        )


def stop_tokens(value) -> list[int] | str | None:
    """Return `stop_token_ids` as lists of ids or a word; a command line gives `151643,151645`."""
    if value is None or value == DECLARED:
        return value
    ids = value
    if isinstance(value, str):
        parts = [part.strip() for part in value.strip("[] ").split(",")]
        ids = [int(part) for part in parts] if all(part.isdecimal() for part in parts) else None
    if not isinstance(ids, list) or not ids or any(type(id) is not int or id < 0 for id in ids):
        raise ValueError(f"`stop_token_ids` must be {DECLARED!r} or token ids such as [151643, 151645], got {value!r}.")
    return ids


def check_fixed(values: Mapping[str, Any]) -> None:
    """Settings of GRPO for which only one value works here have it."""
    for name, (value, why) in FIXED.items():
        if values[name] != value:
            raise ValueError(f"`{name}={values[name]!r}` does not work here, {why}; leave it at {value!r}.")
    for name in ("use_transformers_continuous_batching", "use_transformers_paged"):
        if values.get(name) and (values["bf16"] is not False or values["fp16"]):
            raise ValueError(f"`{name}` casts the trained weights to half precision in place; use `use_vllm` instead.")
    if values["router_aux_loss_coef"]:
        raise ValueError(
            f"`router_aux_loss_coef={values['router_aux_loss_coef']}` does not work here, the distillation loss has no "
            "load-balancing term; leave it unset."
        )


def check_loss(method: str, loss: str, divergence: str) -> None:
    """The loss is known, and the method's target is what it reads."""
    for name, value, known in (
        ("distillation_loss", loss, ("sampled", TOPK)),
        ("topk_divergence", divergence, TARGET_DIVERGENCES),
    ):
        if value not in known:
            raise ValueError(f"`{name}` {value!r} is not known: choose one of {', '.join(known)}.")
    if loss == TOPK and not get_method(method).has_distribution:
        raise ValueError(f"`distillation_loss` {TOPK!r} needs a distribution, and {method!r} has none; take 'sampled'.")
    if loss != TOPK and divergence != "forward":  # the default, which need not have been given
        raise ValueError(
            f"`topk_divergence` {divergence!r} is read with `distillation_loss` {TOPK!r} alone, and that is {loss!r}; "
            f"set it to {TOPK!r}, or leave `topk_divergence` out."
        )


def warn_of_sampling(values: Mapping[str, Any]) -> None:
    """Warn where rollouts are not sampled from the student's own distribution."""
    changed = {name: values[name] for name, same in NEUTRAL_SAMPLING.items() if values[name] != same}
    extra = values["generation_kwargs"] if isinstance(values["generation_kwargs"], dict) else {}
    changed |= {name: value for name, value in extra.items() if (name, value) not in _HARMLESS}
    if changed:
        warnings.warn(
            f"Rollouts are sampled with {', '.join(f'{name}={value}' for name, value in changed.items())}: the student "
            "log-probabilities in the loss are then not those that the tokens were sampled with.",
            stacklevel=5,
        )


def named_teachers(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`teachers` with the settings of each; a path alone is the model's."""
    teachers = values["teachers"]
    known = [name.removeprefix("teacher_") for name in values if name.startswith("teacher_")]
    if not isinstance(teachers, Mapping) or not teachers:
        raise ValueError(f"`teachers` must give a path or settings by name, got {masked(teachers)!r}.")
    for name in ("teacher_model_name_or_path", "teacher_server_urls"):
        if values[name]:
            raise ValueError(f"`{name}` and `teachers` both say where a teacher is; remove one of the two.")
    found = {}
    for name, own in teachers.items():
        own = {"model_name_or_path": own} if isinstance(own, str) else own
        if not re.fullmatch(r"\w+", str(name)) or name in (STUDENT, TEACHER):
            raise ValueError(f"`teachers` has one named {name!r}; take a word that is neither teacher nor student.")
        unknown = [setting for setting in own if setting not in known] if isinstance(own, Mapping) else [own]
        if unknown:
            raise ValueError(f"Teacher {name!r}: {masked(unknown[0])!r} is no setting; choose of {', '.join(known)}.")
        urls = own.get("server_urls")
        found[name] = {**own, "server_urls": [urls]} if isinstance(urls, str) else dict(own)
    return found


@contextmanager
def told_of(teacher: str) -> Iterator[None]:
    """Let a `ValueError` begin with the name of a teacher, where there are several."""
    try:
        yield
    except ValueError as error:
        if teacher == TEACHER:
            raise
        raise ValueError(f"Teacher {teacher!r}: {error}") from error


# Settings of a teacher by what they are for.
_FOR_A_PATH = ("teacher_model_name_or_path", "teacher_server_urls", "teacher_revision")
_FOR_A_MODEL = ("teacher_placement", "teacher_quantization", "teacher_init_kwargs")


def check_teacher(values: Mapping[str, Any]) -> None:
    """The settings of one teacher, which begin with `teacher_`, are known and do not contradict each other."""
    for name, known in (
        ("teacher_source", SOURCES),
        ("teacher_placement", PLACEMENTS),
        ("teacher_quantization", (None, *QUANTIZATIONS)),
    ):
        if values[name] not in known:
            raise ValueError(
                f"`{name}` {values[name]!r} is not known: choose one of {', '.join(filter(None, known))}"
                f"{', or leave it out' if None in known else ''}."
            )
    source, urls = values["teacher_source"], values["teacher_server_urls"]
    check_number("teacher_server_timeout", values["teacher_server_timeout"], 1)
    if check_number("teacher_decay", values["teacher_decay"], 0) >= 1:
        raise ValueError(f"`teacher_decay` must be less than 1, got {values['teacher_decay']!r}.")
    if source != MODEL:
        _refuse(values, _FOR_A_PATH, f"is for a model of its own, but `teacher_source` is {source!r}")
    check_local(values["teacher_model_name_or_path"], teacher_revision=values["teacher_revision"])
    if source in (STUDENT, AVERAGE):
        check_own_weights(values)
    if urls:
        for url in urls if isinstance(urls, (list, tuple)) else [urls]:
            parse_address(url)
        local = (*_FOR_A_MODEL, "teacher_revision")
        _refuse(values, local, "is for a teacher in this process, but `teacher_server_urls` puts it on a server")
    quantization, placement = values["teacher_quantization"], values["teacher_placement"]
    if quantization is None:
        return
    if placement == "sharded" or placement == "offload" and quantization != "fp8":
        raise ValueError(
            f"`teacher_quantization` {quantization!r} does not work with `teacher_placement` {placement!r}, quantised "
            "weights stay on their device; set it to 'resident'."
        )
    if "quantization_config" in (values["teacher_init_kwargs"] or {}):
        raise ValueError("`teacher_quantization` and a `quantization_config` exclude each other; remove one.")


def check_own_weights(values: Mapping[str, Any]) -> None:
    """Nothing is said of a model where a teacher has the student's own."""
    why = f"is for a second model, but with `teacher_source` {values['teacher_source']!r} the student's own one reads"
    _refuse(values, _FOR_A_MODEL, why)


def _refuse(values: Mapping[str, Any], names: Sequence[str], why: str) -> None:
    for name in names:
        if values[name] and values[name] != "resident":
            raise ValueError(f"`{name}` {masked(values[name])!r} {why}; remove one of the two.")


def check_init_kwargs(name: str, given) -> None:
    """Keyword arguments of `from_pretrained` call the type of weights as it will be read."""
    given = given if isinstance(given, Mapping) else {}
    if "torch_dtype" in given:
        raise ValueError(f"`torch_dtype` in `{name}` is not read beside `dtype`, which always is set; call it `dtype`.")
    value = given.get("dtype")  # a dictionary names one for each part of a model
    if value not in (None, "auto") and not isinstance(value, dict) and dtype_of(value) is None:
        raise ValueError(f"`dtype` {value!r} in `{name}` is no type of weights; take one such as 'bfloat16'.")


def accumulation_steps(prompts_per_step: int, num_generations: int, per_device_train_batch_size: int) -> int:
    """`gradient_accumulation_steps` that follows from the prompts of an optimizer step over all processes."""
    processes = max(1, launched_processes())
    responses = prompts_per_step * num_generations
    per_micro_step = per_device_train_batch_size * processes
    if responses % per_micro_step:
        raise ValueError(
            f"`prompts_per_step` {prompts_per_step} x `num_generations` {num_generations} = {responses} "
            f"responses do not divide into {processes} processes x `per_device_train_batch_size` "
            f"{per_device_train_batch_size}; change one of them."
        )
    return responses // per_micro_step


def check_compilation(plain: bool, zero_stage: int, placement: str) -> None:
    """`compile_layers` goes with the way of sampling, the sharding and the teacher's placement."""
    if plain:
        raise ValueError(
            "`compile_layers` needs `use_vllm` or `use_cuda_graphs`: plain generation would compile anew for every "
            "length of its cache."
        )
    if zero_stage == 3:
        raise ValueError("`compile_layers` does not work with DeepSpeed ZeRO-3; use ZeRO-2, or leave it off.")
    if placement == "sharded":
        raise ValueError("`compile_layers` does not work with `teacher_placement` 'sharded'; choose 'resident'.")


def check_graphs(values: Mapping[str, Any]) -> None:
    """`use_cuda_graphs` is in place of an engine, and draws with a temperature alone."""
    if values["use_vllm"] or values["generation_kwargs"]:
        raise ValueError("`use_cuda_graphs` goes with neither `use_vllm` nor `generation_kwargs`; leave one out.")
    for name, same in NEUTRAL_SAMPLING.items():
        if name != "temperature" and values[name] != same:
            raise ValueError(f"`use_cuda_graphs` samples with `temperature` alone; set `{name}` to {same!r}.")


def check_speculation(values: Mapping[str, Any]) -> None:
    """`vllm_speculative_config` is for an engine in this process, and needs no weights that training leaves behind."""
    if not values["use_vllm"] or values["vllm_mode"] != "colocate":
        raise ValueError(
            "`vllm_speculative_config` needs `use_vllm` with `vllm_mode` 'colocate'; give it to a server as `trl "
            "vllm-serve --speculative_config`."
        )
    method = values["vllm_speculative_config"].get("method")
    if method not in ("ngram", "ngram_gpu"):
        raise ValueError(
            f"`vllm_speculative_config` has `method` {method!r}, but a draft's weights would not follow the student's; "
            "set it to 'ngram'."
        )


def check_windows(args) -> None:
    """Rollouts and optimizer steps fall together; `args` after the batch sizes are set up."""
    accumulation, per_generation = args.gradient_accumulation_steps, args.steps_per_generation
    if per_generation % accumulation:
        raise ValueError(
            f"`steps_per_generation` {per_generation} must be a multiple of `gradient_accumulation_steps` "
            f"{accumulation}, so that every optimizer step sees tokens of one batch of rollouts only."
        )
    prompts = args.generation_batch_size // args.num_generations
    if needs_negatives(get_method(args.method).needs) and prompts <= args.credit_num_negatives:
        raise ValueError(
            f"`credit_num_negatives` {args.credit_num_negatives} needs as many other prompts in a batch of "
            f"rollouts, which holds {prompts}; raise `prompts_per_step` or lower `credit_num_negatives`."
        )


def check_launch(args) -> None:
    """The launcher asks for what would run and for what the teacher needs; `args` after its devices are set up."""
    launched, joined = launched_processes(), args.world_size
    zero, fsdp = zero_stage(args), fsdp_version(args)
    on_cpu = args.distributed_state.distributed_type.value == "MULTI_CPU"
    if launched > 1 and launched != joined:
        raise ValueError(
            f"The environment says that {launched} processes were launched, but each would train as one of {joined}; "
            "on CPUs set `ddp_backend` to 'gloo' for DeepSpeed and `use_cpu` to true for anything else, FSDP needs "
            "GPUs, and without a launcher unset WORLD_SIZE."
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"One process sees {args.n_gpu} GPUs and would split each batch over them in threads, which is not "
            f"supported; start it with `crop-trl train --accelerate_config ddp --num_processes {args.n_gpu}` or "
            f"`accelerate launch --multi_gpu --num_processes {args.n_gpu}`, or set CUDA_VISIBLE_DEVICES to one of them."
        )
    teachers = args.each_teacher.values()
    waits = max((one.teacher_server_timeout for one in teachers if one.teacher_server_urls), default=0)
    if joined > 1 and waits >= args.ddp_timeout:
        raise ValueError(
            f"`teacher_server_timeout` {waits:g} is not less than `ddp_timeout` "
            f"{args.ddp_timeout:g}, after which processes give up on one that waits for a server; raise `ddp_timeout`."
        )
    for setting, asked, how in (
        ("DeepSpeed", zero > 0, "DeepSpeed on CPUs takes `ddp_backend` 'gloo'"),
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
    if fsdp == 1:
        raise ValueError("FSDP version 1 is not supported, it flattens the output head; set `fsdp_version` to 2.")
    if any(one.teacher_placement == "sharded" for one in teachers) and zero != 3 and fsdp != 2:
        raise ValueError(
            "`teacher_placement` 'sharded' needs a launch with DeepSpeed ZeRO-3 or FSDP2 on several processes, such as "
            "`--accelerate_config zero3`; choose 'resident' for any other."
        )


def check_packages(args) -> None:
    """Packages that the settings ask for are installed."""
    wanted = [("report_to", name) for name in args.report_to if name in ("wandb", "tensorboard", "trackio")]
    if args.use_vllm:
        wanted.append(("use_vllm", "vllm"))
    if any(one.teacher_quantization in ("8bit", "4bit") for one in args.each_teacher.values()):
        wanted.append(("teacher_quantization", "bitsandbytes"))
    if args.use_liger_kernel:
        wanted.append(("use_liger_kernel", "liger_kernel"))
    for setting, name in wanted:
        found = importlib.util.find_spec(name)
        # A folder of that name, as runs of wandb leave behind, looks like a package without a file.
        if found is None or found.origin is None:
            raise ValueError(
                f"`{setting}` needs the package {name}, which is not installed: pip install {name.replace('_', '-')}."
            )


def check_output_dir(args) -> None:
    """Raise `OSError` unless the output folder can be written."""
    if args.should_save:
        os.makedirs(args.output_dir, exist_ok=True)
        tempfile.TemporaryFile(dir=args.output_dir).close()
