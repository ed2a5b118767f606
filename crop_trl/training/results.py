"""What a training run came to: `result.json` in its output folder, for budget curves and evaluations."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..files import read_object, write_json

FILE = "result.json"


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

    def write(self, folder: str | Path) -> None:
        """Write the file into a run's output folder."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_json(Path(folder) / FILE, asdict(self))

    @classmethod
    def read(cls, path: str | Path) -> "RunResult":
        """Read a file, also one with further names. Raises `ValueError` for what is no result of a run."""
        return cls.of(read_object(path, "train again, or delete it"), path)

    @classmethod
    def of(cls, content: dict[str, Any], path: str | Path) -> "RunResult":
        """From the content of a file; `path` is for the message."""
        missing = [name for name in ("method", "accuracy_before", "accuracy_after") if name not in content]
        if missing:
            raise ValueError(f"{str(path)!r} is no result of a run: `{missing[0]}` is missing; train again.")
        return cls(**{field.name: content[field.name] for field in fields(cls) if field.name in content})
