"""What a trainer is given: looked at before anything is loaded."""

from inspect import isfunction

import transformers
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoConfig, PreTrainedModel, TrainingArguments

from ..checks import check_hub, check_packages
from ..config import CROPConfig
from ..methods import get_method
from ..models.adapters import check_adapter, is_adapter
from ..scoring import Scorer


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


def check_arguments(model, teacher, reward_funcs, args, processing_class=None, **kwargs) -> None:
    """Raise `ValueError` unless what the trainer is given goes together."""
    if not isinstance(args, CROPConfig):
        raise ValueError(f"`args` must be a CROPConfig, got {type(args).__name__}; it takes the same fields and more.")
    if teacher is None and not args.teacher_server_urls:
        raise ValueError(
            "No teacher: pass `teacher` to the trainer, or set `teacher_model_name_or_path` or `teacher_server_urls`."
        )
    if teacher is not None and not isinstance(teacher, str | PreTrainedModel | PeftModel | Scorer):
        raise ValueError(f"`teacher` must be a path, a model or a scorer, got {type(teacher).__name__}.")
    for name in ("environment_factory", "rollout_func"):
        if kwargs.get(name) is not None:
            raise ValueError(f"`{name}` is not supported: responses must follow the dataset's own prompts.")
    if hasattr(processing_class, "tokenizer"):
        raise ValueError(
            f"`processing_class` is a {type(processing_class).__name__}, which reads images, and these are not "
            "supported; pass its `tokenizer`."
        )
    if reward_funcs is no_reward and get_method(args.method).needs_rewards:
        raise ValueError(f"Method {args.method!r} reads rewards; pass `reward_funcs` (`--reward accuracy`).")
    if reward_funcs is no_reward and args.lambda_opd == 0:
        raise ValueError("`lambda_opd` 0 without a reward trains nothing: raise it, or pass `reward_funcs`.")
    frozen = not isinstance(model, str) and not any(p.requires_grad for p in model.parameters())
    if frozen and kwargs.get("peft_config") is None:
        raise ValueError("`model` has no weights that require a gradient; unfreeze some, or pass a `peft_config`.")
    check_packages(args)
    check_hub(args)
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
        kind = type(model.get_base_model() if isinstance(model, PeftModel) else model)
    if hasattr(kind, "can_generate") and not kind.can_generate():
        raise ValueError(f"The student is a {kind.__name__}, which has no output head; choose a causal LM.")
    return model
