"""Mean@k, Pass@k, intervals and the paired test against slow or exact references."""

from itertools import combinations, product

import numpy as np
import pytest

from crop_trl.evaluation.metrics import average_interval, bootstrap_interval, compare, mean_at_k, pass_at_k


def random_verdicts(problems: int, samples: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.random((problems, samples)) < rng.random((problems, 1))


def test_mean_and_pass_of_the_paper():
    correct = np.array([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert mean_at_k(correct).tolist() == [0.25, 0.0, 1.0]
    assert pass_at_k(correct).tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
def test_unbiased_pass_is_the_mean_over_all_subsets(k):
    correct = random_verdicts(7, 6)
    reference = [np.mean([any(row[list(subset)]) for subset in combinations(range(6), k)]) for row in correct]
    np.testing.assert_allclose(pass_at_k(correct, k), reference)


def test_pass_at_one_is_the_mean():
    correct = random_verdicts(20, 8)
    np.testing.assert_allclose(pass_at_k(correct, 1), mean_at_k(correct))


@pytest.mark.parametrize("k", [0, 5])
def test_pass_k_has_limits(k):
    with pytest.raises(ValueError, match=f"`pass_k` is {k}: choose a number from 1 to the 4 samples"):
        pass_at_k(np.ones((2, 4)), k)


def test_bootstrap_agrees_with_the_normal_interval_and_repeats():
    values = mean_at_k(random_verdicts(400, 8))
    low, high = bootstrap_interval(values)
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert low == pytest.approx(values.mean() - half, abs=0.004)
    assert high == pytest.approx(values.mean() + half, abs=0.004)
    assert bootstrap_interval(values) == (low, high)


def test_bootstrap_of_one_problem_and_of_equal_values():
    assert bootstrap_interval(np.array([0.5])) == (0.5, 0.5)
    assert bootstrap_interval(np.ones(30)) == (1.0, 1.0)


def test_interval_of_the_average_covers_as_promised():
    """Simulated benchmarks with a known mean: 95 % of the intervals hold it, give or take chance."""
    rng = np.random.default_rng(5)
    covered = 0
    for trial in range(300):
        benchmarks = [(rng.random(n) < p).astype(float) for n, p in ((30, 0.2), (40, 0.5), (200, 0.7))]
        low, high = average_interval(benchmarks, resamples=500, seed=trial)
        covered += low <= (0.2 + 0.5 + 0.7) / 3 <= high
    assert 0.88 < covered / 300 < 0.99


def named(values) -> dict[str, float]:
    return {str(index): float(value) for index, value in enumerate(values)}


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
    other = {"x": named([0, 0]), "y": {**named([0] * 50), "extra": 1.0}}
    found = compare(run, other)
    assert found.difference == pytest.approx(0.5) and found.problems == 52


def test_equal_runs_do_not_differ():
    found = compare({"x": named([0, 1, 1])}, {"x": named([0, 1, 1])})
    assert (found.difference, found.p_value) == (0.0, 1.0)


def test_false_alarms_are_as_rare_as_promised():
    rng = np.random.default_rng(3)
    alarms = 0
    for trial in range(200):
        p = rng.random(60)
        a, b = (mean_at_k(rng.random((60, 4)) < p[:, None]) for _ in range(2))
        alarms += compare({"x": named(a)}, {"x": named(b)}, resamples=400, seed=trial).p_value < 0.05
    assert alarms / 200 < 0.1


def test_runs_without_shared_problems_are_refused():
    with pytest.raises(ValueError, match="share no problem of 'x'"):
        compare({"x": {"a": 1.0}}, {"x": {"b": 1.0}})
