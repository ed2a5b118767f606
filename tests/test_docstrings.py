"""What is public says what it does, and what it takes where the summary cannot."""

import importlib
import inspect
import pkgutil
import re

import crop_trl

# With this many arguments of its own a function lists them; with fewer its first sentence may name them.
LISTED_FROM = 3


def public_objects():
    """Qualified name, object, and owning class or None, of every public function, class and method."""
    for info in pkgutil.walk_packages(crop_trl.__path__, "crop_trl."):
        if info.name.endswith("grading_worker"):
            continue  # a program, which limits its own process
        try:
            module = importlib.import_module(info.name)
        except ImportError as error:
            raise AssertionError(f"{info.name} cannot be imported with all extras installed") from error
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != info.name:
                continue
            if inspect.isfunction(value):
                yield f"{info.name}.{name}", value, None
            elif inspect.isclass(value):
                yield f"{info.name}.{name}", value, None
                for own, method in vars(value).items():
                    method = getattr(method, "__func__", getattr(method, "fget", method))
                    if inspect.isfunction(method) and not own.startswith("_"):
                        yield f"{info.name}.{name}.{own}", method, value


def documented_by_base(owner, name: str) -> bool:
    """Whether the method takes the place of one that is documented."""
    return owner is not None and any(getattr(vars(base).get(name), "__doc__", None) for base in owner.__mro__[1:])


def own_arguments(function) -> list[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function).parameters.values()
    return [p.name for p in found if p.name not in ("self", "cls") and p.kind not in kinds]


def generated(value) -> bool:
    """Methods and docstrings that `dataclass` writes."""
    return inspect.isclass(value) and (value.__doc__ or "").startswith(f"{value.__name__}(")


def test_everything_public_has_a_docstring():
    bare = [
        name
        for name, value, owner in public_objects()
        if (not value.__doc__ or generated(value)) and not documented_by_base(owner, name.rpartition(".")[2])
    ]
    assert not bare, "\n".join(bare)


def test_functions_of_several_arguments_list_them():
    lacking = []
    for name, value, owner in public_objects():
        if inspect.isclass(value) or documented_by_base(owner, name.rpartition(".")[2]):
            continue
        arguments, text = own_arguments(value), value.__doc__ or ""
        if len(arguments) < LISTED_FROM:
            continue
        if re.search(r"[Ss]ee \[`", text):
            continue  # told there
        listed = text.partition("Args:")[2].partition("Returns:")[0]
        missing = [argument for argument in arguments if not re.search(rf"\b{argument}\b", listed)]
        if missing:
            lacking.append(f"{name}: {', '.join(missing)}")
    assert not lacking, "\n".join(lacking)


def test_the_public_interface_lists_arguments_and_errors():
    for name in ("select", "register_method", "CROPConfig", "CROPTrainer", "Method", "SelectionSettings"):
        text = inspect.getdoc(getattr(crop_trl, name))
        assert "Args:" in text or name == "register_method"
    for name in ("select", "register_method", "CROPTrainer"):
        assert "Raises:" in inspect.getdoc(getattr(crop_trl, name))
