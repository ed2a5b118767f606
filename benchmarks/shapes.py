"""Models of real shapes with random weights, and rollouts of realistic lengths, for the benchmarks.

Speed and memory do not depend on what the weights are, so nothing has to be downloaded.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from crop_trl.planning.shape import QWEN3, ModelShape

SHAPES = {"tiny": ModelShape(64, 128, 2, 2_048, 64, 32, True), **QWEN3}
_WORDS = 1_000


def make_config(shape: str) -> Qwen3Config:
    """The configuration of a Qwen3 model, `"0.6B"` to `"32B"`, or of one small enough for a test, `"tiny"`."""
    size, head_dim = SHAPES[shape], 32 if shape == "tiny" else 128
    return Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.queries // head_dim,
        num_key_value_heads=size.keys // head_dim,
        head_dim=head_dim,
        tie_word_embeddings=size.tied,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


def make_model(shape: str, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Qwen3ForCausalLM:
    """A model with random weights, made where it will live: on the CPU that alone takes minutes for billions."""
    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(make_config(shape))
    finally:
        torch.set_default_dtype(default)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, `w0` to `w999`, so that a prompt of n words has n tokens."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(_WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def save_model(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: str) -> Qwen3ForCausalLM:
    """Write a model to disk in bf16, where an engine can load it from, and tell the model where."""
    # Not by casting the model, which would round its rotary frequencies too.
    weights = {name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=weights)
    config = Path(folder) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "bfloat16"}, indent=2))
    tokenizer.save_pretrained(folder)
    model.config._name_or_path = model.name_or_path = folder
    return model


def draw_lengths(count: int, mean: float = 1_500, longest: int = 4_096, seed: int = 0) -> list[int]:
    """
    Response lengths as reasoning models write them: many short, a long tail, some cut at the limit.

    Log-normal with a spread of 0.7, cut to [16, `longest`] and scaled so that the mean of what is left is `mean`.
    """
    normal = np.random.default_rng(seed).standard_normal(count)
    low, high = 1.0, 20.0 * mean
    for _ in range(60):
        middle = (low * high) ** 0.5
        lengths = np.clip(middle * np.exp(0.7 * normal), 16, longest)
        low, high = (middle, high) if lengths.mean() < mean else (low, middle)
    return [int(length) for length in lengths]


def add_rollout_arguments(parser: argparse.ArgumentParser) -> None:
    """Options for how many responses of what lengths; see [`draw_lengths`]."""
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--mean", type=float, default=1_500, help="tokens of a response on average")
    parser.add_argument("--longest", type=int, default=4_096, help="tokens of the longest response")


def draw_prompts(count: int, seed: int = 1, shortest: int = 80, longest: int = 320) -> list[str]:
    """Prompts of so many words, and so tokens of [`make_tokenizer`]."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest + 1, size=count)
    return [" ".join(f"w{i}" for i in rng.integers(_WORDS, size=length)) for length in lengths]


def draw_responses(lengths: list[int], vocab_size: int, seed: int = 2) -> list[list[int]]:
    """Random token ids of the given lengths; none of them special."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab_size, size=length).tolist() for length in lengths]


def draw_rows(count: int, seed: int = 1, longest: int = 320) -> list[dict]:
    """Dataset rows with the three prompts of a triplet, of about the same length, and at most `longest` tokens."""
    kinds = [draw_prompts(count, seed + 10 * kind, min(80, longest), longest) for kind in range(3)]
    columns = ("prompt", "paraphrase_prompt", "counterfactual_prompt")
    return [dict(zip(columns, row, strict=True)) for row in zip(*kinds, strict=True)]
