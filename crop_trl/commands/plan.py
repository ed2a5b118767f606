"""What a run takes of each GPU, by arithmetic, and whether it fits. Needs no GPU and loads no model.

    crop-trl plan --config examples/configs/setting_a.yaml --accelerate_config zero2_8gpu --teacher Qwen/Qwen3-4B \
        --gpu_gib 80

It takes the settings of `crop-trl train` besides. Models are dense decoders, no mixtures of experts, named as in the
configuration, looked up on the hub or on disk, or by the size of a Qwen3 model (`--student 1.7B`). Ends with status 1
when it does not fit.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trl import ModelConfig

from ..config import option
from ..planning.memory import launch_of, plan_memory, settings_from
from ..planning.shape import shape_of
from ..runs import ScriptArguments, TrainConfig
from ..scoring.placement import MODEL
from .errors import told
from .launch import launch_file
from .options import SettingsParser


@dataclass
class PlanArguments:
    """What is planned; by default the models of the configuration on one process."""

    accelerate_config: str | None = option(None, "Launch file, by name or path.")
    student: str | None = option(None, "Model or size, in place of the configuration's.")
    teacher: str | None = option(None, "Model or size, in place of the configuration's.")
    num_processes: int | None = option(None, "In place of the launch file's.")
    gpu_gib: float = option(80.0, "Memory of a GPU.")
    mean_tokens: int | None = option(None, "Prompt and response on average; by default a third of the most.")


def plan(asked: PlanArguments, fields: Mapping[str, Any]) -> tuple[str, bool]:
    """What there is to say, and whether it fits. Raises `ValueError` for what cannot be planned."""
    student = asked.student or fields.get("model_name_or_path")
    own = fields.get("teacher_source") not in (None, MODEL)
    teacher = student if own else asked.teacher or fields.get("teacher_model_name_or_path")
    taught = teacher or fields.get("teacher_server_urls") or fields.get("teachers")
    if student is None or not taught:
        raise ValueError("Student or teacher is not known; give `--student` and `--teacher`, or a --config with both.")
    file = asked.accelerate_config
    strategy, processes = ("single", 1) if file is None else launch_of(launch_file(file))
    shape = shape_of(student)
    settings = settings_from(
        fields,
        shape,
        strategy=strategy,
        processes=processes if asked.num_processes is None else asked.num_processes,
        gpu_gib=asked.gpu_gib,
        mean_tokens=asked.mean_tokens,
    )
    planned = plan_memory(shape, None if settings.teacher_placement == "server" else shape_of(teacher), settings)
    head = f"{student}, taught by {teacher or 'a server'}: {strategy}, {settings.processes} x {asked.gpu_gib:.0f} GiB."
    verdict = "It fits." if planned.fits else f"It does not fit. {planned.warning}"
    return "\n\n".join([head, planned.table(), verdict]), planned.fits


def main(argv: list[str] | None = None) -> int:
    """Print the plan. Returns 1 when it does not fit."""
    with told():
        parser = SettingsParser("plan", (PlanArguments, ScriptArguments, TrainConfig, ModelConfig), __doc__)
        fields = parser.settings(argv)
        asked = PlanArguments(**{name: fields.pop(name) for name in vars(PlanArguments()) if name in fields})
        text, fits = plan(asked, fields)
    print(text)
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
