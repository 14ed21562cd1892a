"""Does a method do anything here? The cosine of its weight change over a batch with its control's,
on the same rollouts.

All arms start every batch from the control's weights and moments, so they sample the same rollouts;
after it they are set back to where the control went. Methods with memory see every batch of the
control's way.

Axes: S members (arms), P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from counterpoise.arena.batch import train_batch
from counterpoise.arena.collect import Bench
from counterpoise.arena.member import Member


def cosines(
    bench: Bench,
    members: Sequence[Member],
    control: int,
    num_batches: int,
    note: Callable[[], None],
) -> list[list[float]]:
    """Per batch the cosine of each member's change with the control's; NaN where one is 0.

    ``members`` have the same seed and recipe but for their method; ``control`` is the place of the
    one whose way all go.
    """
    out = []
    for batch_number in range(num_batches):
        before_P = bench.stack.theta_SP[control].clone()
        train_batch(bench, members, batch_number)
        out.append(cosine_with(bench.stack.theta_SP - before_P, control).tolist())
        follow_(bench, control)
        note()
    return out


def cosine_with(change_SP: Tensor, control: int) -> Tensor:
    """Cosine of every row with one of them, [S].

    >>> cosine_with(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]), 0).tolist()
    [1.0, 0.7071067690849304, nan]
    """
    unit_SP = change_SP / torch.linalg.vector_norm(change_SP, dim=1, keepdim=True)
    return unit_SP @ unit_SP[control]


@torch.no_grad()
def follow_(bench: Bench, control: int) -> None:
    """Every member goes on from where the control is."""
    for column in (bench.stack.theta_SP, *bench.moments):
        column.copy_(column[control].clone().expand_as(column))
