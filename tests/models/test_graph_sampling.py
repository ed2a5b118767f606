"""Sampling by CUDA graphs: on a CPU the same steps run one by one."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, MistralConfig, Qwen3Config

from crop_trl import CROPConfig
from crop_trl.models.graph_sampling import GraphSampler, make_sampler

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "tie_word_embeddings": True,
}
ENDS, PAD = [7, 9], 2
LONG = 300  # tokens, for which the cache is read in parts


def build(kind=Qwen3Config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**SIZES), dtype=torch.float32).eval()


def prompts(rows: int = 5, width: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(10, 300, (rows, width), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, :row] = 0
    return ids, mask


def settings(temperature: float, count: int = 12) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=count, temperature=temperature, pad_token_id=PAD, eos_token_id=ENDS)


def greedy(model, ids: torch.Tensor, mask: torch.Tensor, count: int = 12) -> torch.Tensor:
    how = {"max_new_tokens": count, "do_sample": False, "pad_token_id": PAD, "eos_token_id": ENDS}
    return model.generate(input_ids=ids, attention_mask=mask, **how)


@pytest.mark.parametrize(
    "kind, compiled, count",
    [(LlamaConfig, False, 12), (Qwen3Config, False, LONG), pytest.param(LlamaConfig, True, 12, marks=pytest.mark.slow)],
)
def test_cold_samples_are_greedy_ones(kind, compiled, count):
    model, (ids, mask) = build(kind), prompts()
    sampler = GraphSampler(model, torch.float32, autocast=False, compiled=compiled)
    for _ in range(2):
        found = sampler.generate(ids, mask, settings(1e-4, count))
        expected = greedy(model, ids, mask, count)
        assert torch.equal(found[:, : expected.size(1)], expected)
        # Trained weights are seen in the next batch.
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.05 * torch.randn_like(weight))


def test_adapters_are_sampled_with():
    model = get_peft_model(build(), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    ids, mask = prompts()
    found = GraphSampler(model, torch.float32, autocast=False).generate(ids, mask, settings(1e-4))
    expected = greedy(model, ids, mask)
    assert torch.equal(found[:, : expected.size(1)], expected)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_are_drawn_from_the_model(temperature):
    model, (ids, mask) = build(), prompts(rows=1)
    with torch.no_grad():
        # Far from uniform, so that a wrong temperature shows.
        model.get_input_embeddings().weight.mul_(3)
        expected = (model(ids).logits[0, -1] / temperature).softmax(-1)
    rows = 4096
    sampler = GraphSampler(model, torch.float32, autocast=False)
    torch.manual_seed(0)
    drawn = sampler.generate(ids.expand(rows, -1), mask.expand(rows, -1), settings(temperature, 1))[:, -1]
    shares = torch.bincount(drawn, minlength=300) / rows
    assert 0.02 < expected.max() < 0.9
    assert (shares - expected).abs().max() < 5 * (expected * (1 - expected) / rows).sqrt().max()


def test_nothing_follows_an_end():
    model, (ids, mask) = build(), prompts(rows=40)
    torch.manual_seed(0)
    found = GraphSampler(model, torch.float32, autocast=False).generate(ids, mask, settings(1.0, 400))[:, 9:]
    ended = torch.isin(found, torch.tensor(ENDS))
    assert ended.any()
    after = ended.cumsum(1) - ended.int() > 0
    assert (found[after] == PAD).all() and not (found[~after] == PAD).all()


def test_what_it_cannot_do_is_said_at_once(tmp_path):
    given = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "use_cuda_graphs": True}
    for name, value in {"top_p": 0.9, "top_k": 5, "generation_kwargs": {"min_p": 0.1}}.items():
        with pytest.raises(ValueError, match=f"use_cuda_graphs.*{name}"):
            CROPConfig(**given, **{name: value})
    windows = MistralConfig(**SIZES, sliding_window=4)
    with pytest.raises(ValueError, match="full attention only"):
        make_sampler(AutoModelForCausalLM.from_config(windows), CROPConfig(**given))
