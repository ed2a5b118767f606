"""What a run takes of each GPU, by arithmetic, and whether it fits. Needs no GPU and loads no model.

    python benchmarks/memory_plan.py --config examples/configs/setting_a.yaml \
        --accelerate-config accelerate_configs/zero2_8gpu.yaml --teacher Qwen/Qwen3-4B --gpu-gib 80

Models are named as in the configuration, looked up on the hub or on disk, or by the size of a Qwen3 model (`--student
1.7B`). Ends with status 1 when it does not fit.
"""

import argparse
import re
import sys
from pathlib import Path

import yaml
from shapes import SHAPES, make_config
from transformers import AutoConfig

from crop_trl.memory import ModelShape, plan_memory, settings_from


def shape_of(name: str) -> ModelShape:
    """Shape of a model by name, path or size."""
    if name in SHAPES:
        return ModelShape.of(make_config(name))
    try:
        return ModelShape.of(AutoConfig.from_pretrained(name))
    except OSError:
        size = re.search(r"Qwen3-(\d+(?:\.\d+)?B)", name)
        if size and size[1] in SHAPES:
            print(f"{name} cannot be read from here; taken as the Qwen3 shape {size[1]}.", file=sys.stderr)
            return ModelShape.of(make_config(size[1]))
        sys.exit(f"error: {name!r} cannot be read; name a folder, or one of the sizes {', '.join(SHAPES)}.")


def launch_of(path: Path | None) -> tuple[str, int]:
    """Strategy and number of processes of an accelerate configuration."""
    if path is None:
        return "single", 1
    launch = yaml.safe_load(path.read_text())
    processes = int(launch.get("num_processes") or 1)
    if "deepspeed_config" in launch:
        return f"zero{launch['deepspeed_config']['zero_stage']}", processes
    if "fsdp_config" in launch:
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
    fields = yaml.safe_load(args.config.read_text()) if args.config else {}
    for name, value in zip(overrides[::2], overrides[1::2], strict=True):
        fields[name.removeprefix("--")] = yaml.safe_load(value)
    student = args.student or fields.get("model_name_or_path")
    teacher = args.teacher or fields.get("teacher_model_name_or_path")
    if student is None or (teacher is None and not fields.get("teacher_server_urls")):
        sys.exit("error: student and teacher are not known; give `--student` and `--teacher`, or a --config with both.")
    strategy, processes = launch_of(args.accelerate_config)
    shape = shape_of(student)
    settings = settings_from(
        fields,
        shape,
        strategy=strategy,
        processes=args.processes or processes,
        gpu_gib=args.gpu_gib,
        mean_tokens=args.mean_tokens,
    )
    plan = plan_memory(shape, None if settings.teacher_placement == "server" else shape_of(teacher), settings)
    print(f"{student}, taught by {teacher}: {strategy}, {settings.processes} x {args.gpu_gib:.0f} GiB.\n")
    print(plan.table())
    print("\nIt fits." if plan.fits else f"\nIt does not fit. {plan.warning}")
    sys.exit(0 if plan.fits else 1)


if __name__ == "__main__":
    main()
