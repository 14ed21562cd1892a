"""Means with intervals: over seeds, over prompts, paired. numpy alone.

Axes: B bootstrap draws, P prompts, S seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95
# two-sided 95% quantiles of Student's t with 1, 2, ... 30 degrees of freedom
T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


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
    half = _t_quantile(len(value) - 1) * float(value.std(ddof=1)) / math.sqrt(len(value))
    return Interval(mean, mean - half, mean + half)


def welch(value_a_S: Sequence[float], value_b_S: Sequence[float]) -> Interval:
    """Difference of the means over seeds, b - a, with Welch's t interval; NaN bounds unless both
    sides have two seeds or more.

    >>> [round(x, 3) for x in welch([0.50, 0.52, 0.54], [0.60, 0.62, 0.64])]
    [0.1, 0.055, 0.145]
    """
    a, b = np.asarray(value_a_S, float), np.asarray(value_b_S, float)
    mean = float(b.mean() - a.mean())
    if len(a) < 2 or len(b) < 2:
        return Interval(mean, math.nan, math.nan)
    part_a, part_b = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    if part_a + part_b == 0:
        return Interval(mean, mean, mean)
    freedom = (part_a + part_b) ** 2 / (part_a**2 / (len(a) - 1) + part_b**2 / (len(b) - 1))
    half = _t_quantile(math.floor(freedom)) * math.sqrt(part_a + part_b)
    return Interval(mean, mean - half, mean + half)


def over_clusters(total_P: np.ndarray, count_P: np.ndarray, seed: int = 0) -> Interval:
    """Ratio of sums (a mean over tokens) with a bootstrap interval over prompts: tokens of one
    prompt are not independent.

    Args:
        total_P: [P] sum of the value over each prompt's tokens; [P, S] by update, then the
            mean over updates of each update's ratio.
        count_P: the same shape, the number of tokens.

    >>> over_clusters(np.array([2.0, 4.0]), np.array([2, 4]))
    Interval(mean=1.0, low=1.0, high=1.0)
    """
    if not np.sum(count_P):
        return NONE
    total_PS, count_PS = (np.asarray(x, float).reshape(len(x), -1) for x in (total_P, count_P))
    mean = float(_mean_ratio(total_PS.sum(0)[None], count_PS.sum(0)[None])[0])
    if len(total_PS) < 2:
        return Interval(mean, math.nan, math.nan)
    draw_BP = _cluster_draws(len(total_PS), seed)
    return Interval(mean, *_bounds(_mean_ratio(draw_BP @ total_PS, draw_BP @ count_PS)))


def by_cluster(value: Any, cluster: Any, seed: int = 0) -> Interval:
    """Mean of ``value`` with a bootstrap interval over clusters; values that are not finite are
    left out.
    """
    value, cluster = np.asarray(value, float), np.asarray(cluster)
    keep = np.isfinite(value)
    names, index = np.unique(cluster[keep], return_inverse=True)
    total_P = np.bincount(index, value[keep], minlength=len(names))
    return over_clusters(total_P, np.bincount(index, minlength=len(names)), seed)


def correlation_by_cluster(x: Any, y: Any, cluster: Any, seed: int = 0) -> Interval:
    """Pearson's correlation with a bootstrap interval over clusters; NaN where one side does not
    vary.

    >>> correlation_by_cluster([1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0], [0, 0, 1, 1]).mean
    1.0
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    names, index = np.unique(np.asarray(cluster), return_inverse=True)
    if len(x) == 0:
        return NONE
    # shift and unit do not change a correlation, and keep the sums below exact
    x, y = ((v - v.mean()) / (np.abs(v - v.mean()).max() or 1.0) for v in (x, y))
    moment_P6 = np.stack(
        [np.bincount(index, v, len(names)) for v in (np.ones_like(x), x, y, x * x, y * y, x * y)], 1
    )
    mean = float(_correlation(moment_P6.sum(0)[None])[0])
    if len(names) < 2 or not math.isfinite(mean):
        return Interval(mean, math.nan, math.nan)
    return Interval(mean, *_bounds(_correlation(_cluster_draws(len(names), seed) @ moment_P6)))


class Paired(NamedTuple):
    """b - a with its interval, and how it was paired."""

    difference: Interval
    is_paired: bool
    num_prompts: int
    num_seeds: tuple[int, int]

    @property
    def is_noise(self) -> bool:
        """The interval holds 0."""
        return not (self.difference.low > 0 or self.difference.high < 0)


def paired_bootstrap(
    value_a_SP: Sequence[np.ndarray], value_b_SP: Sequence[np.ndarray], seed: int = 0
) -> Paired:
    """Mean of b - a on the same prompts; prompts are drawn together for both, seeds of each on
    their own.

    Args:
        value_a_SP, value_b_SP: one array of per-prompt values a seed. Arrays of different lengths
            are not the same prompts: then prompts
            of the two sides are drawn apart and ``is_paired`` is False.

    >>> a, b = [np.array([0.0, 1.0, 0.0, 1.0])], [np.array([1.0, 1.0, 0.0, 1.0])]
    >>> paired_bootstrap(a, b).difference.mean
    0.25
    """
    lengths = {len(row) for row in (*value_a_SP, *value_b_SP)}
    rng = np.random.default_rng(seed)
    is_paired = len(lengths) == 1
    prompts = _draws(min(lengths), rng) if is_paired else None
    a_B, b_B = (_resampled_means(side, prompts, rng) for side in (value_a_SP, value_b_SP))
    mean = float(
        np.mean([row.mean() for row in value_b_SP]) - np.mean([row.mean() for row in value_a_SP])
    )
    return Paired(
        Interval(mean, *_bounds(b_B - a_B)),
        is_paired,
        min(lengths),
        (len(value_a_SP), len(value_b_SP)),
    )


def first_at_least(x: Sequence[float], y: Sequence[float], threshold: float) -> float | None:
    """The first x whose y reaches the threshold; None if none does.

    >>> first_at_least([0, 10, 20], [0.3, 0.5, 0.7], 0.5)
    10
    """
    return next((at for at, value in zip(x, y) if value is not None and value >= threshold), None)


def _resampled_means(
    value_SP: Sequence[np.ndarray], prompt_BP: np.ndarray | None, rng: np.random.Generator
) -> np.ndarray:
    by_seed_SB = np.stack(
        [
            row[prompt_BP if prompt_BP is not None else _draws(len(row), rng)].mean(1)
            for row in (np.asarray(v, float) for v in value_SP)
        ]
    )
    seed_BS = rng.integers(0, len(value_SP), (RESAMPLES, len(value_SP)))
    return by_seed_SB.T[np.arange(RESAMPLES)[:, None], seed_BS].mean(1)


def _mean_ratio(total_BS: np.ndarray, count_BS: np.ndarray) -> np.ndarray:
    """Mean over S of total / count where there is a count; draws without any are NaN."""
    ratio_BS = np.where(count_BS > 0, total_BS / np.where(count_BS > 0, count_BS, 1), 0)
    steps_B = (count_BS > 0).sum(1)
    return np.where(steps_B > 0, ratio_BS.sum(1) / np.maximum(steps_B, 1), math.nan)


def _correlation(moment_B6: np.ndarray) -> np.ndarray:
    count, x, y, xx, yy, xy = moment_B6.T
    spread = (count * xx - x * x) * (count * yy - y * y)
    return np.where(
        spread > 0, (count * xy - x * y) / np.sqrt(np.where(spread > 0, spread, 1)), math.nan
    )


def _cluster_draws(size: int, seed: int) -> np.ndarray:
    """How often each cluster is drawn, [B, size]."""
    return np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), RESAMPLES)


def _t_quantile(freedom: int) -> float:
    return T_95[max(freedom, 1) - 1] if freedom <= len(T_95) else 1.96


def _draws(size: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, size, (RESAMPLES, size))


def _bounds(means_B: np.ndarray) -> tuple[float, float]:
    known_B = means_B[np.isfinite(means_B)]
    if not len(known_B):
        return math.nan, math.nan
    low, high = np.quantile(known_B, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
