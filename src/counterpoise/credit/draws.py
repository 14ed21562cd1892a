"""Random numbers that belong to tokens, not to rows of a tensor.

A draw by position in a tensor changes with the order of rollouts, with padding and with the number
of ranks. Here a token's number is a hash of (a salt from the generator, its group, its rollout's
tokens, its position among them): the same wherever the rollout stands. Identical rollouts of one
prompt get identical numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.types import TokenBatch


def token_keys(batch: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
    """A pseudo-random 63-bit integer >= 0 for every token, [N, T]; padding gets numbers too.

    Ranks agree when their generators were seeded alike (``numerics.seeded``).

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2], [3]], group=[0, 0], reward=[1.0, 0.0], sampler_logp=[[-1.0, -1.0], [-1.0]]
    ... )
    >>> key_NT = token_keys(batch, torch.Generator().manual_seed(0))
    >>> swapped_NT = token_keys(
    ...     batch.select(torch.tensor([1, 0])), torch.Generator().manual_seed(0)
    ... )
    >>> torch.equal(key_NT[0], swapped_NT[1])
    True
    """
    salt = int(torch.randint(2**62, (), generator=generator, dtype=torch.long))
    position_NT = batch.mask_NT.cumsum(1) - 1
    token_NT = scramble(scramble(batch.token_ids_NT.long() + salt) + position_NT)
    rollout_N = scramble(
        torch.where(batch.mask_NT, token_NT, 0).sum(1) + scramble(batch.group_N.long() + salt)
    )
    return scramble(rollout_N[:, None] + position_NT) & (2**63 - 1)


def scramble(value: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014); int64 products wrap, right shifts are
    made logical by a mask.
    """
    value = (value ^ ((value >> 30) & (2**34 - 1))) * -4658895280553007687
    value = (value ^ ((value >> 27) & (2**37 - 1))) * -7723592293110705685
    return value ^ ((value >> 31) & (2**33 - 1))
