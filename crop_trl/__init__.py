"""CROP: task relevance through counterfactuals for selective on-policy distillation, on Hugging Face TRL."""

from importlib.metadata import version as _installed
from typing import TYPE_CHECKING

from packaging.version import Version as _Version

__version__ = "0.1.0"

# The trainer overrides internals of GRPOTrainer, so it takes the versions it was tested with (setup.cfg has the same).
_TRL_FROM, _TRL_BELOW = "1.16", "1.17"


def _check_trl() -> None:
    found = _installed("trl")
    if not _Version(_TRL_FROM) <= _Version(found) < _Version(_TRL_BELOW):
        raise ImportError(
            f"crop_trl was tested with trl >= {_TRL_FROM}, < {_TRL_BELOW}, whose internals it overrides, and found "
            f"{found}; install one of these: pip install 'trl>={_TRL_FROM},<{_TRL_BELOW}'."
        )


if TYPE_CHECKING:
    from .config import CROPConfig as CROPConfig
    from .methods import METHODS as METHODS
    from .methods import Method as Method
    from .methods import SelectionSettings as SelectionSettings
    from .methods import register_method as register_method
    from .methods import select as select
    from .scoring import Scorer as Scorer
    from .scoring import TopKLogprobs as TopKLogprobs
    from .trainer import CROPTrainer as CROPTrainer

# Loaded at first use: `import crop_trl.triplets` should not wait for torch and TRL.
_EXPORTS = {
    "CROPConfig": "config",
    "CROPTrainer": "trainer",
    "METHODS": "methods",
    "Method": "methods",
    "SelectionSettings": "methods",
    "register_method": "methods",
    "select": "methods",
    "Scorer": "scoring",
    "TopKLogprobs": "scoring",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if _EXPORTS[name] in ("config", "trainer"):
        _check_trl()
    globals()[name] = getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
