"""Log-probabilities of given entries and of all others, by both roads, against whole logits."""

import pytest
import torch
from tiny import make_model

from crop_trl.scoring import entries
from crop_trl.scoring.head import add_token_head
from crop_trl.scoring.layout import pack
from crop_trl.scoring.projection import MatrixHead

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15]]
RESPONSES = [[3, 4, 5, 6, 7, 8, 9], [10, 11, 12]]


@pytest.fixture
def small_tiles(monkeypatch):
    """As with a real vocabulary: several tiles, the last of each kind smaller."""
    monkeypatch.setattr(entries, "_ROWS", 4)
    monkeypatch.setattr(entries, "_COLUMNS", 13)


def draw(vocab: int, k: int, n: int = 10) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:k] for _ in range(n)]).int()
    return ids, torch.randn(n, generator=generator), torch.randn(n, k + 1, generator=generator)


def of_whole_logits(logits: torch.Tensor, targets: torch.Tensor, ids: torch.Tensor):
    logprobs = logits.log_softmax(-1)
    left = torch.ones_like(logprobs, dtype=torch.bool).scatter(-1, ids.long(), False)
    rest = logprobs.masked_fill(~left, entries.ABSENT).logsumexp(-1, keepdim=True)
    of_ids = torch.cat([logprobs.gather(-1, ids.long()), rest], dim=-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1), of_ids


@pytest.mark.parametrize("road", ["matrix", "own"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_s_entries_and_their_gradient_are_those_of_its_logits(small_tiles, road, tied):
    model = make_model(0, tied=tied)
    model._head_is_matrix = road == "matrix"
    add_token_head(model)
    # A stop with three ends: the others are projected too, and have no ids.
    batch = pack(PROMPTS, RESPONSES, [0, 1], 0, ends=(9, 20, 21))
    assert len(batch.positions) == 12 and len(batch.rows) == 10
    ids, for_targets, for_ids = draw(model.config.vocab_size, 5)
    out = model(input_ids=batch.input_ids, head_positions=batch.positions, head_targets=batch.targets, head_ids=ids)
    whole = model(input_ids=batch.input_ids).logits.flatten(0, 1)[batch.positions]
    expected = of_whole_logits(whole, batch.targets, torch.cat([ids, ids[:2]]))
    torch.testing.assert_close(out.logprobs, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.entropy, expected[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.entry_logprobs, expected[2][:10], atol=1e-5, rtol=1e-5)
    gradients = []
    for of_targets, of_ids in ((out.logprobs, out.entry_logprobs), (expected[0], expected[2][:10])):
        loss = (of_targets[:10] * for_targets).sum() + (of_ids * for_ids).sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("k", [4, 29])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (4.0, 0.7)])
def test_heads_with_a_bias_a_scale_and_a_soft_cap(small_tiles, k, softcap, scale):
    """29 are all entries: of others there is no mass. One id is beyond the head."""
    head = torch.nn.Linear(8, 29)
    model = make_model(0)
    matrix = MatrixHead(model)
    matrix.module, matrix.softcap, matrix.scale = head, softcap, scale
    hidden = torch.randn(10, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    ids, for_targets, for_ids = draw(29, k)
    targets = torch.arange(10)
    logits = head(hidden) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = of_whole_logits(logits, targets, ids)
    got = matrix.entries(hidden, targets, ids)
    if k == 29:
        assert (got[2][:, -1] < -1e29).all()
        for_ids[:, -1] = 0.0
    gradients = []
    for values in (got, expected):
        loss = (values[0] * for_targets).sum() + (values[2] * for_ids).sum()
        gradients.append(torch.autograd.grad(loss, (hidden, head.weight, head.bias)))
    for ours, theirs in (*zip(got, expected), *zip(*gradients)):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    beyond = ids.clone()
    beyond[:, 0] = 1000
    fewer = matrix.entries(hidden, targets, beyond)[2]
    assert (fewer[:, 0] < -1e29).all()
    torch.testing.assert_close(fewer[:, -1].exp(), got[2][:, [0, -1]].exp().sum(-1))


def test_half_precision_rounds_products_and_not_sums(small_tiles):
    head = torch.nn.Linear(64, 29, bias=False)
    matrix = MatrixHead(make_model(0))
    matrix.module, matrix.softcap, matrix.scale = head, None, 1.0
    hidden = torch.randn(10, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    ids, for_targets, for_ids = draw(29, 4)
    results = []
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            of_targets, entropy, of_ids = matrix.entries(hidden, torch.arange(10), ids)
        assert of_targets.dtype == entropy.dtype == of_ids.dtype == torch.float32
        loss = (of_targets * for_targets).sum() + (of_ids * for_ids).sum()
        results.append((of_ids, *torch.autograd.grad(loss, (hidden, head.weight))))
        torch.testing.assert_close(of_ids.exp().sum(-1), torch.ones(10))
    for half, full in zip(*results):
        assert (half - full).norm() < 0.02 * full.norm()
