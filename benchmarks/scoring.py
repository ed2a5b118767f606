"""Rescoring against its limit: the bare decoder passes over the same tokens, without any head.

    python benchmarks/scoring.py

Measured in one run, in turns: three prompts scored with top-K; three decoder passes of the best arrangement (several
token budgets are tried); three decoder passes in the layout of TRL's trainers (prompts padded left, responses right,
attention mask); the measures of CROP against one teacher pass; and the peak memory of scoring above the weights.
"""

import argparse

import torch
from baseline import GIB, add_measurement_arguments, compare, peak_gib, record, seconds
from shapes import SHAPES, add_rollout_arguments, draw_lengths, draw_prompts, draw_responses, make_model, make_tokenizer

from crop_trl.methods import METHODS, SelectionSettings, select
from crop_trl.models.compilation import compile_layers
from crop_trl.models.fp8 import quantize_layers
from crop_trl.scoring.layout import group_by_length, pack
from crop_trl.scoring.local import LocalScorer


def decoder_passes(model, prompts, responses, tokens_per_batch, device):
    """Run the decoder over the sequences in one piece, grouped by length, and throw the result away."""
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    with torch.inference_mode():
        for rows in group_by_length(lengths, tokens_per_batch):
            model.base_model(input_ids=pack(prompts, responses, rows, 0).to(device).input_ids, use_cache=False)


def padded_passes(model, prompts, responses, rows_per_batch, device):
    """The same in one width for all: prompts padded on the left, responses on the right, with an attention mask."""
    before, after = max(map(len, prompts)), max(map(len, responses))
    input_ids = torch.zeros((len(prompts), before + after), dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        where = slice(before - len(prompt), before + len(response))
        input_ids[i, where] = torch.tensor([*prompt, *response])
        mask[i, where] = 1
    with torch.inference_mode():
        for start in range(0, len(prompts), rows_per_batch):
            rows = slice(start, start + rows_per_batch)
            model.base_model(
                input_ids=input_ids[rows].to(device), attention_mask=mask[rows].to(device), use_cache=False
            )


def main() -> None:
    """Parse, measure, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4B", choices=SHAPES)
    add_rollout_arguments(parser)
    parser.add_argument("--top-k", type=int, default=16)
    parser.add_argument("--budgets", type=int, nargs="+", default=[8_192, 16_384, 32_768])
    parser.add_argument("--compile", action="store_true", help="then the same with `compile_layers`, on both sides")
    parser.add_argument("--fp8", action="store_true", help="then `teacher_quantization: fp8` against that")
    add_measurement_arguments(parser, repeats=3)
    args = parser.parse_args()
    device, cuda = args.device, args.device.startswith("cuda")

    model = make_model(args.shape, device, torch.bfloat16 if cuda else torch.float32).eval()
    vocab = model.config.vocab_size
    tokenizer = make_tokenizer()
    lengths = draw_lengths(args.responses, args.mean, args.longest)
    responses = draw_responses(lengths, vocab)
    kinds = [tokenizer(draw_prompts(args.responses, seed))["input_ids"] for seed in (1, 2, 3)]
    prompts, three = [ids for kind in kinds for ids in kind], responses * 3
    one = {b: LocalScorer(model, args.top_k, 0, b) for b in args.budgets}
    tokens = sum(map(len, prompts)) + sum(map(len, three))
    details = {"shape": args.shape, "responses": args.responses, "tokens": tokens, "longest": max(lengths)}

    default = 16_384 if 16_384 in one else args.budgets[0]
    scorer = one[default]

    def measure() -> dict[str, float]:
        ours = {f"ours/{b}": lambda scorer=scorer: scorer.score(prompts, three) for b, scorer in one.items()}
        bare = {f"bare/{b}": lambda b=b: decoder_passes(model, prompts, three, b, device) for b in args.budgets}
        times = compare({**ours, **bare}, device, args.repeats)
        print({name: round(value, 4) for name, value in times.items()}, flush=True)
        return times

    def rescoring(key: str, times: dict[str, float]) -> float:
        best = min(args.budgets, key=lambda b: times[f"bare/{b}"])
        extra = {"padding": padding, "budgets": [default, best]}
        record(key, times[f"ours/{default}"], times[f"bare/{best}"], device, args.output, **details, **extra)
        return times[f"ours/{default}"]

    scorer.score(prompts, three)
    padding = round(scorer.stats.padding_share, 4)
    padded = min(
        seconds(lambda n=n: [padded_passes(model, kind, responses, n, device) for kind in kinds], device)
        for n in (4, 8)
    )
    plain = rescoring("rescoring", measure())
    record("rescoring_over_padded", plain, padded, device, args.output, **details)
    if args.compile:
        compile_layers(model)
        fast = rescoring("rescoring_compiled", measure())
        record("rescoring_compiled_over_padded", fast, padded, device, args.output, **details)

    if args.fp8:
        before = torch.cuda.memory_allocated() if cuda else 0
        rounded = make_model(args.shape, device, torch.bfloat16).eval()
        quantize_layers(rounded, device)
        gib = round(((torch.cuda.memory_allocated() if cuda else 0) - before) / GIB, 2)
        if args.compile:
            compile_layers(rounded)
        both = {"fp8": LocalScorer(rounded, args.top_k, 0, default), "bf16": scorer}
        times = compare({name: lambda one=one: one.score(prompts, three) for name, one in both.items()}, device)
        key = "fp8_over_compiled" if args.compile else "fp8_over_eager"
        record(key, times["fp8"], times["bf16"], device, args.output, weights_gib=gib, **details)

    signals = [scorer.score(kind, responses) for kind in kinds]
    named = dict(zip(METHODS["crop"].needs, signals, strict=True))
    mask = signals[0].mask
    both = {
        "measures": lambda: select("crop", named, mask, SelectionSettings()),
        "pass": lambda: scorer.score(kinds[0], responses),
    }
    times = compare(both, device, args.repeats)
    record("measures", times["measures"], times["pass"], device, args.output, **details)

    if cuda:
        del named, signals
        long = draw_responses([args.longest] * 8, vocab)
        peak = peak_gib(lambda: scorer.score(kinds[0][:8], long), device)
        logits = 4 * 8 * args.longest * vocab / GIB
        record("scoring_memory_gib", peak, logits, device, args.output, shape=args.shape, length=args.longest)


if __name__ == "__main__":
    main()
