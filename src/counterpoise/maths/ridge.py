"""Ridge regression in closed form, from sums that add up over batches and ranks.

Axes: M observations, F features, Q = F + 2 columns of a Gram matrix: 1, the target, the features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Fit(NamedTuple):
    """target ~ level + (feature - mean) . slope"""

    level: Tensor
    mean_F: Tensor
    slope_F: Tensor

    def predict(self, feature_MF: Tensor) -> Tensor:
        """The expected target of each observation, [M]."""
        start = self.level - self.mean_F @ self.slope_F
        return (feature_MF @ self.slope_F.to(feature_MF)).double() + start


def gram(feature_MF: Tensor, target_M: Tensor) -> Tensor:
    """All sums that a regression needs: Z' Z of the columns Z = [1, target, features], in the
    precision of the features, as float64.

    >>> gram(torch.tensor([[2.0], [4.0]]), torch.tensor([1.0, 0.0])).tolist()
    [[2.0, 1.0, 6.0], [1.0, 1.0, 2.0], [6.0, 2.0, 20.0]]
    """
    target_M1 = target_M[:, None].to(feature_MF.dtype)
    column_MQ = torch.cat([torch.ones_like(target_M1), target_M1, feature_MF], dim=1)
    return (column_MQ.T @ column_MQ).double()


def ridge_fit(gram_QQ: Tensor, ridge: float) -> Fit:
    """The slopes that minimise mean (target - fit)^2 + ridge sum_f var_f slope_f^2.

    slope = (C + ridge diag C)^-1 c, C the covariance of the features, c theirs with the target. The
    penalty is on features of unit variance, so no feature's scale matters; the level is free. A
    feature that never varies has slope 0.

    Args:
        gram_QQ: from ``gram``, or a sum of several; of at least one observation.
        ridge: > 0.
    """
    mean_Q = gram_QQ[0] / gram_QQ[0, 0]
    covariance_QQ = gram_QQ / gram_QQ[0, 0] - mean_Q[:, None] * mean_Q
    mean_F, covariance_FF = mean_Q[2:], covariance_QQ[2:, 2:]
    spread_F = covariance_FF.diagonal().clamp(min=0).sqrt()
    # below this, sums in float32 leave nothing but rounding
    is_flat_F = spread_F <= 1e-3 * mean_F.abs()
    inverse_F = torch.where(is_flat_F, 0, 1 / torch.where(is_flat_F, 1, spread_F))
    correlation_FF = inverse_F[:, None] * covariance_FF * inverse_F
    penalty_FF = torch.full_like(mean_F, ridge).masked_fill(is_flat_F, 1).diag()
    target_F = inverse_F * covariance_QQ[2:, 1]
    slope_F = inverse_F * torch.linalg.solve(correlation_FF + penalty_FF, target_F)
    return Fit(mean_Q[1], mean_F, slope_F)
