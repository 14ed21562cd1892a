"""How near noisy vectors come to a direction that is itself known with noise alone.

A direction is estimated by the mean of C independent chunks in two halves: ``first`` and ``second``
are the halves' means, and ``first . second`` is the squared length of the truth without the noise's
part. Vectors come as inner products, so that nothing here knows their length.

Axes: M methods, B batches (one vector of each method), C chunks of the truth, J vectors in a mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

ENOUGH = 0.8  # cosine of the halves from which the truth counts as known
TINY = 1e-12


class Products(NamedTuple):
    """Inner products of everything with everything.

    Args:
        cross_MBC: vector of a method's batch with a chunk of the truth.
        own_MBB: vectors of one method's batches with each other.
        truth_CC: chunks with each other.
        scale_MB: a vector times this is the method's own; directions need no scale.
        is_first_C: chunks of the first half.
        weight_C: rollouts of a chunk, whose mean the chunk is.
    """

    cross_MBC: np.ndarray
    own_MBB: np.ndarray
    truth_CC: np.ndarray
    scale_MB: np.ndarray
    is_first_C: np.ndarray
    weight_C: np.ndarray

    def without_batch(self, b: int) -> Products:
        keep = np.arange(self.scale_MB.shape[1]) != b
        return self._replace(
            cross_MBC=self.cross_MBC[:, keep],
            own_MBB=self.own_MBB[:, keep][:, :, keep],
            scale_MB=self.scale_MB[:, keep],
        )

    def without_chunk(self, c: int) -> Products:
        weight_C = self.weight_C.astype(float).copy()
        weight_C[c] = 0
        return self._replace(weight_C=weight_C)

    @property
    def halves_2C(self) -> np.ndarray:
        """What each chunk weighs in the mean of its half."""
        side_2C = np.stack([self.is_first_C, ~self.is_first_C]) * self.weight_C
        return side_2C / side_2C.sum(1, keepdims=True)

    @property
    def truth_square(self) -> float:
        """Squared length of the truth; NaN where the halves do not point the same way."""
        first_C, second_C = self.halves_2C
        square = float(first_C @ self.truth_CC @ second_C)
        return square if square > 0 else math.nan

    @property
    def towards_MB(self) -> np.ndarray:
        """Inner product of every vector with the mean of the halves."""
        return self.cross_MBC @ self.halves_2C.mean(0)

    @property
    def square_MB(self) -> np.ndarray:
        return np.diagonal(self.own_MBB, axis1=1, axis2=2)


Statistic = Callable[[Products], np.ndarray]  # one number per method


def halves_cosine(products: Products) -> float:
    """Cosine of the two halves of the truth."""
    first_C, second_C = products.halves_2C
    truth_CC = products.truth_CC
    size = (first_C @ truth_CC @ first_C) * (second_C @ truth_CC @ second_C)
    return float(first_C @ truth_CC @ second_C / math.sqrt(size)) if size > 0 else math.nan


def reliability(halves: float) -> float:
    """Cosine of the mean of both halves with the truth (Spearman and Brown): ``sqrt(2 r / (1 +
    r))`` for halves of cosine r; a cosine with that mean, divided by this, is one with the truth.

    >>> round(reliability(0.8), 3)
    0.943
    """
    return math.sqrt(2 * halves / (1 + halves)) if halves > 0 else math.nan


def times_more(halves: float, enough: float = ENOUGH) -> float:
    """By how much the truth's sample must grow for its halves to agree by ``enough``.

    Noise falls as 1/n, so ``r / (1 - r)`` grows as n. NaN where the halves do not agree at all.

    >>> round(times_more(0.5), 3)
    4.0
    """
    return enough / (1 - enough) * (1 - halves) / halves if halves > 0 else math.nan


def cosines(products: Products) -> np.ndarray:
    """[M, B] cosine of every vector with the truth, free of the truth's noise:
    ``g . (first + second) / 2 / (|g| sqrt(first . second))``. A vector of length 0 has cosine 0.
    """
    square_MB = products.square_MB
    length_MB = np.sqrt(np.where(square_MB > 0, square_MB, 1) * products.truth_square)
    return np.where(square_MB > 0, products.towards_MB / length_MB, 0.0)


def mean_cosines(products: Products) -> np.ndarray:
    """[M] mean over batches."""
    return cosines(products).mean(1)


def cosines_of_mean(products: Products) -> np.ndarray:
    """[M] cosine with the truth of the mean over infinitely many batches: what is left of the
    angle is bias.

    The mean's squared length comes from pairs of different batches, whose noise is independent.
    NaN where that is not positive.
    """
    mean_M = (products.scale_MB * products.towards_MB).mean(1)
    square_M = _pair_means(products)
    length_M = np.sqrt(np.where(square_M > 0, square_M, np.nan) * products.truth_square)
    return mean_M / length_M


def _pair_means(products: Products) -> np.ndarray:
    """Mean inner product of two different batches of a method."""
    scaled_MBB = products.own_MBB * products.scale_MB[:, :, None] * products.scale_MB[:, None]
    num = scaled_MBB.shape[1]
    diagonal_M = np.trace(scaled_MBB, axis1=1, axis2=2)
    return (scaled_MBB.sum((1, 2)) - diagonal_M) / max(1, num * (num - 1))


def odds(cosine: np.ndarray | float) -> np.ndarray:
    """``c^2 / (1 - c^2)``, which grows as the number of rollouts in an unbiased gradient: there
    ``c = sqrt(n / (n + n0))``. 0 below a cosine of 0.

    >>> odds(0.5**0.5).round(3).item()
    1.0
    """
    square = np.clip(cosine, 0.0, 1 - TINY) ** 2
    return square / (1 - square)


def worths(products: Products, plain: int, rollouts: int) -> np.ndarray:
    """[M] how many plain rollouts give this cosine, by the law in ``odds``; ``plain`` is the
    method whose batches of ``rollouts`` fix n0.
    """
    odds_M = odds(mean_cosines(products))
    return rollouts * odds_M / odds_M[plain] if odds_M[plain] > 0 else odds_M * np.nan


def curve(products: Products, method: int) -> dict[int, float]:
    """Cosine of the mean of 1, 2, 4, ... batches of one method: number of batches -> mean over
    disjoint blocks, two blocks or more.
    """
    towards_B, own_BB = products.towards_MB[method], products.own_MBB[method]
    scale_B = products.scale_MB[method]
    own_BB = own_BB * scale_B[:, None] * scale_B
    num, out, size = len(towards_B), {}, 1
    while num // size >= 2:
        blocks = [slice(k, k + size) for k in range(0, num // size * size, size)]
        up = np.array([(scale_B * towards_B)[block].mean() for block in blocks])
        square = np.array([own_BB[block, block].mean() for block in blocks])
        keep = square > 0
        if keep.any():
            out[size] = float((up[keep] / np.sqrt(square[keep] * products.truth_square)).mean())
        size *= 2
    return out


def jackknife_error(products: Products, statistic: Statistic) -> np.ndarray:
    """Standard error of a statistic from leaving out one batch and one chunk of the truth at a
    time; the two sources are independent.
    """
    _, num_batches, num_chunks = products.cross_MBC.shape
    by_batch = [statistic(products.without_batch(b)) for b in range(num_batches)]
    by_chunk = [statistic(products.without_chunk(c)) for c in range(num_chunks)]
    return np.sqrt(_jackknife_variance(by_batch) + _jackknife_variance(by_chunk))


def _jackknife_variance(values: list[np.ndarray]) -> np.ndarray:
    value = np.stack(values)
    return (len(value) - 1) * np.square(value - value.mean(0)).mean(0)
