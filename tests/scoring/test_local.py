"""Scoring against the plain forward of the same model, one sequence at a time."""

import random

import pytest
import torch
from tiny import make_model
from transformers import Cohere2Config, Cohere2ForCausalLM, Gemma2Config, Gemma2ForCausalLM, GraniteConfig
from transformers import GraniteForCausalLM as Granite

from crop_trl.scoring import Scorer
from crop_trl.scoring.layout import group_by_length, pack, split_balanced
from crop_trl.scoring.local import LocalScorer
from crop_trl.scoring.topk import topk_projection

SMALL = {
    "vocab_size": 58,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}


def random_ids(rng, count, low, high, vocab=58):
    return [[rng.randrange(vocab) for _ in range(rng.randint(low, high))] for _ in range(count)]


@torch.no_grad()
def one_at_a_time(model, prompt, completion, k):
    """Slow and obvious: full logits of one sequence."""
    logits = model(torch.tensor([prompt + completion])).logits[0].double()
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : len(prompt) + len(completion) - 1]
    values, ids = rows.topk(min(k, rows.size(-1)), -1)
    return ids, values, rows[torch.arange(len(completion)), torch.tensor(completion)]


def assert_scores_match(model, prompts, completions, k, **settings):
    scorer = LocalScorer(model.eval(), k, pad_token_id=0, **settings)
    scored = scorer.score(prompts, completions)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids, logprobs, sampled = one_at_a_time(model, prompt, completion, k)
        n = len(completion)
        torch.testing.assert_close(scored.logprobs[row, :n].double(), logprobs, atol=2e-5, rtol=0)
        torch.testing.assert_close(scored.sampled_logprobs[row, :n].double(), sampled, atol=2e-5, rtol=0)
        assert (scored.token_ids[row, :n] == ids).float().mean() > 0.99
        assert scored.mask[row].tolist() == [t < n for t in range(scored.mask.size(1))]
        assert not scored.logprobs[row, n:].any() and not scored.sampled_logprobs[row, n:].any()
    return scorer


@pytest.mark.parametrize("tokens_per_batch", [1, 60, 10_000])
@pytest.mark.parametrize("k", [1, 5, 500])
def test_matches_the_plain_forward(k, tokens_per_batch):
    rng = random.Random(0)
    prompts, completions = random_ids(rng, 9, 1, 20), random_ids(rng, 9, 1, 30)
    scorer = assert_scores_match(make_model(0), prompts, completions, k, tokens_per_batch=tokens_per_batch)
    assert isinstance(scorer, Scorer)
    assert scorer.stats.sequences == 9
    assert scorer.stats.tokens == sum(map(len, prompts + completions))
    if tokens_per_batch == 1:
        assert scorer.stats.forwards == 9 and scorer.stats.padding_share == 0


def test_three_prompts_of_different_length_align():
    """The same response after three prompts: position t is response token t each time."""
    rng = random.Random(1)
    (response,) = random_ids(rng, 1, 25, 25)
    prompts = [ids for n in (3, 11, 40) for ids in random_ids(rng, 1, n, n)]
    assert_scores_match(make_model(0), prompts, [response] * 3, 6, tokens_per_batch=10_000)


@pytest.mark.parametrize(
    "model",
    [
        Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=3.0, attn_logit_softcapping=50.0)),
        Cohere2ForCausalLM(Cohere2Config(**{k: v for k, v in SMALL.items() if k != "head_dim"}, logit_scale=0.25)),
        Granite(GraniteConfig(**{k: v for k, v in SMALL.items() if k != "head_dim"}, logits_scaling=4.0)),
    ],
    ids=["soft-capping", "logit scale", "logits scaling"],
)
def test_respects_what_a_model_does_to_its_logits(model):
    rng = random.Random(2)
    prompts, completions = random_ids(rng, 3, 1, 9), random_ids(rng, 3, 1, 9)
    assert_scores_match(model, prompts, completions, 4)


def test_head_with_bias():
    model = make_model(0)
    model.lm_head = torch.nn.Linear(32, 58)
    rng = random.Random(3)
    assert_scores_match(model, random_ids(rng, 3, 1, 9), random_ids(rng, 3, 1, 9), 4)


def test_generation_and_ordinary_forward_stay_as_they_were():
    plain, patched = make_model(0), make_model(0)
    LocalScorer(patched, 4, 0)
    LocalScorer(patched, 4, 0)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(plain(ids).logits, patched(ids).logits)
    assert torch.equal(plain(ids, labels=ids).loss, patched(ids, labels=ids).loss)
    assert torch.equal(
        plain.generate(ids, max_new_tokens=5, do_sample=False), patched.generate(ids, max_new_tokens=5, do_sample=False)
    )


def test_tiles_change_nothing(monkeypatch):
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(37, 16), torch.randn(101, 16), torch.randint(101, (37,))
    whole = topk_projection(hidden, weight, targets, 7)
    monkeypatch.setattr("crop_trl.scoring.topk._CPU_TILE_ELEMENTS", 250)
    tiled = topk_projection(hidden, weight, targets, 7)
    for a, b in zip(whole, tiled, strict=True):
        torch.testing.assert_close(a, b)


def test_one_token_vocabulary_and_no_top_k():
    ids, logprobs, sampled = topk_projection(torch.randn(3, 4), torch.randn(1, 4), torch.zeros(3, dtype=torch.long), 16)
    assert ids.shape == (3, 1) and torch.equal(logprobs, torch.zeros(3, 1)) and torch.equal(sampled, torch.zeros(3))
    assert topk_projection(torch.randn(3, 4), torch.randn(9, 4), torch.zeros(3, dtype=torch.long), 0)[0].shape == (3, 0)


def test_wrong_input():
    scorer = LocalScorer(make_model(0), 4, 0)
    with pytest.raises(ValueError, match="Prompt 1 has no tokens"):
        scorer.score([[1], []], [[2], [3]])
    with pytest.raises(ValueError, match="2 prompts for 1 completions"):
        scorer.score([[1], [2]], [[3]])


def sparse_and_full(model, prompts, completions, keep):
    """Gradient of a sum of log-probs: through the sparse head, and through the full logits."""
    batch = pack(prompts, completions, range(len(prompts)), 0, keep=keep).to(model.device)
    sparse = model(input_ids=batch.input_ids, head_positions=batch.positions, head_targets=batch.targets)
    factor = torch.linspace(-1, 1, batch.positions.numel(), device=model.device)
    model.zero_grad()
    (sparse.logprobs * factor).sum().backward()
    sparse_grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    rows = torch.log_softmax(model(batch.input_ids).logits.float(), -1).flatten(0, 1)[batch.positions]
    full = rows.gather(-1, batch.targets[:, None]).squeeze(-1)
    (full * factor).sum().backward()
    entropy = -(rows.exp() * rows).sum(-1)
    return sparse, full, entropy, sparse_grads, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sparse_projection_equals_the_full_one(share, device):
    from crop_trl.scoring.head import add_token_head

    rng = random.Random(4)
    prompts, completions = random_ids(rng, 5, 1, 12), random_ids(rng, 5, 1, 20)
    torch.manual_seed(0)
    keep = torch.rand(5, 20) < share
    model = make_model(0).to(device)
    add_token_head(model)
    sparse, full, entropy, sparse_grads, full_grads = sparse_and_full(model, prompts, completions, keep)
    torch.testing.assert_close(sparse.logprobs, full, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sparse.entropy, entropy, atol=1e-5, rtol=1e-5)
    for a, b in zip(sparse_grads, full_grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
def test_bf16_teacher_on_a_gpu_keeps_fp32_logits():
    torch.manual_seed(0)
    hidden = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(5000, 256, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(5000, (64,), device="cuda")
    _, logprobs, sampled = topk_projection(hidden, weight, targets, 16)
    exact = torch.log_softmax(hidden.double() @ weight.double().t(), -1)
    torch.testing.assert_close(logprobs.double(), exact.topk(16, -1).values, atol=1e-3, rtol=0)
    torch.testing.assert_close(sampled.double(), exact.gather(-1, targets[:, None])[:, 0], atol=1e-3, rtol=0)


@pytest.mark.gpu
def test_a_student_with_half_precision_weights_is_scored_as_it_is_trained():
    """As under DeepSpeed, where no autocast tells: the ratio of the first update has to be 1."""
    model = make_model(0, vocab=5000).to("cuda", torch.bfloat16)
    rng = random.Random(8)
    prompts, completions = random_ids(rng, 4, 2, 9), random_ids(rng, 4, 3, 12)
    scored = LocalScorer(model, 4, 0, as_trained=True).score(prompts, completions)
    exact = LocalScorer(model, 4, 0).score(prompts, completions)
    batch = pack(prompts, completions, range(4), 0).to("cuda")
    trained = model(input_ids=batch.input_ids, head_positions=batch.positions, head_targets=batch.targets).logprobs
    here = scored.sampled_logprobs[batch.rows, batch.columns]
    torch.testing.assert_close(here, trained, atol=1e-4, rtol=0)
    assert (exact.sampled_logprobs[batch.rows, batch.columns] - trained).abs().max() > 1e-4


def test_padding_to_a_multiple_changes_no_score():
    model, rng = make_model(), random.Random(3)
    prompts, completions = random_ids(rng, 9, 1, 9), random_ids(rng, 9, 1, 20)
    assert_scores_match(model, prompts, completions, 4, tokens_per_batch=64, pad_to_multiple_of=8)
    shapes = []
    model.get_input_embeddings().register_forward_hook(lambda module, ids, output: shapes.append(output.shape[:2]))
    LocalScorer(model, 4, 0, 64, pad_to_multiple_of=8).score(prompts, completions)
    assert all(width % 8 == 0 and rows * width <= 64 for rows, width in shapes)


def test_groups_respect_the_budget_and_lose_nothing():
    rng = random.Random(5)
    for _ in range(50):
        lengths = [rng.randint(1, 300) for _ in range(rng.randint(1, 60))]
        budget = rng.randint(1, 2000)
        groups = group_by_length(lengths, budget)
        assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
        for group in groups:
            assert len(group) == 1 or max(lengths[i] for i in group) * len(group) <= budget


def test_balanced_split_has_the_asked_number_of_batches():
    rng = random.Random(6)
    for _ in range(50):
        n = rng.randint(1, 20)
        lengths = [rng.choice([1, 7, 7, 300, rng.randint(1, 4000)]) for _ in range(rng.randint(n, 80))]
        parts = split_balanced(lengths, n)
        assert len(parts) == n and all(parts)
        assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
        worst = max(max(lengths[i] for i in part) * len(part) for part in parts)
        equal_rows = sorted(lengths, reverse=True)
        size = -(-len(lengths) // n)
        naive = max(equal_rows[i] * len(equal_rows[i : i + size]) for i in range(0, len(lengths), size))
        assert worst <= naive
    with pytest.raises(ValueError, match="Cannot cut 1 sequences into 2"):
        split_balanced([3], 2)


def test_layout_keeps_padding_small_on_realistic_lengths():
    rng = random.Random(7)
    lengths = [min(4096, int(rng.lognormvariate(6.9, 0.8))) + rng.randint(60, 300) for _ in range(64 * 3)]
    padded = sum(max(lengths[i] for i in group) * len(group) for group in group_by_length(lengths, 16384))
    assert 1 - sum(lengths) / padded < 0.08
