"""On how few of its tokens a rollout's credit lies. Axes as in ``types``."""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.maths.reduce import LOCAL, Reduce, masked_mean


def gini(size_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Gini coefficient of each row: sum_ij |w_i - w_j| / (2 n^2 mean w), [N].

    0 where all n tokens have the same size, 1 - 1/n where one has it all; 0 for a row of zeros.

    Args:
        size_NT: [N, T], >= 0.
        mask_NT: the tokens that count.

    >>> gini(
    ...     torch.tensor([[4.0, 0, 0, 0], [1, 3, 0, 0]]), torch.tensor([[1] * 4, [1, 1, 0, 0]]) > 0
    ... )
    tensor([0.7500, 0.2500])
    """
    ascending_NT = torch.where(mask_NT, size_NT, 0).sort(dim=1).values
    count_N1 = mask_NT.sum(1, keepdim=True)
    # what is left out sorts as zeros before the tokens that count, and zeros add nothing
    rank_T = torch.arange(1, size_NT.shape[1] + 1, device=size_NT.device)
    rank_NT = rank_T - size_NT.shape[1] + count_N1
    spread_N = ((2 * rank_NT - count_N1 - 1).to(size_NT.dtype) * ascending_NT).sum(1)
    return spread_N / _or_one(count_N1[:, 0].to(size_NT.dtype) * ascending_NT.sum(1))


def effective_frac(size_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Effective share of each row's n tokens: (sum w)^2 / (n sum w^2), [N].

    1 where all have the same size, 1/n where one has it all; 0 for a row of zeros. Arguments as for
    ``gini``.

    >>> effective_frac(torch.tensor([[4.0, 0, 0, 0], [1, 3, 0, 0]]), torch.ones(2, 4) > 0)
    tensor([0.2500, 0.4000])
    """
    kept_NT = torch.where(mask_NT, size_NT, 0)
    # of a row divided by its largest size, the squares neither overflow nor vanish
    kept_NT = kept_NT / _or_one(kept_NT.amax(1, keepdim=True))
    return kept_NT.sum(1).square() / _or_one(mask_NT.sum(1) * kept_NT.square().sum(1))


def concentration(credit_NT: Tensor, mask_NT: Tensor, reduce: Reduce = LOCAL) -> dict[str, Tensor]:
    """``gini`` and ``effective_frac`` of |credit|, means over the rollouts of all ranks that have
    credit; 0 where none has.

    Reference: ARCA, arXiv 2606.00257, at the level of its abstract. Reads the paper's effective
        token ratio as (sum w)^2 / (n sum w^2).
    """
    size_NT = torch.where(mask_NT, credit_NT, 0).abs()
    has_N = (size_NT > 0).any(1)
    return {
        "gini": masked_mean(gini(size_NT, mask_NT), has_N, reduce),
        "effective_frac": masked_mean(effective_frac(size_NT, mask_NT), has_N, reduce),
    }


def _or_one(value: Tensor) -> Tensor:
    """The same with 1 for 0, to divide by."""
    return torch.where(value == 0, 1, value)
