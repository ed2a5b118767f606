"""The one-pass top K on a GPU against the obvious one."""

import pytest
import torch

from crop_trl.scoring.tile import tile_topk


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocab", "k"), [(1, 4_096, 1), (7, 151_936, 16), (300, 50_257, 64), (3, 2_111, 16)])
def test_equals_topk_of_the_whole_row(rows, vocab, k):
    generator = torch.Generator("cuda").manual_seed(rows)
    logits = 4 * torch.randn((rows, vocab), generator=generator, device="cuda")
    logits[0, : vocab // 2] = float("-inf")
    normalizer, values, indices = tile_topk(logits, k)
    expected = logits.double().topk(k, dim=-1)
    assert torch.equal(values, expected.values.float())
    assert torch.equal(indices, expected.indices)
    assert (normalizer.squeeze(-1) - torch.logsumexp(logits.double(), -1)).abs().max() < 2e-6


@pytest.mark.gpu
def test_ties_and_rows_that_are_not_finite():
    logits = torch.zeros((4, 70_000), device="cuda")
    logits[1, 123] = 1.0
    logits[2, 5] = float("nan")
    logits[3] = float("-inf")
    logits[3, 69_999] = 2.0
    normalizer, values, indices = tile_topk(logits, 8)
    for row in indices[:2]:
        assert len(set(row.tolist())) == 8
    assert indices[1, 0] == 123 and indices[3, 0] == 69_999
    assert torch.isnan(normalizer[2]).all() and normalizer[3].item() == 2.0
    assert values[0].tolist() == [0.0] * 8
