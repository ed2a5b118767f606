"""A teacher behind `crop-trl serve-teacher` against one in this process: the same sequences in turns, and what is kept.

    python benchmarks/served.py                 # on one card, which both use in turns
    python benchmarks/served.py --server-gpu 1  # the server on the second

First three prompts of long responses, then of 128 short ones (384 sequences of forty tokens), where the trip costs.
"""

import argparse
import re
import subprocess
import sys
import tempfile

import torch
from baseline import add_measurement_arguments, compare, record
from shapes import (
    SHAPES,
    add_rollout_arguments,
    draw_lengths,
    draw_prompts,
    draw_responses,
    make_model,
    make_tokenizer,
    save_model,
)

from crop_trl.methods import METHODS, SelectionSettings, select
from crop_trl.models.compilation import compile_layers
from crop_trl.scoring.local import LocalScorer
from crop_trl.scoring.server import ServerScorer


def start_server(folder: str, options: list[str]) -> tuple[subprocess.Popen, str]:
    """A server that is ready, and its address."""
    command = [sys.executable, "-m", "crop_trl.commands", "serve-teacher", folder, "--port", "0", *options]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        print(line, end="", flush=True)
        if found := re.search(r"http://\S+", line):
            return server, found[0]
    sys.exit("error: the server ended.")


def kept(scorer, kinds: list, responses: list) -> tuple[torch.Tensor, torch.Tensor]:
    """What CROP keeps by the scores of a teacher, and which of it has a score of 0.01 nats or more."""
    signals = [scorer.score(prompts, responses) for prompts in kinds]
    named = dict(zip(METHODS["crop"].needs, signals, strict=True))
    chosen = select("crop", named, signals[0].mask, SelectionSettings())
    return chosen.mask.cpu(), (chosen.mask & (chosen.scores >= 0.01)).cpu()


def main() -> None:
    """Parse, measure, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4B", choices=SHAPES)
    add_rollout_arguments(parser)
    parser.add_argument("--server-gpu", default="0")
    parser.add_argument("--top-k", type=int, default=16)
    parser.add_argument("--compile", action="store_true", help="`compile_layers` on both sides")
    add_measurement_arguments(parser, repeats=5)
    args = parser.parse_args()
    cuda = args.device.startswith("cuda")
    dtype = torch.bfloat16 if cuda else torch.float32

    model, tokenizer = make_model(args.shape, args.device, dtype).eval(), make_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, tokenizer, folder)
        options = ["--gpus", args.server_gpu] if cuda else ["--dtype", "float32"]
        server, url = start_server(folder, options + ["--compile_layers"] * args.compile)
    try:
        if args.compile:
            compile_layers(model)
        here = LocalScorer(model, args.top_k, tokenizer.pad_token_id)
        there = ServerScorer([url], top_k=args.top_k, device=args.device)
        few, short = min(128, args.responses), {"shortest": 10, "longest": 20}
        rollouts = {
            "served_over_resident": (draw_lengths(args.responses, args.mean, args.longest), {}),
            "served_over_resident_short": ([25] * few, short),
        }
        for key, (lengths, prompts) in rollouts.items():
            responses = draw_responses(lengths, 1000)
            kinds = [tokenizer(draw_prompts(len(lengths), seed, **prompts))["input_ids"] for seed in (1, 2, 3)]
            batch = ([ids for kind in kinds for ids in kind], responses * 3)
            both = {"there": lambda batch=batch: there.score(*batch), "here": lambda batch=batch: here.score(*batch)}
            times = compare(both, args.device, args.repeats)
            (ours, large), (theirs, theirs_large) = (kept(scorer, kinds, responses) for scorer in (here, there))
            details = {"shape": args.shape, "sequences": len(batch[0]), "tokens": sum(map(len, sum(batch, [])))}
            details |= {"kept": int(ours.sum()), "kept_by_both": int((ours & theirs).sum())}
            details |= {"large": int(large.sum()), "large_of_both": int((large & theirs_large).sum())}
            record(key, times["there"], times["here"], args.device, args.output, compiled=args.compile, **details)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
