"""Tokens under a mask, and those with the lowest or highest values, of each rollout or of all
ranks. Axes as in ``types``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from counterpoise.maths.reduce import LOCAL, Reduce


def picker(mask_NT: Tensor) -> Callable[[Tensor], Tensor]:
    """``value_NT -> value_NT[mask_NT]`` for many columns, [N, 1] among them: the mask is searched
    once, which takes longer than to read a column.

    >>> pick = picker(torch.tensor([[True, False], [True, True]]))
    >>> pick(torch.tensor([[3, 4], [5, 6]])).tolist(), pick(torch.tensor([[7], [8]])).tolist()
    ([3, 5, 6], [7, 8, 8])
    """
    index_M = mask_NT.flatten().nonzero()[:, 0]
    return lambda value_NT: value_NT.expand_as(mask_NT).flatten()[index_M]


def share_of(count: Tensor | int, fraction: float) -> Tensor:
    """max(1, ceil(fraction * count)); rounding noise of the product adds none.

    >>> share_of(100, 0.07)
    tensor(7)
    """
    exact = torch.as_tensor(count).double() * fraction - 1e-9
    return torch.ceil(exact).clamp(min=1).long()


def lowest_of_rows(value_NT: Tensor, mask_NT: Tensor, fraction: float) -> Tensor:
    """True on the max(1, ceil(fraction * n)) lowest of each row's n masked values, [N, T]; ties go
    to the earlier token.

    >>> lowest_of_rows(torch.tensor([[3.0, 1.0, 0.0]]), torch.tensor([[True, True, False]]), 0.5)
    tensor([[False,  True, False]])
    """
    order_NT = torch.where(mask_NT, value_NT, torch.inf).argsort(dim=1, stable=True)
    position_NT = torch.arange(mask_NT.shape[1], device=mask_NT.device).expand_as(order_NT)
    rank_NT = torch.empty_like(order_NT).scatter_(1, order_NT, position_NT)
    return mask_NT & (rank_NT < share_of(mask_NT.sum(1), fraction)[:, None])


def highest_of_batch(
    value_NT: Tensor, mask_NT: Tensor, fraction: float, reduce: Reduce = LOCAL
) -> Tensor:
    """True on the max(1, ceil(fraction * n)) highest of the n masked values of all ranks, [N, T],
    and on those that tie with the last of them.

    >>> highest_of_batch(torch.tensor([[3.0, 1.0], [2.0, 9.0]]), torch.ones(2, 2) > 0, 0.5)
    tensor([[ True, False],
            [False,  True]])
    """
    value_M = reduce.cat(value_NT[mask_NT])
    if len(value_M) == 0:
        return mask_NT
    last = value_M.sort(descending=True).values[int(share_of(len(value_M), fraction)) - 1]
    return mask_NT & (value_NT >= last)
