"""Entropy ranks: density and tail against values worked out by hand, ties, and a real bank."""

import numpy as np
import pytest

from crop_trl.analysis.entropy_ranks import entropy_ranks, save_entropy_chart
from crop_trl.analysis.tokens import TokenTable


def table(entropy, lengths=None, trainable=None, **kept):
    entropy = np.asarray(entropy, dtype=float)
    n = len(entropy)
    kept = {name: np.isin(np.arange(n), places) for name, places in kept.items()}
    return TokenTable(
        np.arange(n),
        np.array([n] if lengths is None else lengths),
        np.ones(n, dtype=bool) if trainable is None else trainable,
        kept,
        entropy=entropy,
    )


def test_density_and_tail_by_hand():
    # Ten tokens whose places are their ranks, lowest entropy last.
    ranks = entropy_ranks(table(np.linspace(1, 0.1, 10), top=[0, 1], ends=[0, 9], last=[9]), tail=0.2, bins=5)
    np.testing.assert_allclose(ranks.density, [[1, 0, 0, 0, 0], [0.5, 0, 0, 0, 0.5], [0, 0, 0, 0, 1]], atol=1e-12)
    np.testing.assert_allclose(ranks.tail_share, [0, 0.5, 1], atol=1e-12)
    np.testing.assert_allclose(ranks.reference, [0.2, 0.2, 0.2])
    assert ranks.kept_tokens.tolist() == [2, 2, 1]
    # A bin may be narrower than a token, and the tail a part of one.
    ranks = entropy_ranks(table([0.9, 0.5], last=[1]), tail=0.25, bins=4)
    np.testing.assert_allclose(ranks.density, [[0, 0, 0.5, 0.5]], atol=1e-12)
    np.testing.assert_allclose(ranks.tail_share, [0.5])


def test_tokens_of_equal_entropy_share_their_ranks():
    """Kept or not, the order of equal tokens in the file says nothing."""
    entropy = [1.0] * 2 + [0.0] * 8
    for places in ([2, 3], [8, 9], [2, 9]):
        ranks = entropy_ranks(table(entropy, kept=places), tail=0.2, bins=5)
        np.testing.assert_allclose(ranks.density, [[0, 0.25, 0.25, 0.25, 0.25]], atol=1e-12)
        np.testing.assert_allclose(ranks.tail_share, [0.25])


def test_a_blind_choice_meets_its_reference():
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 200, size=300)
    # Responses differ in entropy, and short ones get relatively more: the reference knows.
    entropy = np.concatenate([rng.random(n) * rng.random() for n in lengths])
    starts = np.cumsum(lengths) - lengths
    places = np.concatenate([s + rng.choice(n, size=max(15, n // 5), replace=False) for s, n in zip(starts, lengths)])
    ranks = entropy_ranks(table(entropy, lengths, blind=places), tail=0.016)
    low, high = ranks.tail_interval[0]
    assert low < ranks.reference[0] < high
    # The blind share itself is off the plain 1.6 % when budgets and entropies go together; here they do not much.
    assert ranks.reference[0] == pytest.approx(0.016, abs=0.004)


def test_only_trainable_tokens_count():
    trainable = np.array([True, False, True, False])
    ranks = entropy_ranks(table([0.9, 0.8, 0.2, 0.1], trainable=trainable, a=[2]), tail=0.5, bins=2)
    np.testing.assert_allclose(ranks.density, [[0, 1]])
    np.testing.assert_allclose(ranks.tail_share, [1.0])


def test_runs_side_by_side_and_a_method_that_keeps_nothing(tmp_path):
    one = table([0.9, 0.1], crop=[0], none=[])
    ranks = entropy_ranks([one, table([0.9, 0.1], crop=[1])], tail=0.5, bins=2)
    assert ranks.methods == ["crop", "none", "crop (2)"]
    np.testing.assert_allclose(ranks.density, [[1, 0], [np.nan, np.nan], [0, 1]])
    assert ranks.to_dict()["methods"]["crop (2)"]["tail_share"] == 1.0
    save_entropy_chart(ranks, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 20_000


def test_what_cannot_be_ranked():
    with pytest.raises(ValueError, match="no token to rank"):
        entropy_ranks(table([], lengths=[0], a=[]))
