"""The rule that changes nothing."""

from __future__ import annotations

from torch import Tensor

from counterpoise.stage import declare
from counterpoise.types import TokenBatch


@declare(reads_rewards_only=True)
def uniform(credit_NT: Tensor, batch: TokenBatch) -> Tensor:
    """credit' = credit: every token of a rollout gets its advantage, bit for bit.

    Keeps the mass sum|credit| and the sign.

    >>> import torch
    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2]], group=[0], reward=[1.0], sampler_logp=[[-1.0, -2.0]]
    ... )
    >>> uniform(torch.tensor([[0.5, 0.5]]), batch).tolist()
    [[0.5, 0.5]]
    """
    return credit_NT
