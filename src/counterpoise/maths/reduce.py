"""Masked and grouped reductions, the hook that pools over ranks, seeded generators, finite checks.

Axes as in ``types``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Reduce(NamedTuple):
    """How a statistic pools over ranks.

    ``sum`` adds a tensor of one shape over ranks; ``cat`` joins ragged first axes in rank order.
    """

    sum: Callable[[Tensor], Tensor]
    cat: Callable[[Tensor], Tensor]


def _itself(value: Tensor) -> Tensor:
    return value


LOCAL = Reduce(sum=_itself, cat=_itself)


def over_ranks(group: Any = None) -> Reduce:
    """Pool over a ``torch.distributed`` process group (the default group if None)."""
    import torch.distributed as dist

    def all_sum(value: Tensor) -> Tensor:
        out = value.clone()
        dist.all_reduce(out, group=group)
        return out

    def all_cat(value: Tensor) -> Tensor:
        world = dist.get_world_size(group)
        size = torch.tensor([value.shape[0]], device=value.device)
        sizes = [torch.zeros_like(size) for _ in range(world)]
        dist.all_gather(sizes, size, group=group)
        longest = int(max(int(s) for s in sizes))
        padded = value.new_zeros((longest, *value.shape[1:]))
        padded[: value.shape[0]] = value
        parts = [torch.zeros_like(padded) for _ in range(world)]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[: int(s)] for part, s in zip(parts, sizes)])

    return Reduce(sum=all_sum, cat=all_cat)


def seeded_generator(seed: int, batch_number: int, purpose: str) -> torch.Generator:
    """A generator derived from (seed, batch, purpose): the same on every machine and rank.

    >>> torch.equal(
    ...     torch.rand(2, generator=seeded_generator(0, 1, "plan")),
    ...     torch.rand(2, generator=seeded_generator(0, 1, "plan")),
    ... )
    True
    """
    return torch.Generator().manual_seed(derived_seed(seed, batch_number, purpose))


def derived_seed(seed: int, batch_number: int, purpose: str) -> int:
    """A seed below 2**63 for one purpose at one batch."""
    digest = hashlib.sha256(f"{seed}/{batch_number}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % (2**63)


class Groups(NamedTuple):
    """Rollouts by prompt: ``index_N`` is dense 0..P-1, ``size_P`` counts."""

    index_N: Tensor
    size_P: Tensor

    def sum(self, value_N: Tensor) -> Tensor:
        """Sum of each group, [P, ...]."""
        out = value_N.new_zeros((len(self.size_P), *value_N.shape[1:]))
        return out.index_add(0, self.index_N, value_N)

    def mean(self, value_N: Tensor) -> Tensor:
        """Mean of each group, [P]."""
        return self.sum(value_N) / self.size_P.to(value_N.dtype)

    def std(self, value_N: Tensor) -> Tensor:
        """Unbiased standard deviation of each group, [P]; 0 for a group of one."""
        centred_N = value_N - self.mean(value_N)[self.index_N]
        return (
            self.sum(centred_N.square()) / (self.size_P - 1).clamp(min=1).to(value_N.dtype)
        ).sqrt()

    def extremes(self, value_N: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest value of each group, [P] and [P]."""
        low = value_N.new_full((len(self.size_P),), torch.inf).scatter_reduce(
            0, self.index_N, value_N, "amin"
        )
        high = value_N.new_full((len(self.size_P),), -torch.inf).scatter_reduce(
            0, self.index_N, value_N, "amax"
        )
        return low, high

    def is_constant(self, value_N: Tensor) -> Tensor:
        """True for rollouts of a group whose rewards are all equal, [N]: decided on rewards, never
        on advantages.
        """
        low_P, high_P = self.extremes(value_N)
        return (low_P == high_P)[self.index_N]


def groups(group_N: Tensor) -> Groups:
    """Dense group numbers, in order of the group's number.

    >>> groups(torch.tensor([7, 3, 7])).size_P.tolist()
    [1, 2]
    """
    _, index_N, size_P = torch.unique(group_N, return_inverse=True, return_counts=True)
    return Groups(index_N, size_P)


def masked_mean(value: Tensor, mask: Tensor, reduce: Reduce = LOCAL) -> Tensor:
    """Mean where the mask is True, over all ranks; 0 where it is nowhere True."""
    count = reduce.sum(mask.sum())
    return reduce.sum(torch.where(mask, value, 0).sum()) / count.clamp(min=1).to(value.dtype)


def check_finite(stage: str, value: Tensor, mask: Tensor, row_R: Tensor | None = None) -> None:
    """Raise at the stage that made a NaN or infinity, with the rollouts' numbers."""
    bad = ~torch.isfinite(value) & mask
    if not bad.any():
        return
    bad_N = bad.reshape(bad.shape[0], -1).any(1)
    rows = bad_N.nonzero().flatten() if row_R is None else row_R.to(bad_N.device)[bad_N]
    raise ValueError(
        f"{stage} gave a value that is not finite at rollouts {rows.tolist()[:8]}: look at their"
        " rewards and log-probs."
    )
