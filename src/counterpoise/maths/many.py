"""Arithmetic on lists of tensors in a few calls, where a model has hundreds of parameters.

Results are those of a loop over the tensors, to the bit on a CPU.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Bit-exact copies."""
    sources = list(tensors)
    targets = [torch.empty_like(source) for source in sources]
    return copy_(targets, sources)


def copy_(targets: list[Tensor], sources: Sequence[Tensor]) -> list[Tensor]:
    if targets:
        torch._foreach_copy_(targets, list(sources))
    return targets


def add_(targets: list[Tensor], others: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_add_(targets, list(others))


def subtract_(targets: list[Tensor], others: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_sub_(targets, list(others))


def zero_(targets: list[Tensor]) -> None:
    if targets:
        torch._foreach_zero_(targets)


def negate_(targets: list[Tensor]) -> list[Tensor]:
    if targets:
        torch._foreach_neg_(targets)
    return targets


def multiply_(targets: list[Tensor], factors: Sequence[Tensor | float]) -> None:
    """Each by its own factor: a tensor of its shape, or a number.

    >>> parts = [torch.ones(2), torch.ones(1)]
    >>> multiply_(parts, [torch.tensor([2.0, 3.0]), 4.0])
    >>> [part.tolist() for part in parts]
    [[2.0, 3.0], [4.0]]
    """
    wide = [(part, factor) for part, factor in zip(targets, factors) if isinstance(factor, Tensor)]
    numbers = [
        (part, factor) for part, factor in zip(targets, factors) if not isinstance(factor, Tensor)
    ]
    if wide:
        torch._foreach_mul_(*map(list, zip(*wide)))
    if numbers:
        torch._foreach_mul_(*map(list, zip(*numbers)))


def roots(squares: list[Tensor], divisors: list[float], eps: float) -> list[Tensor]:
    """``sqrt(square / divisor) + eps`` of each.

    >>> roots([torch.tensor([8.0])], [2.0], 1.0)[0].tolist()
    [3.0]
    """
    if not squares:
        return []
    out = list(torch._foreach_div(squares, divisors))
    torch._foreach_sqrt_(out)
    torch._foreach_add_(out, eps)
    return out


def divided(numbers: list[float], divisors: list[Tensor]) -> list[Tensor]:
    """``number / divisor`` of each, as torch divides a number; in the divisors' memory.

    >>> divided([3.0], [torch.tensor([2.0, 4.0])])[0].tolist()
    [1.5, 0.75]
    """
    if divisors:
        torch._foreach_reciprocal_(divisors)
        torch._foreach_mul_(divisors, numbers)
    return divisors
