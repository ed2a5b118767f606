"""Do teachers in different places select the same tokens? One batch of responses, scored by each.

    python benchmarks/placements.py --device cpu
    python benchmarks/placements.py --device cuda --dtype bfloat16

Responses are sampled once; then every teacher scores them under the three prompts and the method chooses its share.
The table tells, against the first row, which share of the kept tokens is the same; the same for those whose score is no
near-tie (`large`), since the budget is filled up with tokens that hardly react, and for those whose score is that much
above the best that is not kept (`clear`); how far the teacher's log-probabilities of the
sampled tokens are apart (nats); and what scoring took. For a teacher on a server start one first and name it with
`--server`:

    vllm serve examples/tiny_math/models/teacher --dtype float32 --max-logprobs 16 --no-enable-prefix-caching
"""

import argparse
import json
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

from crop_trl import CROPConfig
from crop_trl.methods import SelectionSettings, get_method, select
from crop_trl.prompts import prompt_kinds, render_prompts, tokenize_variants
from crop_trl.scoring.signals import collect_signals
from crop_trl.scoring.teacher import connect_teacher, make_teacher
from crop_trl.triplets import load_triplets

# Settings of CROPConfig by the name of a row.
PLACEMENTS = {
    "resident": {},
    "offload": {"teacher_placement": "offload"},
    "8bit": {"teacher_quantization": "8bit"},
    "4bit": {"teacher_quantization": "4bit"},
    "fp8": {"teacher_quantization": "fp8"},
    "server": {},
}


def sample(student: str, tokenizer, prompts, tokens: int, seed: int, device) -> list[list[int]]:
    """One response to each prompt, with its EOS token."""
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32).to(device).eval()
    torch.manual_seed(seed)
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(device)
    written = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=tokens)[:, batch["input_ids"].size(1) :]
    responses = []
    for ids in written.tolist():
        end = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
        responses.append(ids[:end])
    return responses


def main() -> None:
    """Parse, sample, score, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--student", default="examples/tiny_math/models/student")
    parser.add_argument("--teacher", default="examples/tiny_math/models/teacher")
    parser.add_argument("--dataset", default="examples/tiny_math/data/heldout.jsonl")
    parser.add_argument("--template", default="{problem}\nGive the answer in \\boxed{}.")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="longest response")
    parser.add_argument("--method", default="crop")
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--large", type=float, default=0.01, help="score from which a token is no near-tie, in nats")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", help="of the teachers after the first row")
    parser.add_argument("--yardstick", default="float32", help="dtype of the first row's teacher")
    parser.add_argument("--server", help="base URL of a server that holds the teacher")
    parser.add_argument("--skip", nargs="*", default=[], choices=tuple(PLACEMENTS), help="rows to leave out")
    parser.add_argument("--output", type=Path, help="JSON file for the table")
    args = parser.parse_args()

    cpu = args.device == "cpu"
    device = torch.device(args.device)
    tokenizer = AutoTokenizer.from_pretrained(args.student)
    rows = list(load_triplets(args.dataset, template=args.template)[0].select(range(args.prompts)))
    needs = get_method(args.method).needs
    prompts = {
        kind: tokenize_variants(rows, kind, lambda several: render_prompts(tokenizer, several))
        for kind in prompt_kinds(needs)
    }
    originals = [ids[0] for ids in prompts["original"]]
    responses = sample(args.student, tokenizer, originals, args.tokens, args.seed, device)
    lengths = torch.tensor([len(ids) for ids in responses])
    loss_mask = (torch.arange(int(lengths.max())) < lengths[:, None]).to(device)
    student = AutoModelForCausalLM.from_pretrained(args.student)

    cases = {args.yardstick: (args.yardstick, {})}
    cases.update({name: (args.dtype, settings) for name, settings in PLACEMENTS.items() if name not in args.skip})
    if not args.server:
        cases.pop("server", None)
    elif "server" in cases:
        cases["server"] = (args.dtype, {"teacher_server_urls": [args.server]})
    table, reference = [], None
    for name, (dtype, settings) in cases.items():
        if name != "server":
            settings = {**settings, "teacher_init_kwargs": {"dtype": dtype}}
        config = CROPConfig(
            "runs/placements",
            use_cpu=cpu,
            bf16=False,
            max_prompt_length=None,
            max_completion_length=args.tokens,
            **settings,
        )
        if name == "server":
            scorer = connect_teacher(None, tokenizer, config)
        else:
            # Anew each time: a new configuration resets the state that all accelerators share.
            scorer = make_teacher(args.teacher, student, config, tokenizer, Accelerator(cpu=cpu))
        collect_signals(needs, {"teacher": scorer}, prompts, responses)  # kernels load, connections open
        scorer.stats.reset()
        started = time.perf_counter()
        signals = collect_signals(needs, {"teacher": scorer}, prompts, responses)
        if not cpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        chosen = select(args.method, signals, loss_mask, SelectionSettings(retention_ratio=args.ratio))
        reference = chosen if reference is None else reference
        same = (chosen.mask & reference.mask).sum() / reference.mask.sum()
        large = reference.mask & (reference.scores > args.large)
        left = reference.scores.masked_fill(reference.mask | ~loss_mask, -torch.inf).amax(-1, keepdim=True)
        clear = reference.mask & (reference.scores >= left + args.large)
        gap = (chosen.teacher_logprobs - reference.teacher_logprobs)[loss_mask].abs()
        row = {
            "teacher": name,
            "dtype": dtype,
            "kept": int(chosen.mask.sum()),
            "overlap": round(same.item(), 4),
            "large": int(large.sum()),
            "overlap_large": round(((chosen.mask & large).sum() / large.sum()).item(), 4),
            "clear": int(clear.sum()),
            "overlap_clear": round(((chosen.mask & clear).sum() / clear.sum()).item(), 4),
            "mean_gap": float(f"{gap.mean().item():.3g}"),
            "largest_gap": float(f"{gap.max().item():.3g}"),
            "seconds": round(seconds, 3),
            "move_seconds": round(getattr(scorer.stats, "move_seconds", 0.0), 4),
        }
        table.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        del scorer, signals
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        card = "cpu" if cpu else torch.cuda.get_device_name()
        args.output.write_text(
            json.dumps({"device": card, "settings": vars(args), "rows": table}, default=str, indent=2)
        )


if __name__ == "__main__":
    main()
