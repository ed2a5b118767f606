"""Mean@k and Pass@k, how sure they are, and whether two runs differ.

Problems are what is drawn from a population, so intervals and tests are about problems, never about single responses.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv, comb, stdtrit

RESAMPLES = 10_000
Interval = tuple[float, float]


def mean_at_k(correct: np.ndarray) -> np.ndarray:
    """Share of right samples, per problem: `[problems]`. Mean@k is its mean."""
    return np.asarray(correct, dtype=np.float64).mean(axis=1)


def pass_at_k(correct: np.ndarray, k: int | None = None) -> np.ndarray:
    """Pass@k per problem: `[problems]`. By default k is the number of samples n, which is the paper's: right if any
    sample is. For k < n it is the unbiased estimator 1 - C(n - c, k) / C(n, k), c right ones among n."""
    correct = np.asarray(correct, dtype=bool)
    n = correct.shape[1]
    k = n if k is None else k
    return 1.0 - comb(n - correct.sum(axis=1), k) / comb(n, k)


def share_interval(correct: np.ndarray) -> Interval:
    """95 % interval of a share of right answers `[problems, samples]` or `[problems]`, also for few: 0 of 5 is 0 to
    0.52. It is Clopper and Pearson's for as many independent answers as these are worth (Korn and Graubard):
    samples of one problem resemble each other."""
    values = np.asarray(correct, dtype=np.float64)
    answers, n = values.size, len(values)
    values = values.reshape(n, -1).mean(axis=1)
    share, tail = float(values.mean()), 0.025
    if n == 1 or share in (0.0, 1.0):
        worth = float(n)
    else:
        variance = float(values.var(ddof=1)) / n
        few = (stdtrit(answers - 1, tail) / stdtrit(n - 1, tail)) ** 2  # the variance itself is only estimated
        worth = min(answers, few * share * (1 - share) / variance) if variance else answers
    right, wrong = worth * share, worth * (1 - share)
    low = betaincinv(right, wrong + 1, tail) if right else 0.0
    high = betaincinv(right + 1, wrong, 1 - tail) if wrong else 1.0
    return float(low), float(high)


def average_interval(means: Sequence[float], intervals: Sequence[Interval]) -> Interval:
    """The interval of the mean of several independent values with intervals of their own (Zou and Donner's MOVER)."""
    average, count = sum(means) / len(means), len(means)
    below = math.hypot(*(mean - low for mean, (low, _) in zip(means, intervals))) / count
    above = math.hypot(*(high - mean for mean, (_, high) in zip(means, intervals))) / count
    return average - below, average + above


def runs_interval(values: Sequence[float], within: Interval = (-math.inf, math.inf)) -> Interval | None:
    """Student's 95 % interval of a mean over training runs, within what it can be; `None` for a single run."""
    n = len(values)
    if n < 2:
        return None
    half = float(stdtrit(n - 1, 0.975)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    mean = float(np.mean(values))
    return max(mean - half, within[0]), min(mean + half, within[1])


@dataclass(frozen=True)
class Comparison:
    """One run minus another on the same `problems`, with a 95 % interval and a paired permutation test."""

    difference: float
    low: float
    high: float
    p_value: float
    problems: int


Verdicts = Mapping[str, Mapping[str, Sequence[float]]]


def compare(run: Verdicts, reference: Verdicts, resamples: int = RESAMPLES, seed: int = 0) -> Comparison:
    """Paired comparison of two runs, each a mapping of benchmark to problem id to the problem's verdicts.

    The test swaps the two runs' results on each problem at random: under the null hypothesis that neither is better,
    the sign of each problem's difference is a coin toss. Raises `ValueError` for a benchmark without a shared
    problem."""
    differences, intervals = [], []
    for name, values in run.items():
        ids = [id for id in values if id in reference.get(name, {})]
        if not ids:
            raise ValueError(f"The two runs share no problem of {name!r}: evaluate both on the same benchmark.")
        ours, theirs = (np.array([verdicts[id] for id in ids], float) for verdicts in (values, reference[name]))
        differences.append(mean_at_k(ours) - mean_at_k(theirs))
        intervals.append(_difference_interval(ours, theirs))
    means = [float(d.mean()) for d in differences]
    observed = float(np.mean(means))
    low, high = average_interval(means, intervals)
    rng = np.random.default_rng(seed)
    flipped = np.mean(
        [(rng.integers(0, 2, size=(resamples, len(d)), dtype=np.int8) * 2 - 1) @ d / len(d) for d in differences],
        axis=0,
    )
    extreme = int((np.abs(flipped) >= abs(observed) - 1e-12).sum())
    return Comparison(observed, low, high, (extreme + 1) / (resamples + 1), sum(len(d) for d in differences))


def _difference_interval(ours: np.ndarray, theirs: np.ndarray) -> Interval:
    """Of two shares on the same problems, from the interval of each and how much the problems' results go together."""
    first, second = mean_at_k(ours), mean_at_k(theirs)
    together = float(np.corrcoef(first, second)[0, 1]) if first.std() and second.std() else 0.0
    (low1, high1), (low2, high2) = share_interval(ours), share_interval(theirs)
    mean1, mean2 = float(first.mean()), float(second.mean())

    def half(a: float, b: float) -> float:
        return math.sqrt(max(a * a + b * b - 2 * together * a * b, 0.0))

    difference = mean1 - mean2
    return difference - half(mean1 - low1, high2 - mean2), difference + half(high1 - mean1, mean2 - low2)
