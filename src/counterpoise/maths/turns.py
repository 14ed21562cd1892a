"""Turns of a batch: which tokens belong to one, its reward, its return.

A batch without turns is a batch of one turn, or of as many as its mask has runs (the tools of a
host): its reward came in the last.

Axes: N rollouts, T tokens, U turns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from counterpoise.maths.trie import prefix_nodes, row_mask
from counterpoise.types import Credit, TokenBatch


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
    before_NT = pad(mask_NT[:, :-1], (1, 0), value=False)
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


def by_turn(value_NT: Tensor, turn_NT: Tensor, num_turns: int) -> Tensor:
    """The number that all tokens of a turn share, 0 for a turn without tokens, [N, U].

    >>> by_turn(torch.tensor([[2.0, 0.0, 3.0, 3.0]]), torch.tensor([[0, -1, 1, 1]]), 3).tolist()
    [[2.0, 3.0, 0.0]]
    """
    place_NT = torch.where(turn_NT >= 0, turn_NT, num_turns)  # the last place is thrown away
    out_NU = value_NT.new_zeros(len(value_NT), num_turns + 1)
    return out_NU.scatter(1, place_NT, value_NT)[:, :num_turns]


def token_advantage(credit: Credit, batch: TokenBatch) -> Tensor:
    """The advantage that a token's sign goes by: of its turn where a rule tells turns apart, else
    of its rollout; [N, T] or [N, 1].
    """
    if credit.advantage_NU is None:
        return credit.advantage_N[:, None]
    return over_tokens(credit.advantage_NU, turns(batch).turn_NT)


def histories(batch: TokenBatch, turn_NT: Tensor, num_turns: int) -> Tensor:
    """A number for what was said before each turn, equal in a group for equal tokens; -1 for a
    turn without tokens, [N, U].

    >>> batch = TokenBatch.from_lists(
    ...     [[5, 8, 6], [5, 9, 6]], group=[0, 0], reward=[1.0, 0.0], sampler_logp=[[-1.0] * 3] * 2
    ... ).replace(mask_NT=torch.tensor([[True, False, True]] * 2))
    >>> histories(batch, turns(batch).turn_NT, 2).tolist()
    [[0, 2], [0, 3]]
    """
    node_NT = prefix_nodes(batch.token_ids_NT, row_mask(batch.mask_NT), batch.group_N).node_NT
    # the node of the token before, counted from 1; 0 is the start of the group
    before_NT = pad(node_NT[:, :-1] + 1, (1, 0))
    is_first_NT = turn_NT > pad(turn_NT.cummax(1).values[:, :-1], (1, 0), value=-1)
    first_NT = torch.where(is_first_NT, turn_NT, -1)
    return by_turn(before_NT + 1, first_NT, num_turns) - 1
