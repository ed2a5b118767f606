"""What a user may call says what it takes; what only the package calls needs a line."""

import importlib
import inspect
import pkgutil
import re

import crop_trl

# What users subclass, implement or call beside the names of `crop_trl`.
EXTENSION_POINTS = (
    "crop_trl.analysis.bank.RolloutBank",
    "crop_trl.evaluation.grading.accuracy_reward",
    "crop_trl.evaluation.grading.grade",
    "crop_trl.methods.budget.quantile_normalize",
    "crop_trl.methods.budget.response_budget",
    "crop_trl.methods.budget.select_top_b",
    "crop_trl.methods.context.SelectionContext",
    "crop_trl.methods.context.Signals",
    "crop_trl.methods.divergence.topk_jsd",
    "crop_trl.scoring.local.LocalScorer",
    "crop_trl.scoring.local.LocalScorer.score",
    "crop_trl.training.callbacks.RolloutCallback.on_rollout",
    "crop_trl.training.callbacks.RolloutRecord",
    "crop_trl.training.export.read_export",
    "crop_trl.training.loss.sampled_opd_loss",
    "crop_trl.triplets.load_triplets",
)


def public_objects():
    """Qualified name and object of every public function, class and method."""
    for info in pkgutil.walk_packages(crop_trl.__path__, "crop_trl."):
        if info.name.endswith("grading.worker"):
            continue  # a program, which limits its own process
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != info.name:
                continue
            if inspect.isfunction(value) or inspect.isclass(value):
                yield f"{info.name}.{name}", value, None
            for own, method in vars(value).items() if inspect.isclass(value) else ():
                method = getattr(method, "__func__", getattr(method, "fget", method))
                if inspect.isfunction(method) and not own.startswith("_"):
                    yield f"{info.name}.{name}.{own}", method, value


def documented_by_base(owner, name: str) -> bool:
    """Whether the method takes the place of one that is documented."""
    return owner is not None and any(getattr(vars(base).get(name), "__doc__", None) for base in owner.__mro__[1:])


def test_everything_public_has_a_docstring():
    # `dataclass` writes one of its own, which begins with the name and a bracket.
    bare = [
        name
        for name, value, owner in public_objects()
        if (not value.__doc__ or value.__doc__.startswith(f"{value.__name__}("))
        and not documented_by_base(owner, name.rpartition(".")[2])
    ]
    assert not bare, "\n".join(bare)


def lacking(name: str, value) -> list[str]:
    """Arguments that a docstring does not list."""
    arguments = [p.name for p in inspect.signature(value).parameters.values() if p.kind is not p.VAR_KEYWORD]
    text = inspect.getdoc(value)
    listed = text.partition("Args:")[2].partition("Returns:")[0] or text
    return [f"{name}: {a}" for a in arguments if a != "self" and not re.search(rf"\b{a}\b", listed)]


def test_what_users_call_lists_its_arguments():
    named = {name: getattr(crop_trl, name) for name in crop_trl.__all__ if callable(getattr(crop_trl, name))}
    # GRPOConfig's own fields are documented there; a scorer's are those of LocalScorer.score.
    own = set(vars(crop_trl.CROPConfig)["__annotations__"])
    kept = ("method", "retention_ratio", "min_tokens", "score_top_k", "teacher_placement", "max_prompt_length")
    text = inspect.getdoc(named.pop("CROPConfig"))
    assert own >= set(kept) and all(f"{name} (" in text for name in kept)
    named.pop("Scorer")
    for path in EXTENSION_POINTS:
        module, _, rest = path.rpartition(".")
        try:
            named[path] = getattr(importlib.import_module(module), rest)
        except ModuleNotFoundError:
            module, _, owner = module.rpartition(".")
            named[path] = getattr(getattr(importlib.import_module(module), owner), rest)
    missing = [line for name, value in named.items() for line in lacking(name, value)]
    assert not missing, "\n".join(missing)


def test_errors_are_listed():
    for name in ("select", "register_method", "CROPTrainer"):
        assert "Raises:" in inspect.getdoc(getattr(crop_trl, name))
