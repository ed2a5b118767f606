"""What a trainer is given: looked at before anything is loaded."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from inspect import isfunction
from typing import Any

import transformers
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoConfig, PreTrainedModel, TrainingArguments

from ..checks import check_own_weights, check_packages, told_of
from ..config import CROPConfig
from ..methods import get_method
from ..models.adapters import base_of, check_adapter, is_adapter, starts_at_nothing
from ..models.sharding import fsdp_version, launch_name, zero_stage
from ..prompts import ORIGINAL, STUDENT, TEACHER, split_signal
from ..scoring import Scorer
from ..scoring.placement import INITIAL, MODEL


def no_reward(completions: list, **kwargs) -> list[float]:
    """Reward of 0 for every response: distillation needs none, but GRPO asks for one."""
    return [0.0] * len(completions)


def check_order(teacher, reward_funcs) -> None:
    """Raise `ValueError` for arguments in the order that GRPOTrainer takes."""
    if isinstance(reward_funcs, TrainingArguments) or isfunction(teacher) or isinstance(teacher, list):
        raise ValueError(
            "`CROPTrainer` takes the teacher before the reward functions, unlike GRPOTrainer; pass them by name: "
            "`CROPTrainer(model=..., teacher=..., reward_funcs=..., args=...)`."
        )


def name_teachers(model, teacher, args, peft_config) -> dict[str, tuple[Any, CROPConfig]]:
    """What each teacher is made of (`None`: a server, the student's weights), and its configuration, by name."""
    if not isinstance(args, CROPConfig):
        raise ValueError(f"`args` must be a CROPConfig, got {type(args).__name__}; it takes the same fields and more.")
    if isinstance(teacher, Mapping) and not args.teachers:
        found = {name: (one, args) for name, one in teacher.items()}
    else:
        found = {
            name: (one.teacher_model_name_or_path if teacher is None else teacher, one)
            for name, one in args.each_teacher.items()
        }
        if args.teachers and teacher is not None:
            raise ValueError("`teacher` is passed to the trainer, and `teachers` is set; remove one of the two.")
    for name, (one, own) in found.items():
        with told_of(name):
            found[name] = (_made_of(model, one, own, peft_config), own)
    return found


def _made_of(model, teacher, args: CROPConfig, peft_config):
    """What one teacher is made of."""
    if args.teacher_source == MODEL:
        if teacher is None and not args.teacher_server_urls:
            raise ValueError(
                "No teacher: pass `teacher` to the trainer, or set `teacher_model_name_or_path`, `teacher_server_urls` "
                "or `teacher_source`."
            )
        if teacher is not None and not isinstance(teacher, str | PreTrainedModel | PeftModel | Scorer):
            raise ValueError(f"`teacher` must be a path, a model or a scorer, got {type(teacher).__name__}.")
        return teacher
    if teacher is not None:
        raise ValueError(f"`teacher` is given, but `teacher_source` is {args.teacher_source!r}; remove one of the two.")
    if args.teacher_source == INITIAL and not starts_at_nothing(peft_config):
        return model if isinstance(model, str) else deepcopy(model)
    check_own_weights(vars(args))
    return None


def check_readers(teachers: Mapping[str, tuple[Any, CROPConfig]], args: CROPConfig, reward_funcs) -> None:
    """Raise `ValueError` for a method that reads with a teacher there is not, or learns from nothing but itself."""
    rewarded = bool(reward_funcs) and (args.reward_weights is None or any(args.reward_weights))
    method = get_method(args.method)
    if method.needs_advantages and reward_funcs and not rewarded and args.train:
        what = f"trains by rewards, and none has a weight (`reward_weights` {args.reward_weights})"
        raise ValueError(f"Method {args.method!r} {what}; give one, such as `--reward_weights 1`.")
    for need in method.needs:
        reader, _ = split_signal(need)
        if reader not in (STUDENT, TEACHER, *teachers):
            raise ValueError(f"Method {args.method!r} reads {need!r}, and `teachers` names no such teacher; add it.")
    reader, kind = split_signal(method.target)
    sources = [own.teacher_source for name, (_, own) in teachers.items() if reader in (TEACHER, name)]
    learns = any(source == MODEL or source != STUDENT and rewarded for source in sources)
    if sources and kind == ORIGINAL and args.train and not learns and method.teacher_target is None:
        which = "the student" if sources[0] == STUDENT else "the student as it begins"
        raise ValueError(
            f"The target of method {args.method!r} is {method.target!r}, which with `teacher_source` {sources[0]!r} is "
            f"{which} after the same prompt, so that there is nothing to learn; choose a method with another "
            "target, such as 'teacher/hint', or another teacher."
        )


def prompt_maker(given: Mapping[str, Any]) -> str | None:
    """Which argument makes conversations of the original prompts alone, so that no other kind has one."""
    return next((name for name in ("environment_factory", "rollout_func") if given.get(name) is not None), None)


def check_kinds(maker: str | None, needs: Sequence[str], who: str) -> None:
    """Raise `ValueError` where signals are to be read after prompts that have no conversation."""
    kinds = dict.fromkeys(kind for _, kind in map(split_signal, needs) if kind != ORIGINAL)
    if maker and kinds:
        what = f"{who} reads prompts of the kind {', '.join(kinds)}, and `{maker}` makes those of the original alone"
        raise ValueError(f"{what}; choose a method that reads that, such as 'opd', or give plain functions as `tools`.")


def check_turns(args, given: Mapping[str, Any]) -> None:
    """Raise `ValueError` for conversations that the method cannot read, or that cannot be sampled as is set."""
    if args.train:
        check_kinds(prompt_maker(given), get_method(args.method).needs, f"Method {args.method!r}")
    calling = next((name for name in ("tools", "environment_factory") if given.get(name)), None)
    if calling is None:
        return
    if given.get("rollout_func") is not None:
        raise ValueError(f"`rollout_func` and `{calling}` are both given; call the tools in `rollout_func`.")
    if args.use_cuda_graphs:
        raise ValueError(f"`use_cuda_graphs` does not work with `{calling}`; leave it off, or use vLLM.")
    sharded = zero_stage(args) == 3 or fsdp_version(args) > 0
    waits = {
        launch_name(args): sharded and not args.use_vllm,
        "`vllm_mode` 'server'": args.use_vllm and args.vllm_mode == "server",
        "`vllm_tensor_parallel_size`": args.use_vllm and args.vllm_tensor_parallel_size > 1,
        "`vllm_enable_sleep_mode`": args.use_vllm and sharded and args.vllm_enable_sleep_mode,
    }
    if args.world_size > 1 and any(waits.values()):
        how = next(name for name, so in waits.items() if so)
        what = f"With `{calling}` processes take different numbers of turns, and with {how} each turn waits for all"
        raise ValueError(f"{what}; let each have a vLLM of its own (`vllm_mode` 'colocate', not split, without sleep).")


def check_arguments(model, reward_funcs, args, **kwargs) -> None:
    """Raise `ValueError` unless what the trainer is given goes together."""
    check_turns(args, kwargs)
    # An environment may give rewards of its own.
    unrewarded = reward_funcs is no_reward and kwargs.get("environment_factory") is None
    if unrewarded and get_method(args.method).needs_rewards:
        raise ValueError(f"Method {args.method!r} reads rewards; pass `reward_funcs` (`--reward accuracy`).")
    if unrewarded and args.lambda_opd == 0:
        raise ValueError("`lambda_opd` 0 without a reward trains nothing: raise it, or pass `reward_funcs`.")
    if (
        not isinstance(model, str)
        and not kwargs.get("peft_config")
        and not any(p.requires_grad for p in model.parameters())
    ):
        raise ValueError("`model` has no weights that require a gradient; unfreeze some, or pass a `peft_config`.")
    check_packages(args)
    check_adapter(model, kwargs.get("peft_config"))


def ready_student(model, args: CROPConfig):
    """A student that the trainer can take: the folder of an adapter is loaded, to go on with that adapter."""
    if isinstance(model, str) and is_adapter(model):
        given = {name: value for name, value in (args.model_init_kwargs or {}).items() if value is not None}
        loading = {"dtype": "float32", "trust_remote_code": args.trust_remote_code, **given}
        return AutoPeftModelForCausalLM.from_pretrained(model, is_trainable=True, **loading)
    if isinstance(model, str):
        revision = (args.model_init_kwargs or {}).get("revision") or "main"
        config = AutoConfig.from_pretrained(model, trust_remote_code=args.trust_remote_code, revision=revision)
        named = config.architectures
        kind = getattr(transformers, (named or [""])[0], None)
    else:
        kind = type(base_of(model))
    if hasattr(kind, "can_generate") and not kind.can_generate():
        raise ValueError(f"The student is a {kind.__name__}, which has no output head; choose a causal LM.")
    return model
