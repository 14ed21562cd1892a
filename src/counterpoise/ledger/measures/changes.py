"""Boosted, suppressed, unchanged; cancellation: what is read off a token's change and its parts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

CHANGES = ("suppressed", "unchanged", "boosted")


def change_sign(delta: Tensor, noise_floor: float | Tensor) -> Tensor:
    """+1 boosted, -1 suppressed, 0 where |delta| is within the noise floor.

    >>> change_sign(torch.tensor([0.3, -0.3, 0.01]), 0.02).tolist()
    [1.0, -1.0, 0.0]
    """
    return torch.where(delta.abs() > noise_floor, delta.sign(), 0)


def cancellation(parts: Iterable[Tensor]) -> Tensor:
    """1 - |sum of parts| / sum of |parts|: 0 all parts pull one way, 1 they cancel; 0 where there
    is nothing to cancel.

    >>> cancellation([torch.tensor([3.0, 1.0, 0.0]), torch.tensor([-1.0, 1.0, 0.0])]).tolist()
    [0.5, 0.0, 0.0]
    """
    part = torch.stack(list(parts))
    total = part.abs().sum(0)
    return torch.where(total > 0, 1 - part.sum(0).abs() / torch.where(total > 0, total, 1), 0)


def correlation(first: Tensor, second: Tensor) -> float:
    """Pearson's; nan where one of them does not vary.

    >>> round(correlation(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2.0, 4.0, 8.0])), 6)
    1.0
    """
    if len(first) < 2:
        return float("nan")
    return float(torch.corrcoef(torch.stack([first.double(), second.double()]))[0, 1])
