"""What a run takes of each GPU, by arithmetic, and whether it fits. Needs no GPU and loads no model.

    python benchmarks/memory_plan.py --config examples/configs/setting_a.yaml \
        --accelerate-config accelerate_configs/zero2_8gpu.yaml --teacher Qwen/Qwen3-4B --gpu-gib 80

Models are dense decoders, no mixtures of experts, named as in the configuration, looked up on the hub or on disk, or by
the size of a Qwen3 model (`--student 1.7B`). Ends with status 1 when it does not fit.
"""

import argparse
import re
import sys
from pathlib import Path

from run_settings import read_settings, read_yaml
from shapes import SHAPES, make_config
from transformers import AutoConfig

from crop_trl.planning.memory import ModelShape, plan_memory, settings_from


def shape_of(name: str) -> ModelShape:
    """Shape of a model by name, path or size."""
    if name in SHAPES:
        return ModelShape.of(make_config(name))
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError):
        size = re.search(r"Qwen3-(\d+(?:\.\d+)?B)", name)
        if size and size[1] in SHAPES:
            print(f"{name} cannot be read from here; taken as the Qwen3 shape {size[1]}.", file=sys.stderr)
            return ModelShape.of(make_config(size[1]))
        raise ValueError(f"{name!r} cannot be read; name a folder, or one of the sizes {', '.join(SHAPES)}.") from None
    return ModelShape.of(config)


def launch_of(path: Path | None) -> tuple[str, int]:
    """Strategy and number of processes of an accelerate configuration."""
    if path is None:
        return "single", 1
    launch = read_yaml(path)
    processes = int(launch.get("num_processes") or 1)
    if "deepspeed_config" in launch:
        stage = (launch["deepspeed_config"] or {}).get("zero_stage")
        if stage not in (0, 1, 2, 3):
            raise ValueError(
                f"`zero_stage` in {str(path)!r} must be 0, 1, 2 or 3, got {stage!r}; write it into the file."
            )
        if stage:
            return f"zero{stage}", processes
    if "fsdp_config" in launch:
        version = (launch["fsdp_config"] or {}).get("fsdp_version", 1)
        if version != 2:
            raise ValueError(f"`fsdp_version` in {str(path)!r} must be 2, got {version!r}; a run refuses any other.")
        return "fsdp2", processes
    return ("single" if processes == 1 else "ddp"), processes


def main() -> None:
    """Parse, plan, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="YAML file of train_crop.py; by default the defaults")
    parser.add_argument("--accelerate-config", type=Path, help="YAML file of accelerate; by default one process")
    parser.add_argument("--student", help="model or size; by default that of the configuration")
    parser.add_argument("--teacher", help="model or size; by default that of the configuration")
    parser.add_argument("--processes", type=int, help="instead of the accelerate configuration's")
    parser.add_argument("--gpu-gib", type=float, default=80.0, help="memory of a GPU")
    parser.add_argument(
        "--mean-tokens", type=int, help="prompt and response on average; by default a third of the most"
    )
    args, overrides = parser.parse_known_args()
    try:
        text, fits = plan(args, overrides)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(text)
    sys.exit(0 if fits else 1)


def plan(args: argparse.Namespace, overrides: list[str]) -> tuple[str, bool]:
    """What there is to say, and whether it fits. Raises `ValueError` for what cannot be planned."""
    fields = read_settings(args.config, overrides)
    student = args.student or fields.get("model_name_or_path")
    teacher = args.teacher or fields.get("teacher_model_name_or_path")
    if student is None or (teacher is None and not fields.get("teacher_server_urls")):
        raise ValueError(
            "student and teacher are not known; give `--student` and `--teacher`, or a --config with both."
        )
    strategy, processes = launch_of(args.accelerate_config)
    shape = shape_of(student)
    settings = settings_from(
        fields,
        shape,
        strategy=strategy,
        processes=processes if args.processes is None else args.processes,
        gpu_gib=args.gpu_gib,
        mean_tokens=args.mean_tokens,
    )
    planned = plan_memory(shape, None if settings.teacher_placement == "server" else shape_of(teacher), settings)
    head = f"{student}, taught by {teacher}: {strategy}, {settings.processes} x {args.gpu_gib:.0f} GiB."
    verdict = "It fits." if planned.fits else f"It does not fit. {planned.warning}"
    return "\n\n".join([head, planned.table(), verdict]), planned.fits


if __name__ == "__main__":
    main()
