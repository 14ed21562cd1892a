"""Means with intervals: over few seeds by Student's t, over many prompts by a bootstrap.

Axes: B bootstrap draws, P prompts (or other clusters), S seeds, K quantities.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 2000
CONFIDENCE = 0.95
POWER = 0.8
MAX_SEEDS = 100_000


class Interval(NamedTuple):
    """A mean and its 95% interval; without enough data the bounds are NaN."""

    mean: float
    low: float
    high: float


NONE = Interval(math.nan, math.nan, math.nan)


def over_seeds(value_S: Sequence[float]) -> Interval:
    """Mean over seeds with Student's t interval; one seed has no interval.

    >>> [round(x, 3) for x in over_seeds([0.5, 0.6, 0.7])]
    [0.6, 0.352, 0.848]
    """
    value = np.asarray([v for v in value_S if v is not None and math.isfinite(v)], float)
    if len(value) == 0:
        return NONE
    mean = float(value.mean())
    if len(value) == 1:
        return Interval(mean, math.nan, math.nan)
    half = _t_quantile(len(value) - 1, CONFIDENCE) * float(value.std(ddof=1) / len(value) ** 0.5)
    return Interval(mean, mean - half, mean + half)


def median(value_S: Sequence[float]) -> Interval:
    """Median with the interval of order statistics that holds it with a chance of 95% or more,
    whatever the distribution; below six values there is none. For what a few large values rule.

    >>> [float(x) for x in median([1, 2, 3, 4, 5, 900])]
    [3.5, 1.0, 900.0]
    """
    from scipy.stats import binom

    value = np.sort(np.asarray([v for v in value_S if math.isfinite(v)], float))
    if len(value) == 0:
        return NONE
    middle = float(np.median(value))
    rank = int(binom.ppf((1 - CONFIDENCE) / 2, len(value), 0.5))
    if rank < 1 or 2 * binom.cdf(rank - 1, len(value), 0.5) > 1 - CONFIDENCE:
        return Interval(middle, math.nan, math.nan)
    return Interval(middle, float(value[rank - 1]), float(value[-rank]))


def welch(value_a_S: ArrayLike, value_b_S: ArrayLike, comparisons: int = 1) -> Interval:
    """Difference of the means over seeds, b - a, with Welch's t interval: each side has its own
    variance.

    Args:
        comparisons: of a table with so many differences the intervals hold all together, with a
            chance of 95% (Bonferroni: each at 1 - 0.05 / comparisons).

    Bounds are NaN unless both sides have two seeds or more, the mean if one has none.

    >>> [round(x, 3) for x in welch([0.50, 0.52, 0.54], [0.60, 0.62, 0.64])]
    [0.1, 0.055, 0.145]
    """
    test = _welch(value_a_S, value_b_S)
    confidence = 1 - (1 - CONFIDENCE) / comparisons
    half = _t_quantile(test.freedom, confidence) * test.error if test.error else 0.0
    return Interval(test.mean, test.mean - half, test.mean + half)


def welch_p(value_a_S: ArrayLike, value_b_S: ArrayLike) -> float:
    """Two-sided p-value of Welch's t test that both sides have one mean; NaN unless both have two
    seeds or more.

    >>> round(welch_p([0.50, 0.52, 0.54], [0.60, 0.62, 0.64]), 4)
    0.0036
    """
    test = _welch(value_a_S, value_b_S)
    return 2 * _t_above(abs(test.mean), test)


def equivalence_p(value_a_S: ArrayLike, value_b_S: ArrayLike, margin: float) -> float:
    """p-value of two one-sided Welch tests that the means are a margin or more apart: below 5% the
    90% interval lies inside the margin, and the sides are equal within it.

    >>> round(equivalence_p([0.50, 0.52, 0.54], [0.51, 0.52, 0.53], margin=0.05), 3)
    0.016
    """
    test = _welch(value_a_S, value_b_S)
    return _t_above(margin - abs(test.mean), test)


def holm(p_K: Sequence[float]) -> list[float]:
    """p-values of a family, adjusted by Holm: those below 5% hold all together, with a chance of
    95%.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    out, least = [0.0] * len(p_K), 0.0
    for rank, at in enumerate(sorted(range(len(p_K)), key=lambda k: p_K[k])):
        least = max(least, min(1.0, (len(p_K) - rank) * p_K[at]))
        out[at] = least
    return out


def detectable(value_a_S: ArrayLike, value_b_S: ArrayLike, comparisons: int = 1) -> float:
    """The true difference of means that Welch's test at 5% finds in 80% of such comparisons;
    ``comparisons`` as in ``welch``. NaN unless both sides have two seeds or more.

    >>> round(detectable([0.50, 0.52, 0.54], [0.60, 0.62, 0.64]), 4)
    0.0614
    """
    test = _welch(value_a_S, value_b_S)
    return _shift(test.freedom, comparisons) * test.error if test.error else 0.0


def seeds_for(
    effect: float, variance_a: float, variance_b: float, comparisons: int = 1
) -> int | None:
    """Seeds per side with which a difference of ``effect`` would be detectable; None if they are
    more than ``MAX_SEEDS``.

    >>> seeds_for(0.01, 0.015**2, 0.015**2), seeds_for(0.02, 0.015**2, 0.015**2)
    (37, 10)
    """
    total, squares = variance_a + variance_b, variance_a**2 + variance_b**2
    per_seed = total**2 / squares if squares else 1.0

    def is_enough(num: int) -> bool:
        return _shift((num - 1) * per_seed, comparisons) * math.sqrt(total / num) <= effect

    num = bisect.bisect_left(range(MAX_SEEDS + 1), True, lo=2, key=is_enough)
    return num if num <= MAX_SEEDS else None


def around(mean: float, error: float, freedom: float, comparisons: int = 1) -> Interval:
    """Student's t interval around an estimate with a standard error; ``comparisons`` as in
    ``welch``. Bounds are NaN where the error is not known.

    >>> [round(x, 3) for x in around(0.6, 0.0577, freedom=2)]
    [0.6, 0.352, 0.848]
    """
    half = _t_quantile(freedom, 1 - (1 - CONFIDENCE) / comparisons) * error
    return Interval(mean, mean - half, mean + half)


def over_prompts(value_P: np.ndarray, seed: int = 0) -> Interval:
    """Mean of one value per prompt with a bootstrap interval over prompts.

    >>> over_prompts(np.array([1.0, 1.0]))
    Interval(mean=1.0, low=1.0, high=1.0)
    """
    mean = float(np.mean(value_P))
    if np.ptp(value_P) == 0:
        return Interval(mean, mean, mean)
    draw_BP = _draws(len(value_P), np.random.default_rng(seed))
    return Interval(mean, *_bounds(value_P[draw_BP].mean(1)))


def over_clusters(total_P: np.ndarray, count_P: np.ndarray, seed: int = 0) -> Interval:
    """Ratio of sums (a mean over tokens) with a bootstrap interval over prompts: tokens of one
    prompt are not independent.

    Args:
        total_P: [P] sum of the value over each prompt's tokens; [P, K] by update, then the
            mean over updates of each update's ratio.
        count_P: the same shape, the number of tokens.

    >>> over_clusters(np.array([2.0, 4.0]), np.array([2, 4]))
    Interval(mean=1.0, low=1.0, high=1.0)
    """
    if not np.sum(count_P):
        return NONE
    total_PK, count_PK = (np.asarray(x, float).reshape(len(x), -1) for x in (total_P, count_P))
    return interval_of(_mean_ratio(resample(total_PK, seed), resample(count_PK, seed)))


def by_cluster(value: ArrayLike, cluster: ArrayLike, seed: int = 0) -> Interval:
    """Mean of ``value`` with a bootstrap interval over clusters; values that are not finite are
    left out.
    """
    flat = np.asarray(value, float)
    keep = np.isfinite(flat)
    sum_P2 = sums_by_cluster((flat[keep], np.ones(keep.sum())), np.asarray(cluster)[keep])
    return over_clusters(sum_P2[:, 0], sum_P2[:, 1], seed)


def correlation_by_cluster(
    x: ArrayLike, y: ArrayLike, cluster: ArrayLike, seed: int = 0
) -> Interval:
    """Pearson's correlation with a bootstrap interval over clusters; NaN where one side does not
    vary.

    >>> correlation_by_cluster([1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0], [0, 0, 1, 1]).mean
    1.0
    """
    if np.size(x) == 0:
        return NONE
    a, b = _unit(np.asarray(x, float)), _unit(np.asarray(y, float))
    moment_P6 = sums_by_cluster((np.ones_like(a), a, b, a * a, b * b, a * b), cluster)
    return interval_of(_correlation(resample(moment_P6, seed)))


def ratios_by_cluster(
    values: Sequence[ArrayLike],
    weights: Sequence[ArrayLike],
    cluster: ArrayLike,
    seed: int = 0,
    least: int = 2,
) -> np.ndarray:
    """Ratios sum(value) / sum(weight) of K quantities, clusters drawn jointly: rows as in
    ``resample``.

    A quantity that lives in fewer than ``least`` clusters has draws of NaN: there are too few to
    say anything about other clusters.

    >>> ratios_by_cluster([[1.0, 1.0]], [[1.0, 1.0]], [0, 1])[0].tolist()
    [1.0]
    """
    total_PK, weight_PK = (sums_by_cluster(columns, cluster) for columns in (values, weights))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio_BK = resample(total_PK, seed) / resample(weight_PK, seed)
    ratio_BK[1:, (weight_PK != 0).sum(0) < least] = np.nan
    return ratio_BK


def sums_by_cluster(columns: Sequence[ArrayLike], cluster: ArrayLike) -> np.ndarray:
    """Sums of K columns over each cluster, [P, K].

    >>> sums_by_cluster([[1.0, 2.0, 4.0]], [7, 7, 9]).tolist()
    [[3.0], [4.0]]
    """
    names, index = np.unique(np.asarray(cluster), return_inverse=True)
    return np.stack([np.bincount(index, np.asarray(c, float), len(names)) for c in columns], 1)


def resample(sum_PK: np.ndarray, seed: int = 0) -> np.ndarray:
    """Sums over clusters, [1 + B, K]: as they are first, then of B draws of P clusters.

    One cluster says nothing about others: its draws are NaN.
    """
    num = len(sum_PK)
    if num < 2:
        return np.concatenate([sum_PK.sum(0)[None], np.full((RESAMPLES, sum_PK.shape[1]), np.nan)])
    draw_BP = np.random.default_rng(seed).multinomial(num, np.full(num, 1 / num), RESAMPLES)
    return np.concatenate([sum_PK.sum(0)[None], draw_BP @ sum_PK])


def interval_of(value_B: np.ndarray) -> Interval:
    """The estimate, which comes first, with the percentile interval of the draws behind it.

    Draws in which the quantity is not defined are left out.

    >>> interval_of(np.array([0.5, 0.5, 0.5]))
    Interval(mean=0.5, low=0.5, high=0.5)
    """
    return Interval(float(value_B[0]), *_bounds(value_B[1:]))


class Paired(NamedTuple):
    """b - a with its interval over prompts, and whether the prompts are the same."""

    difference: Interval
    is_paired: bool


def paired_bootstrap(value_a_P: np.ndarray, value_b_P: np.ndarray, seed: int = 0) -> Paired:
    """Mean of b - a over prompts: what two given policies differ by, not two methods.

    Args:
        value_a_P, value_b_P: one value per prompt. Arrays of different lengths are not the same
            prompts: then the prompts of the two sides are drawn apart and ``is_paired`` is False.

    >>> a, b = np.array([0.0, 1.0, 0.0, 1.0]), np.array([1.0, 1.0, 0.0, 1.0])
    >>> paired_bootstrap(a, b).difference.mean
    0.25
    """
    a, b = np.asarray(value_a_P, float), np.asarray(value_b_P, float)
    if len(a) == len(b):
        return Paired(over_prompts(b - a, seed), True)
    rng = np.random.default_rng(seed)
    a_B, b_B = (side[_draws(len(side), rng)].mean(1) for side in (a, b))
    return Paired(Interval(float(b.mean() - a.mean()), *_bounds(b_B - a_B)), False)


def first_at_least(x: Sequence[float], y: Sequence[float], threshold: float) -> float | None:
    """The first x whose y reaches the threshold; None if none does.

    >>> first_at_least([0, 10, 20], [0.3, 0.5, 0.7], 0.5)
    10
    """
    return next((at for at, value in zip(x, y) if value is not None and value >= threshold), None)


def _mean_ratio(total_BK: np.ndarray, count_BK: np.ndarray) -> np.ndarray:
    """Mean over K of total / count where there is a count; draws without any are NaN."""
    ratio_BK = np.where(count_BK > 0, total_BK / np.where(count_BK > 0, count_BK, 1), 0)
    known_B = (count_BK > 0).sum(1)
    return np.where(known_B > 0, ratio_BK.sum(1) / np.maximum(known_B, 1), math.nan)


def _unit(value: np.ndarray) -> np.ndarray:
    """Shift and unit do not change a correlation, and keep its sums exact."""
    return (value - value.mean()) / (np.abs(value - value.mean()).max() or 1.0)


def _correlation(moment_B6: np.ndarray) -> np.ndarray:
    count, x, y, xx, yy, xy = moment_B6.T
    spread = (count * xx - x * x) * (count * yy - y * y)
    return np.where(
        spread > 0, (count * xy - x * y) / np.sqrt(np.where(spread > 0, spread, 1)), math.nan
    )


class _Welch(NamedTuple):
    """b - a, its standard error, and the degrees of freedom; an error of NaN is not known."""

    mean: float
    error: float
    freedom: float


def _welch(value_a_S: ArrayLike, value_b_S: ArrayLike) -> _Welch:
    a, b = np.asarray(value_a_S, float), np.asarray(value_b_S, float)
    mean = float(b.mean() - a.mean()) if len(a) and len(b) else math.nan
    if len(a) < 2 or len(b) < 2:
        return _Welch(mean, math.nan, math.nan)
    part_a, part_b = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    if part_a + part_b == 0:
        return _Welch(mean, 0.0, math.inf)
    freedom = (part_a + part_b) ** 2 / (part_a**2 / (len(a) - 1) + part_b**2 / (len(b) - 1))
    return _Welch(mean, math.sqrt(part_a + part_b), float(freedom))


def _t_above(value: float, test: _Welch) -> float:
    """The chance that Student's t is above value / error; without an error 0, 1/2 or 1."""
    from scipy.special import stdtr

    if test.error == 0:
        return 0.5 - 0.5 * float(np.sign(value))
    return float(stdtr(test.freedom, -value / test.error))


def _shift(freedom: float, comparisons: int) -> float:
    """How many standard errors off 0 the truth is where the test finds it with a chance of
    ``POWER`` (noncentral t; the other tail is left out).
    """
    from scipy.special import nctdtrinc

    limit = _t_quantile(freedom, 1 - (1 - CONFIDENCE) / comparisons)
    return float(nctdtrinc(freedom, 1 - POWER, limit))


def _t_quantile(freedom: float, confidence: float) -> float:
    from scipy.special import stdtrit  # loaded only where seeds are compared

    return float(stdtrit(freedom, (1 + confidence) / 2))


def _draws(size: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, size, (RESAMPLES, size))


def _bounds(means_B: np.ndarray) -> tuple[float, float]:
    known_B = means_B[np.isfinite(means_B)]
    if not len(known_B):
        return math.nan, math.nan
    low, high = np.quantile(known_B, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
