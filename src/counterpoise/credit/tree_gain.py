"""TEMPO: the value of a prefix is the mean reward of the group's rollouts that share it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from counterpoise.errors import check_number
from counterpoise.maths.reduce import LOCAL, Reduce, groups, masked_mean
from counterpoise.maths.trie import prefix_nodes, row_mask
from counterpoise.stage import declare
from counterpoise.types import TokenBatch


def tree_gain_of(batch: TokenBatch) -> Tensor:
    """V(prefix with the token) - V(prefix), V the mean reward of the rollouts of the group that
    begin so; 0 where the model wrote nothing, [N, T].

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2], [1, 3]], group=[0, 0], reward=[1.0, 0.0], sampler_logp=[[-1.0] * 2] * 2
    ... )
    >>> tree_gain_of(batch).tolist()
    [[0.0, 0.5], [0.0, -0.5]]
    """
    is_row_NT, by = row_mask(batch.mask_NT), groups(batch.group_N)
    nodes = prefix_nodes(batch.token_ids_NT, is_row_NT, batch.group_N)
    reward_NT = batch.reward_N[:, None].expand(is_row_NT.shape)
    value_M = nodes.sum(reward_NT) / nodes.size_M.to(reward_NT.dtype)
    value_NT = value_M[nodes.node_NT.clamp(min=0)]
    before_NT = pad(value_NT[:, :-1], (1, 0))
    before_NT[:, 0] = by.mean(batch.reward_N)[by.index_N]
    return torch.where(batch.mask_NT, value_NT - before_NT, 0)


def _shared(
    before_NT: Tensor, after_NT: Tensor, batch: TokenBatch, *, reduce: Reduce = LOCAL
) -> dict[str, Tensor]:
    gain_NT = tree_gain_of(batch)
    return {
        "branch_frac": masked_mean((gain_NT != 0).to(gain_NT.dtype), batch.mask_NT, reduce),
        "gain_abs": masked_mean(gain_NT.abs(), batch.mask_NT, reduce),
    }


@declare(report=_shared, needs_groups=True)
def tree_gain(
    credit_NT: Tensor, batch: TokenBatch, *, std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Add what each token did to the mean reward of the rollouts that share its prefix.

    credit' = credit + (V(with the token) - V(before it)) / (s + eps), V of a prefix the mean reward
    of the group's rollouts that begin with it, s the unbiased std of the group's rewards

    Samples nothing. Only tokens at which rollouts part change: once a rollout is alone its prefix
    has its own reward for a value, and before that nothing has been decided. Keeps neither the sign
    nor the mass.

    Args:
        credit_NT: [N, T], the group's z-score for TEMPO.
        std: False adds the difference as it is.
        eps: >= 0, added to the std; as in the advantage.

    Reference: TEMPO, arXiv 2509.18314. What an environment says is part of the prefix.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2], [1, 3]], group=[0, 0], reward=[1.0, 0.0], sampler_logp=[[-1.0] * 2] * 2
    ... )
    >>> tree_gain(torch.tensor([[0.5, 0.5], [-0.5, -0.5]]), batch, std=False).tolist()
    [[0.5, 1.0], [-0.5, -1.0]]
    """
    check_number("tree_gain", least=0, eps=eps)
    by, gain_NT = groups(batch.group_N), tree_gain_of(batch)
    if std:
        is_constant_N = by.is_constant(batch.reward_N)
        std_N = by.std(batch.reward_N)[by.index_N] + eps
        gain_NT = gain_NT / torch.where(is_constant_N, 1, std_N)[:, None]
    return credit_NT + gain_NT.to(credit_NT.dtype)
