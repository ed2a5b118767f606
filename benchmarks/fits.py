"""Run two steps of a configuration with random weights under a cap on GPU memory, and compare with the plan.

    python benchmarks/fits.py --config examples/configs/colab.yaml --student 0.6B --teacher 1.7B --cap-gib 15

A peak above the cap ends in an out-of-memory error, as it would on the smaller card. Without `use_vllm` random weights
hardly ever write an end token: every response has the full length, the worst case. With `--against` the last step is
compared with one under other options, in a process of its own, as `colab_step_s`:

    python benchmarks/fits.py ... --against "--use_cuda_graphs false"
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import fields as dataclass_fields
from pathlib import Path

import torch
from baseline import record
from datasets import Dataset
from shapes import SHAPES, draw_lengths, draw_rows, make_config, make_model, make_tokenizer, save_model
from trainers import given_lengths
from trl import ModelConfig, get_peft_config

from crop_trl import CROPConfig, CROPTrainer
from crop_trl.commands.errors import told
from crop_trl.commands.options import SettingsParser
from crop_trl.planning.memory import ModelShape, plan_memory, settings_from
from crop_trl.runs import ScriptArguments

GIB = 2**30


class PeakByPhase:
    """Peak allocated GiB of rollout, scoring and update, of every step."""

    def __init__(self, trainer):
        self.peaks = {"rollout": 0.0, "scoring": 0.0, "update": 0.0}
        self._wrap(trainer, "_generate", "rollout")
        self._wrap(trainer, "score_rollout", "scoring")
        self._wrap(trainer, "_compute_loss", "update")
        torch.cuda.reset_peak_memory_stats()

    def _wrap(self, trainer, name: str, phase: str) -> None:
        inner = getattr(trainer, name)

        def measured(*args, **kwargs):
            # What came before belongs to the update of the step before, if there was one.
            self._read("update")
            result = inner(*args, **kwargs)
            self._read(phase)
            return result

        setattr(trainer, name, measured)

    def _read(self, phase: str) -> None:
        torch.cuda.synchronize()
        self.peaks[phase] = max(self.peaks[phase], torch.cuda.max_memory_allocated() / GIB)
        torch.cuda.reset_peak_memory_stats()


def compare(args, overrides: list[str]) -> None:
    """Run both sides, and record the seconds of their last steps."""
    command = [sys.executable, __file__, "--config", str(args.config), "--steps", str(args.steps)]
    command += ["--student", args.student, "--teacher", args.teacher, *overrides]
    command += ["--cap-gib", str(args.cap_gib)] if args.cap_gib is not None else []
    sides = []
    for options in ([], shlex.split(args.against)):
        run = subprocess.run([*command, *options], stdout=subprocess.PIPE, text=True, check=True)
        sides.append(json.loads(run.stdout.splitlines()[-1]))
        print(json.dumps(sides[-1]), flush=True)
    details = {"against": args.against, "cap_gib": args.cap_gib, "sides": sides}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record("colab_step_s", *(side["step_seconds"][-1] for side in sides), device, args.output, **details)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--student", default="0.6B", choices=SHAPES)
    parser.add_argument("--teacher", default="1.7B", choices=SHAPES)
    parser.add_argument("--cap-gib", type=float, help="PyTorch may not allocate more")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--against", metavar="OPTIONS", help="of the other side, such as '--use_cuda_graphs false'")
    parser.add_argument("--output", type=Path, help="folder of the baseline files")
    args, overrides = parser.parse_known_args()
    if args.against:
        compare(args, overrides)
        return
    with told():
        parser = SettingsParser("train", (ScriptArguments, CROPConfig, ModelConfig), __doc__)
        fields = parser.settings(["--config", str(args.config), *overrides])
    cuda = torch.cuda.is_available()
    total = torch.cuda.mem_get_info()[1] / GIB if cuda else 0.0
    if args.cap_gib is not None:
        if not 0 < args.cap_gib <= total:
            parser.error(f"--cap-gib {args.cap_gib:g} is no part of this machine's {total:.0f} GiB of GPU memory")
        torch.cuda.set_per_process_memory_fraction(args.cap_gib / total)

    folder, tokenizer = tempfile.mkdtemp(), make_tokenizer()
    fields.update(output_dir=folder, max_steps=args.steps, chat_template_kwargs=None, reward_weights=None)
    fields.update(save_strategy="no", report_to="none", disable_tqdm=True)
    own = {f.name for f in dataclass_fields(CROPConfig)} - {"model_name_or_path", "teacher_model_name_or_path"}
    settings = CROPConfig(**{k: v for k, v in fields.items() if k in own}, use_cpu=not cuda)
    names = {f.name for f in dataclass_fields(ModelConfig)} - own
    adapter = get_peft_config(ModelConfig(**{k: v for k, v in fields.items() if k in names}))
    device = "cuda" if cuda else "cpu"
    # Weights come from disk, in the type of the configuration and without a second copy on the GPU.
    dtype = torch.bfloat16 if cuda else torch.float32
    for seed, (role, shape) in enumerate((("student", args.student), ("teacher", args.teacher))):
        save_model(make_model(shape, device, dtype, seed), tokenizer, f"{folder}/{role}")
    settings.model_init_kwargs = {"dtype": fields.get("dtype") or "float32", **(settings.model_init_kwargs or {})}
    prompts = settings.generation_batch_size // settings.num_generations
    longest = min(320, settings.max_prompt_length or 320)
    data = Dataset.from_list(draw_rows(prompts * (args.steps + 1), longest=longest))
    trainer = CROPTrainer(
        f"{folder}/student",
        f"{folder}/teacher",
        args=settings,
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=adapter,
    )
    mean = settings.max_completion_length
    if settings.use_vllm:
        mean = min(1_500, mean // 2)
        lengths = draw_lengths(settings.generation_batch_size, mean, settings.max_completion_length)
        given_lengths(trainer.vllm_generation.llm, lengths)
    peaks = PeakByPhase(trainer) if cuda else None
    trainer.train()
    shapes = [ModelShape.of(make_config(name)) for name in (args.student, args.teacher)]
    # As it is here: no prompt is longer.
    fields.update(max_prompt_length=longest)
    planned = settings_from(fields, shapes[0], gpu_gib=args.cap_gib or total or 80.0, mean_tokens=mean + 200)
    plan = plan_memory(*shapes, planned)
    result = {
        "cap_gib": args.cap_gib,
        "measured_gib": {k: round(v, 2) for k, v in peaks.peaks.items()} if cuda else None,
        "planned_gib": {phase: round(plan.allocated(phase), 2) for phase in plan.phases},
        "planned_with_engine_and_context_gib": {phase: round(plan.total(phase), 2) for phase in plan.phases},
        "step_seconds": [round(e["step_time"], 2) for e in trainer.state.log_history if "step_time" in e],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
