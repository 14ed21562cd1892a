"""Turns of a batch: which tokens belong to one, its reward, its return.

A batch without turns is a batch of one turn, or of as many as its mask has runs (the tools of a
host): its reward came in the last.

Axes: N rollouts, T tokens, U turns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.types import TokenBatch


class Turns(NamedTuple):
    """The turns of a batch, whatever of them it has as columns.

    Args:
        turn_NT: the turn of a token that the model wrote, -1 elsewhere.
        mask_NU: True on turns that were played.
        reward_NU: the reward of each turn, 0 where none was played.
        state_NU: a key of the state in which a turn began, -1 where it is not known.
    """

    turn_NT: Tensor
    mask_NU: Tensor
    reward_NU: Tensor
    state_NU: Tensor


def turns(batch: TokenBatch) -> Turns:
    """The turns of a batch.

    >>> batch = TokenBatch.from_lists(
    ...     [[5, 6, 7]], group=[0], reward=[1.0], sampler_logp=[[-0.1, -0.2, -0.3]]
    ... ).replace(mask_NT=torch.tensor([[True, False, True]]))
    >>> turns(batch).turn_NT.tolist(), turns(batch).reward_NU.tolist()
    ([[0, -1, 1]], [[0.0, 1.0]])
    """
    turn_NT = runs(batch.mask_NT) if batch.turn_NT is None else batch.turn_NT
    mask_NU = batch.turn_mask_NU
    if mask_NU is None:
        number_U = torch.arange(int(turn_NT.max()) + 1, device=turn_NT.device)
        mask_NU = number_U <= turn_NT.amax(1, keepdim=True)
    reward_NU = batch.turn_reward_NU
    if reward_NU is None:
        last_N1 = mask_NU.sum(1, keepdim=True) - 1
        reward_NU = batch.reward_N.new_zeros(mask_NU.shape)
        reward_NU = reward_NU.scatter(1, last_N1, batch.reward_N[:, None])
    state_NU = batch.state_NU
    if state_NU is None:
        state_NU = torch.full_like(mask_NU, -1, dtype=torch.long)
    return Turns(turn_NT, mask_NU, reward_NU, state_NU)


def runs(mask_NT: Tensor) -> Tensor:
    """The number of each run of True, counted from 0; -1 between them.

    >>> runs(torch.tensor([[False, True, True, False, True]])).tolist()
    [[-1, 0, 0, -1, 1]]
    """
    before_NT = torch.nn.functional.pad(mask_NT[:, :-1], (1, 0), value=False)
    run_NT = (mask_NT & ~before_NT).long().cumsum(1) - 1
    return torch.where(mask_NT, run_NT, -1)


def over_tokens(value_NU: Tensor, turn_NT: Tensor) -> Tensor:
    """One number per turn on each of its tokens, 0 elsewhere.

    >>> over_tokens(torch.tensor([[2.0, 3.0]]), torch.tensor([[0, -1, 1, 1]])).tolist()
    [[2.0, 0.0, 3.0, 3.0]]
    """
    value_NT = value_NU.gather(1, turn_NT.clamp_min(0))
    return torch.where(turn_NT >= 0, value_NT, 0)


def returns(reward_NU: Tensor, discount: float = 1.0) -> Tensor:
    """The return from each turn on: Q_u = r_u + discount * Q_(u+1).

    >>> returns(torch.tensor([[1.0, 0.0, 2.0]]), discount=0.5).tolist()
    [[1.5, 1.0, 2.0]]
    """
    out_NU = reward_NU.clone()
    for turn in range(reward_NU.shape[1] - 2, -1, -1):
        out_NU[:, turn] += discount * out_NU[:, turn + 1]
    return out_NU
