"""What a training run came to: `result.json` in its output folder, for budget curves, evaluations and studies."""

import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from ..files import read_object, write_json

FILE = "result.json"
# By name the metric of training, and whether its mean over the logged steps is meant or either end.
STATISTICS = {
    "kept_share": ("selection/retention_ratio", "mean"),
    "kept_per_response": ("selection/tokens_per_response", "mean"),
    "kept_nonzero": ("selection/nonzero_scores", "mean"),
    "gap_kept_first": ("distillation/gap_kept", "first"),
    "gap_kept_last": ("distillation/gap_kept", "last"),
    "entropy_first": ("entropy", "first"),
    "entropy_last": ("entropy", "last"),
    "train_length_first": ("completions/mean_length", "first"),
    "train_length_last": ("completions/mean_length", "last"),
    "truncated_last": ("completions/clipped_ratio", "last"),
    "tokens": ("num_tokens", "last"),
    "seconds_rollout": ("seconds/rollout", "mean"),
    "seconds_scoring": ("seconds/scoring", "mean"),
    "seconds_update": ("seconds/update", "mean"),
    "gap_before": ("eval_distillation/gap_kept", "first"),
    "gap_after": ("eval_distillation/gap_kept", "last"),
    "length_before": ("eval_completions/mean_length", "first"),
    "length_after": ("eval_completions/mean_length", "last"),
}


def statistics_of(log_history: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """What a study keeps of a run's log, resumed or not: lengths in tokens, gaps in nats, seconds a step."""
    logged: dict[str, list[float]] = {}
    for entry in log_history:
        for name, value in entry.items():
            if value is None or value != value:
                continue  # a method without scores has no share of them
            logged.setdefault(name, []).append(value)
    pick = {"first": lambda v: v[0], "last": lambda v: v[-1], "mean": lambda v: sum(v) / len(v)}
    return {name: pick[which](logged[metric]) for name, (metric, which) in STATISTICS.items() if metric in logged}


@cache
def current_commit() -> str | None:
    """The commit of this package's checkout, or what the variable CROP_TRL_COMMIT says of a copy without one."""
    if os.environ.get("CROP_TRL_COMMIT"):
        return os.environ["CROP_TRL_COMMIT"]

    def git(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)

    try:
        # An environment may lie in a repository of somebody else.
        ours = git("ls-files", "--error-unmatch", Path(__file__).name).returncode == 0
        return git("describe", "--always", "--dirty", "--exclude", "*").stdout.strip() or None if ours else None
    except OSError:
        return None


@dataclass(frozen=True)
class RunResult:
    """One JSON object, whose names are these."""

    method: str  # "base": nothing was trained
    accuracy_before: float | None  # on the held-out problems, in [0, 1]; None where it was not measured
    accuracy_after: float | None
    interval_before: tuple[float, float] | None = None  # 95 % confidence
    interval_after: tuple[float, float] | None = None
    retention_ratio: float | None = None  # means nothing to methods that train every token
    seed: int | None = None
    steps: int | None = None
    selector: str | None = None
    selector_sha256: str | None = None
    problems_after: list[float] | None = None  # share of right answers to each held-out problem
    passes: int | None = None  # prompts after which a response was scored
    seconds: float | None = None  # of the process that ended it, evaluations included
    commit: str | None = None
    statistics: dict[str, float] = field(default_factory=dict)  # see `statistics_of`

    def write(self, folder: str | Path) -> None:
        """Write the file into a run's output folder."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_json(Path(folder) / FILE, asdict(self))

    @classmethod
    def read(cls, path: str | Path) -> "RunResult":
        """Read a file, also one with further names. Raises `ValueError` for what is no result of a run."""
        return cls.of(read_object(path, "delete it and train again"), path)

    @classmethod
    def of(cls, content: dict[str, Any], path: str | Path) -> "RunResult":
        """From the content of a file; `path` is for the message."""
        missing = [name for name in ("method", "accuracy_before", "accuracy_after") if name not in content]
        if missing:
            raise ValueError(f"{str(path)!r} is no result of a run: `{missing[0]}` is missing; train again without it.")
        return cls(**{f.name: content[f.name] for f in fields(cls) if f.name in content})
