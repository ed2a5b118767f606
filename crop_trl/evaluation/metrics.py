"""Mean@k and Pass@k, how sure they are, and whether two runs differ.

All take `correct`, an array of verdicts of shape [problems, samples]. Problems are what is drawn from a population, so
intervals and tests resample problems, never single responses.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000


def mean_at_k(correct: np.ndarray) -> np.ndarray:
    """Share of right samples, per problem: `[problems]`. Mean@k is its mean."""
    return np.asarray(correct, dtype=np.float64).mean(axis=1)


def pass_at_k(correct: np.ndarray, k: int | None = None) -> np.ndarray:
    """
    Pass@k per problem: `[problems]`.

    Args:
        correct (`numpy.ndarray` of shape `[problems, n]`): Verdicts.
        k (`int`, *optional*): By default n, which is the paper's: right if any sample is. For k < n the unbiased
            estimator 1 - C(n - c, k) / C(n, k), c right ones among n.

    Returns:
        `numpy.ndarray`

    Raises:
        `ValueError`: k outside 1..n.
    """
    correct = np.asarray(correct, dtype=bool)
    n = correct.shape[1]
    k = n if k is None else k
    if not 1 <= k <= n:
        raise ValueError(f"`pass_k` is {k}: choose a number from 1 to the {n} samples per problem.")
    wrong = n - correct.sum(axis=1)
    # C(wrong, k) / C(n, k) as a product, exact enough for any n.
    missed = np.ones(len(correct))
    for i in range(k):
        missed *= np.maximum(wrong - i, 0) / (n - i)
    return 1.0 - missed


def _resampled_means(values: np.ndarray, resamples: int, rng: np.random.Generator) -> np.ndarray:
    # Counts of each problem in a resample are multinomial: the same as drawing indices, in less memory.
    n = len(values)
    counts = rng.multinomial(n, np.full(n, 1 / n), size=resamples)
    return counts @ values / n


def bootstrap_interval(
    values: np.ndarray, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """
    Percentile bootstrap interval of a mean over problems.

    Args:
        values (`numpy.ndarray` of shape `[problems]`): One number per problem.
        level (`float`, *optional*, defaults to `0.95`): Coverage.
        resamples (`int`, *optional*): Number of resamples.
        seed (`int`, *optional*, defaults to `0`): Of the resampling.

    Returns:
        `tuple[float, float]`
    """
    return average_interval([values], level, resamples, seed)


def average_interval(
    benchmarks: list[np.ndarray], level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """
    The interval of the mean of several benchmarks' means (Avg.); problems are resampled within each.

    Args:
        benchmarks (list of `numpy.ndarray` of shape `[problems]`): Each problem's share of right answers.
        level (`float`): Of the interval.
        resamples (`int`): Bootstrap draws.
        seed (`int`): Of these draws.
    """
    rng = np.random.default_rng(seed)
    means = np.mean([_resampled_means(np.asarray(v, np.float64), resamples, rng) for v in benchmarks], axis=0)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class Comparison:
    """
    One run minus another on the same problems.

    Args:
        difference (`float`): Of the means, or of the Avg. over several benchmarks.
        low, high (`float`): Bootstrap 95 % interval.
        p_value (`float`): Two-sided paired permutation test.
        problems (`int`): Shared problems.
    """

    difference: float
    low: float
    high: float
    p_value: float
    problems: int


def compare(
    run: Mapping[str, Mapping[str, float]],
    reference: Mapping[str, Mapping[str, float]],
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """
    Paired comparison of two runs.

    The test swaps the two runs' results on each problem at random: under the null hypothesis that neither is better,
    the sign of each problem's difference is a coin toss.

    Args:
        run (mapping): Benchmark to problem id to a number per problem (a row of [`mean_at_k`]).
        reference (mapping): The same for the run that is subtracted.
        resamples (`int`, *optional*): Of interval and test.
        seed (`int`, *optional*, defaults to `0`): Of both.

    Returns:
        [`Comparison`]

    Raises:
        `ValueError`: a benchmark in which the two share no problem.
    """
    differences = []
    for name, values in run.items():
        ids = [id for id in values if id in reference.get(name, {})]
        if not ids:
            raise ValueError(f"The two runs share no problem of {name!r}: evaluate both on the same benchmark.")
        differences.append(np.array([values[id] - reference[name][id] for id in ids]))
    observed = float(np.mean([d.mean() for d in differences]))
    low, high = average_interval(differences, resamples=resamples, seed=seed)
    rng = np.random.default_rng(seed + 1)
    flipped = np.mean(
        [(rng.integers(0, 2, size=(resamples, len(d)), dtype=np.int8) * 2 - 1) @ d / len(d) for d in differences],
        axis=0,
    )
    extreme = int((np.abs(flipped) >= abs(observed) - 1e-12).sum())
    return Comparison(observed, low, high, (extreme + 1) / (resamples + 1), sum(len(d) for d in differences))
