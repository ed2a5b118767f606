"""Peak memory of scoring at a large vocabulary, against the [B, T, V] tensor that it avoids.

    python benchmarks/scoring_memory.py --batch 8 --length 4096 --device cuda

The model is narrow and random: the output head is what is measured. On CUDA the peak is the allocator's, above the
weights; on the CPU it is the growth of the process's peak resident memory.
"""

import argparse
import json

import torch
from baseline import GIB, peak_gib
from transformers import Qwen3Config, Qwen3ForCausalLM

from crop_trl.scoring.local import LocalScorer


def main() -> None:
    """Parse, score once, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    config = Qwen3Config(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=args.hidden // 4,
        max_position_embeddings=args.prompt + args.length,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = Qwen3ForCausalLM(config).to(args.device, dtype).eval()
    scorer = LocalScorer(model, args.top_k, pad_token_id=0)
    prompts = torch.randint(args.vocabulary, (args.batch, args.prompt)).tolist()
    responses = torch.randint(args.vocabulary, (args.batch, args.length)).tolist()
    # The first call loads libraries, which is not what is measured.
    scorer.score(prompts[:1], [responses[0][:8]])
    peak = peak_gib(lambda: scorer.score(prompts, responses), args.device)
    avoided = 4 * args.batch * args.length * args.vocabulary / GIB
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
                "peak_gib": round(peak, 3),
                "logits_fp32_gib": round(avoided, 3),
                "share": round(peak / avoided, 4),
            }
        )
    )


if __name__ == "__main__":
    main()
