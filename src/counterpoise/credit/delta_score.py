"""DelTA's score of a token: two centroids, Delta, its temperature, alpha, and the refinement of the
centroids.

Sides are the signs of the credit; response tokens with credit 0 are on neither.
Axes as in ``types``, and M: tokens with credit of this rank, the positive side first. A pair is
(positive side, negative side)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.credit.proxies import Proxy
from counterpoise.maths.reduce import Reduce
from counterpoise.types import TokenBatch

VARIANCE_FLOOR = 1e-8

Pair = tuple[Tensor, Tensor]


class Sides(NamedTuple):
    """Tokens with credit: places in the flattened batch, |credit|, slices of both sides, tokens of
    each side over all ranks.
    """

    index_M: Tensor
    mass_M: Tensor
    parts: tuple[slice, slice]
    count: Pair
    reduce: Reduce

    @property
    def is_one_sided(self) -> bool:
        return not all(bool(count > 0) for count in self.count)

    def mean(self, value_M: Tensor) -> Pair:
        """Mean of each side over all ranks, summed in float64; 0 for an empty side."""
        sums = self.reduce.sum(
            torch.stack([value_M[part].sum(dtype=torch.float64) for part in self.parts])
        )
        positive, negative = (total / count.clamp(min=1) for total, count in zip(sums, self.count))
        return positive.to(value_M.dtype), negative.to(value_M.dtype)

    def spread(self, pair: Pair) -> Tensor:
        """One number per side -> one number per token."""
        return torch.cat(
            [one.expand(part.stop - part.start) for one, part in zip(pair, self.parts)]
        )


class Scoring(NamedTuple):
    """Those parameters of ``delta`` that say how a token is scored."""

    score: str
    hard: bool
    gamma: float | None

    def alpha(self, margin_M: Tensor) -> Tensor:
        """alpha of Delta / gamma."""
        return (margin_M > 0).to(margin_M.dtype) if self.hard else margin_M.sigmoid()


class Round(NamedTuple):
    """Centroids and the Delta of every token."""

    centroids: Pair
    delta_M: Tensor


def sides_of(credit_NT: Tensor, batch: TokenBatch, reduce: Reduce) -> Sides:
    """The two sides of a batch's credit."""
    credit_S = torch.where(batch.mask_NT, credit_NT, 0).flatten()
    positive, negative = (credit_S > 0).nonzero().flatten(), (credit_S < 0).nonzero().flatten()
    index_M, num_positive = torch.cat([positive, negative]), len(positive)
    count = reduce.sum(torch.tensor([num_positive, len(negative)], device=credit_NT.device))
    return Sides(
        index_M=index_M,
        mass_M=credit_S[index_M].abs(),
        parts=(slice(0, num_positive), slice(num_positive, len(index_M))),
        count=(count[0], count[1]),
        reduce=reduce,
    )


def margin(proxy: Proxy, sides: Sides, scoring: Scoring, refinements: int) -> Tensor:
    """Delta / gamma of every token after all refinements, [M]."""
    now = first_round(proxy, sides, scoring)
    gamma = temperature(now.delta_M, sides, scoring)
    for _ in range(refinements):
        alpha_M = scoring.alpha(now.delta_M / sides.spread(gamma))
        # the temperature lags one round behind: it is that of the Delta whose alpha makes the new
        # centroids
        gamma = temperature(now.delta_M, sides, scoring)
        now = _round(proxy, sides, sides.mass_M * alpha_M, now.centroids, scoring)
    return now.delta_M / sides.spread(gamma)


def first_round(proxy: Proxy, sides: Sides, scoring: Scoring) -> Round:
    """Centroids weighted by |credit| alone."""
    return _round(proxy, sides, sides.mass_M, None, scoring)


def temperature(delta_M: Tensor, sides: Sides, scoring: Scoring) -> Pair:
    """gamma of each side: the standard deviation of Delta (population, unweighted, floored), or the
    fixed one.
    """
    if scoring.gamma is not None:
        return delta_M.new_tensor(scoring.gamma), delta_M.new_tensor(scoring.gamma)
    centred_M = delta_M - sides.spread(sides.mean(delta_M))
    positive, negative = (
        variance.clamp(min=VARIANCE_FLOOR).sqrt() for variance in sides.mean(centred_M.square())
    )
    return positive, negative


def _round(
    proxy: Proxy, sides: Sides, weight_M: Tensor, previous: Pair | None, scoring: Scoring
) -> Round:
    positive, negative = centroids = _centroids(proxy, sides, weight_M, previous)
    if scoring.score == "within_side":
        return Round(
            centroids,
            -torch.cat(
                [_own_distance(proxy, mu, part) for mu, part in zip(centroids, sides.parts)]
            ),
        )
    direction = positive - negative
    # |mu-|^2 - |mu+|^2 as one inner product: nothing cancels when the centroids are close
    delta_M = (
        2 * proxy.dot(direction, slice(0, len(weight_M)))
        - (direction * (positive + negative)).sum()
    )
    delta_M[sides.parts[1]] *= -1
    return Round(centroids, delta_M)


def _own_distance(proxy: Proxy, centroid: Tensor, part: slice) -> Tensor:
    """|v - mu|^2."""
    return proxy.squared(part) - 2 * proxy.dot(centroid, part) + centroid.square().sum()


def _centroids(proxy: Proxy, sides: Sides, weight_M: Tensor, previous: Pair | None) -> Pair:
    """Weighted mean of v on each side, over all ranks.

    A side whose weights are all 0 keeps its previous centroid.
    """
    means = []
    for k, part in enumerate(sides.parts):
        mass = sides.reduce.sum(weight_M[part].sum(dtype=torch.float64))
        if previous is not None and not bool(mass > 0):
            means.append(previous[k])
            continue
        total = sides.reduce.sum(proxy.total(weight_M, part))
        means.append(total / mass.to(total.dtype))
        if not bool(torch.isfinite(means[k]).all()):
            raise ValueError(
                "delta: a centroid is not finite: hidden_NTD, head_VD or topk_logp_NTK hold NaN or"
                " infinity at tokens with credit."
            )
    return means[0], means[1]
