"""Mean@k, Pass@k, intervals and the paired test against slow or exact references."""

from itertools import combinations, product

import numpy as np
import pytest
from scipy.stats import binomtest

from crop_trl.evaluation.metrics import average_interval, compare, mean_at_k, pass_at_k, share_interval


def random_verdicts(problems: int, samples: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.random((problems, samples)) < rng.random((problems, 1))


def test_mean_and_pass_of_the_paper():
    correct = np.array([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert mean_at_k(correct).tolist() == [0.25, 0.0, 1.0]
    assert pass_at_k(correct).tolist() == [1.0, 0.0, 1.0]


def test_unbiased_pass_is_the_mean_over_all_subsets():
    correct = random_verdicts(7, 6)
    for k in (1, 2, 3, 5, 6):
        reference = [np.mean([any(row[list(subset)]) for subset in combinations(range(6), k)]) for row in correct]
        np.testing.assert_allclose(pass_at_k(correct, k), reference)


def test_pass_at_one_is_the_mean():
    correct = random_verdicts(20, 8)
    np.testing.assert_allclose(pass_at_k(correct, 1), mean_at_k(correct))


def test_interval_agrees_with_scipy_and_with_the_normal_one():
    for right, n in ((0, 5), (1, 30), (12, 40), (29, 30), (30, 30)):
        values = np.arange(n) < right
        exact = binomtest(right, n).proportion_ci(method="exact")
        np.testing.assert_allclose(share_interval(values), (exact.low, exact.high), atol=0.02)
    assert share_interval(np.zeros((5, 8))) == pytest.approx(binomtest(0, 5).proportion_ci(method="exact"))
    assert share_interval(np.zeros((1, 8)))[1] > 0.9
    correct = random_verdicts(4000, 8)
    values = mean_at_k(correct)
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert share_interval(correct) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.001)


def test_intervals_cover_as_promised():
    """Simulated benchmarks with a known mean: 95 % of the intervals hold it, and 90 % where few problems have any right
    answer (a percentile bootstrap: 85 %)."""
    rng = np.random.default_rng(5)
    shapes = ((8, 4, 0.2), (30, 8, 0.05), (40, 8, 0.5), (200, 4, 0.7))
    covered, averages = np.zeros(len(shapes)), 0
    for _ in range(300):
        intervals, means = [], []
        for problems, samples, mean in shapes:
            ability = rng.beta(mean, 1 - mean, size=(problems, 1))
            correct = rng.random((problems, samples)) < ability
            intervals.append(share_interval(correct))
            means.append(correct.mean())
        covered += [low <= mean <= high for (low, high), (_, _, mean) in zip(intervals, shapes)]
        low, high = average_interval(means, intervals)
        averages += low <= np.mean([mean for _, _, mean in shapes]) <= high
    assert (covered / 300 > (0.92, 0.87, 0.92, 0.92)).all() and averages / 300 > 0.92


def named(values) -> dict[str, list[float]]:
    return {str(index): [float(value)] for index, value in enumerate(values)}


def test_permutation_test_against_all_sign_flips():
    rng = np.random.default_rng(2)
    a, b = rng.random(10), rng.random(10)
    exact = np.mean(
        [abs(np.mean((a - b) * signs)) >= abs(np.mean(a - b)) - 1e-12 for signs in product((1, -1), repeat=10)]
    )
    found = compare({"x": named(a)}, {"x": named(b)})
    assert found.p_value == pytest.approx(exact, abs=0.02)
    assert found.difference == pytest.approx(np.mean(a - b))
    assert found.low < found.difference < found.high


def test_comparison_weighs_benchmarks_alike_and_uses_shared_problems():
    run = {"x": named([1, 1]), "y": named([0] * 50)}
    other = {"x": named([0, 0]), "y": {**named([0] * 50), "extra": [1.0]}}
    found = compare(run, other)
    assert found.difference == pytest.approx(0.5) and found.problems == 52


def test_equal_runs_do_not_differ():
    found = compare({"x": named([0, 1, 1])}, {"x": named([0, 1, 1])})
    assert (found.difference, found.p_value) == (0.0, 1.0)


def test_false_alarms_are_as_rare_as_promised():
    rng = np.random.default_rng(3)
    alarms = excluded = 0
    for trial in range(200):
        p = rng.random(60)
        a, b = (mean_at_k(rng.random((60, 4)) < p[:, None]) for _ in range(2))
        found = compare({"x": named(a)}, {"x": named(b)}, resamples=400, seed=trial)
        alarms += found.p_value < 0.05
        excluded += not found.low <= 0 <= found.high
    assert alarms / 200 < 0.1 and excluded / 200 < 0.1


def test_runs_without_shared_problems_are_refused():
    with pytest.raises(ValueError, match="share no problem of 'x'"):
        compare({"x": {"a": [1.0]}}, {"x": {"b": [1.0]}})
