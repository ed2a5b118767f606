"""A browser, and a bank that asks much of a page."""

import pytest
import torch
from viewer.pages import CHROMIUM, chromium, made_up_bank

from crop_trl.methods import METHODS, Method


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("selenium", reason="selenium is not installed (crop-trl[browser])")
    if not all(CHROMIUM):
        pytest.skip("There is no Chromium with its driver; `apt-get install chromium chromium-driver` brings both.")
    with chromium() as started:
        yield started


def scored_with_ties(signals, ctx):
    """Few values, either zero, what is not finite, and one response without any number."""
    generator = torch.Generator().manual_seed(1)
    values = torch.tensor([0.0, -0.0, 1.0, 1.0000001, -3.0, float("nan"), float("inf"), float("-inf")])
    scores = values[torch.randint(len(values), ctx.loss_mask.shape, generator=generator)]
    scores[1] = float("nan")
    return scores


@pytest.fixture
def bank():
    """Long and short responses, one with tokens of a tool, and a method of many ties."""
    lengths = [300, 1, 100, 7, 29, 250, 3, 120]
    bank = made_up_bank(lengths, 400, seed=3)
    bank.loss_mask[5, 20:60] = False
    METHODS["tied"] = Method(score=scored_with_ties)
    METHODS["ruled"] = Method(score=scored_with_ties, keep=lambda signals, ctx: ctx.positions % 3 != 1)
    yield bank
    del METHODS["tied"], METHODS["ruled"]
