"""Means of tokens with bootstrap intervals over prompts: tokens of one prompt are not independent.

Axes: B bootstrap draws, C clusters (prompts), K quantities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

DRAWS = 2000
LEVEL = (2.5, 97.5)
LEAST_CLUSTERS = 3

Interval = dict[str, "float | None"]  # mean, low, high; None where the quantity is not defined


def clustered(
    values: Sequence[np.ndarray], weights: Sequence[np.ndarray], cluster: np.ndarray, seed: int = 0
) -> np.ndarray:
    """Ratios sum(value) / sum(weight) of K quantities: [1 + B, K], the estimate first, then draws
    with the clusters drawn jointly.

    A quantity that lives in fewer than ``LEAST_CLUSTERS`` has draws of nan: there are too few to
    say anything about other clusters.

    >>> clustered([np.array([1.0, 1.0])], [np.array([1.0, 1.0])], np.array([0, 1]))[0].tolist()
    [1.0]
    """
    _, index = np.unique(np.asarray(cluster), return_inverse=True)
    num = index.max() + 1 if len(index) else 0
    total_CK, weight_CK = (
        np.stack(
            [np.bincount(index, np.asarray(column, float), minlength=num) for column in columns], 1
        )
        for columns in (values, weights)
    )
    count_BC = (
        np.random.default_rng(seed)
        .multinomial(num, np.full(num, 1 / num), size=DRAWS)
        .astype(float)
    )
    count_BC = np.concatenate([np.ones((1, num)), count_BC])
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio_BK = (count_BC @ total_CK) / (count_BC @ weight_CK)
    ratio_BK[1:, (weight_CK != 0).sum(0) < LEAST_CLUSTERS] = np.nan
    return ratio_BK


def interval(ratio_B: np.ndarray) -> Interval:
    """The estimate and its 95% percentile interval; draws in which the quantity is not defined are
    left out.

    >>> interval(np.array([0.5, 0.5, 0.5]))
    {'mean': 0.5, 'low': 0.5, 'high': 0.5}
    """
    draws = ratio_B[1:][np.isfinite(ratio_B[1:])]
    low, high = np.percentile(draws, LEVEL) if len(draws) else (np.nan, np.nan)
    found = {"mean": ratio_B[0], "low": low, "high": high}
    return {
        name: float(f"{value:.6g}") if np.isfinite(value) else None for name, value in found.items()
    }


def means(value: Any, sets: dict[str, Any], cluster: Any, seed: int = 0) -> dict[str, Interval]:
    """Mean of a column over named sets of rows, with intervals; an empty set is left out."""
    masks = {
        name: np.asarray(mask, bool) for name, mask in sets.items() if np.asarray(mask, bool).any()
    }
    if not masks:
        return {}
    flat = np.nan_to_num(np.asarray(value, float))
    ratio_BK = clustered(
        [flat * m for m in masks.values()],
        [m.astype(float) for m in masks.values()],
        np.asarray(cluster),
        seed,
    )
    return {name: interval(ratio_BK[:, k]) for k, name in enumerate(masks)}


def mean_difference(value: Any, first: Any, second: Any, cluster: Any, seed: int = 0) -> Interval:
    """Mean over the first set minus mean over the second, clusters drawn jointly."""
    flat = np.nan_to_num(np.asarray(value, float))
    masks = [np.asarray(first, bool), np.asarray(second, bool)]
    ratio_BK = clustered(
        [flat * m for m in masks], [m.astype(float) for m in masks], np.asarray(cluster), seed
    )
    return interval(ratio_BK[:, 0] - ratio_BK[:, 1])


def error_bars(intervals: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Plotly's error bars of some intervals; nan, which draws no bar, where there is no interval.

    >>> error_bars([{"mean": 2.0, "low": 1.0, "high": 2.5}, {"mean": 3.0, "low": None, "high": None}])["array"].tolist()
    [0.5, nan]
    """
    # arrays and not lists: those reach the page as null, which plotly takes for a bar of length 0
    up, down = (
        np.array(
            [np.nan if one[side] is None else abs(one[side] - one["mean"]) for one in intervals]
        )
        for side in ("high", "low")
    )
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down}
