"""How well one column of numbers orders another, with weights and draws over prompts.

Every number is computed for all draws at once: row 0 of ``weight_BM`` holds the weights as they
are, each further row those of a bootstrap draw of prompts (``output.number_dict`` makes an interval
of the result). Axes: B draws, M tokens, R rollouts, T response tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from counterpoise.maths.intervals import resample
from counterpoise.probes.output import LEAST_CLUSTERS


def draw_weights(weight_M: ArrayLike, cluster_M: ArrayLike, seed: int = 0) -> np.ndarray:
    """Weights of every token in every draw, [1 + B, M]; draws of fewer than three clusters are NaN.

    >>> draw_weights([1.0, 2.0], [0, 0]).shape, draw_weights([1.0, 2.0], [0, 0])[0].tolist()
    ((2001, 2), [1.0, 2.0])
    """
    names, index_M = np.unique(np.asarray(cluster_M), return_inverse=True)
    count_BP = resample(np.eye(len(names)), seed)
    count_BP[1:] += np.nan if len(names) < LEAST_CLUSTERS else 0.0
    return count_BP[:, index_M] * np.asarray(weight_M, float)


def mid_rank(value_M: ArrayLike, weight_BM: np.ndarray) -> np.ndarray:
    """The weight below each value plus half the weight of its ties, [B, M].

    >>> mid_rank([5.0, 3.0, 5.0], np.ones((1, 3))).tolist()
    [[2.0, 0.5, 2.0]]
    """
    value_M = np.asarray(value_M, float)
    order_M = np.argsort(value_M, kind="stable")
    sums_BM = np.pad(weight_BM[:, order_M].cumsum(1), ((0, 0), (1, 0)))
    low, high = (np.searchsorted(value_M[order_M], value_M, side) for side in ("left", "right"))
    return (sums_BM[:, low] + sums_BM[:, high]) / 2


def correlation(x: np.ndarray, y: np.ndarray, weight_BM: np.ndarray) -> np.ndarray:
    """Pearson's weighted correlation of two columns ([M] or [B, M]), [B]; NaN where one is flat.

    >>> correlation(np.array([1.0, 2.0, 4.0]), np.array([2.0, 4.0, 8.0]), np.ones((1, 3))).round(6)
    array([1.])
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        share_BM = weight_BM / weight_BM.sum(1, keepdims=True)
        a_BM, b_BM = (c - (share_BM * c).sum(1, keepdims=True) for c in (x, y))
        spread = [(share_BM * c * c).sum(1) for c in (a_BM, b_BM)]
        flat_B = np.minimum(*spread) < 1e-24 * np.maximum(*spread).max(initial=0)
        out_B = (share_BM * a_BM * b_BM).sum(1) / np.sqrt(spread[0] * spread[1])
    return np.where(flat_B | ~np.isfinite(out_B), np.nan, out_B)


def rank_correlation(x_M: ArrayLike, y_M: ArrayLike, weight_BM: np.ndarray) -> np.ndarray:
    """Spearman's weighted rank correlation, [B]; NaN where one column does not vary.

    >>> rank_correlation([1.0, 2.0, 9.0], [0.0, 1.0, 2.0], np.ones((1, 3))).round(6)
    array([1.])
    """
    if np.ptp(np.asarray(x_M, float)) == 0 or np.ptp(np.asarray(y_M, float)) == 0:
        return np.full(len(weight_BM), np.nan)
    return correlation(mid_rank(x_M, weight_BM), mid_rank(y_M, weight_BM), weight_BM)


def cosine(x_M: np.ndarray, y_M: np.ndarray, weight_BM: np.ndarray) -> np.ndarray:
    """Sum of products over both roots of sums of squares, [B]; NaN where one column is 0."""
    xy, xx, yy = (weight_BM @ (a * b) for a, b in ((x_M, y_M), (x_M, x_M), (y_M, y_M)))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where((xx > 0) & (yy > 0), xy / np.sqrt(xx * yy), np.nan)


def auroc(score_M: ArrayLike, is_hit_M: ArrayLike, weight_BM: np.ndarray) -> np.ndarray:
    """The chance that a hit scores above another token, ties half, [B]; NaN without either kind.

    >>> auroc([3.0, 1.0, 2.0], [True, False, False], np.ones((1, 3)))
    array([1.])
    """
    is_hit_M = np.asarray(is_hit_M, bool)
    hit_BM, other_BM = weight_BM * is_hit_M, weight_BM * ~is_hit_M
    below_BM = mid_rank(score_M, other_BM)
    size_B = hit_BM.sum(1) * other_BM.sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(size_B > 0, (hit_BM * below_BM).sum(1) / size_B, np.nan)


def share(value_M: ArrayLike, is_in_M: ArrayLike, weight_BM: np.ndarray) -> np.ndarray:
    """The share of a column's sum that lies in a set, [B]; NaN where the sum is 0."""
    value_M = np.asarray(value_M, float)
    whole_B, part_B = weight_BM @ value_M, weight_BM @ (value_M * np.asarray(is_in_M))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(whole_B > 0, part_B / whole_B, np.nan)


def effective_size(weight_M: ArrayLike) -> float:
    """(sum w)^2 / sum w^2: how many equally weighted tokens the weighted ones are worth.

    >>> effective_size([1.0, 1.0, 0.0])
    2.0
    """
    weight_M = np.asarray(weight_M, float)
    return float(weight_M.sum() ** 2 / max((weight_M**2).sum(), 1e-300))


def place(score_RT: Tensor, mask_RT: Tensor, target_R: Tensor) -> tuple[Tensor, Tensor]:
    """Where one token of each rollout stands among the rollout's tokens by its score.

    Returns the AUROC of that one token, which is its percentile (ties half, NaN for a rollout of
    one token), and its expected reciprocal rank (tokens tied with it in random order).

    >>> one = torch.ones(1, 3, dtype=torch.bool)
    >>> [x.tolist() for x in place(torch.tensor([[1.0, 5.0, 2.0]]), one, torch.tensor([2]))]
    [[0.5], [0.5]]
    """
    score_R1 = score_RT.gather(1, target_R[:, None])
    less_R = ((score_RT < score_R1) & mask_RT).sum(1)
    ties_R = ((score_RT == score_R1) & mask_RT).sum(1) - 1
    other_R = mask_RT.sum(1) - 1
    above_R = other_R - less_R - ties_R
    harmonic = torch.cat(
        [torch.zeros(1), (1 / torch.arange(1, mask_RT.shape[1] + 1)).cumsum(0)]
    ).to(score_RT.device, torch.float64)
    reciprocal_R = (harmonic[above_R + ties_R + 1] - harmonic[above_R]) / (ties_R + 1)
    return (less_R + ties_R / 2).double() / other_R, reciprocal_R
