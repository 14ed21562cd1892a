"""A conversation small enough that every group of rollouts can be counted: expectations are exact.

In each turn the policy goes on or stops; the last turn has two actions and ends. A turn is two
tokens, the choice and a stop token that is certain; the environment replies with one token.

Axes: N rollouts, U turns, M paths (ways to play an episode), G rollouts of a group.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

import counterpoise as cp

STOP, GO, END, REPLY = 1, 2, 3, 4


class Game(NamedTuple):
    """``go_U`` is the probability of going on in each turn (of the second action in the last),
    ``stop_reward_U`` and ``go_reward_U`` what the two actions bring at once.
    """

    go_U: tuple[float, ...]
    stop_reward_U: tuple[float, ...]
    go_reward_U: tuple[float, ...]

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """Every way to play: the actions of its turns."""
        last = len(self.go_U) - 1
        early = [(GO,) * turn + (STOP,) for turn in range(last)]
        return [*early, (GO,) * last + (STOP,), (GO,) * last + (GO,)]

    def rewards(self, path: tuple[int, ...]) -> list[float]:
        return [
            (self.go_reward_U if action == GO else self.stop_reward_U)[turn]
            for turn, action in enumerate(path)
        ]

    def probability(self, path: tuple[int, ...]) -> float:
        chance = 1.0
        for action, go in zip(path, self.go_U):
            chance *= go if action == GO else 1 - go
        return chance

    def scores(self, path: tuple[int, ...]) -> list[float]:
        """Gradient of the log-prob of each action by the logit of going on in its turn."""
        return [1 - go if action == GO else -go for action, go in zip(path, self.go_U)]


# three turns: the gradient is .94 .19 .19
THREE = Game((0.5, 0.5, 0.5), (0.0, 2.0, 1.0), (1.0, 1.0, 4.0))
UNEVEN = Game((0.3, 0.6, 0.8), (0.5, -1.0, 0.25), (0.0, 2.0, -3.0))
# going on brings one more reward of 1: the gradient of the first turn is 1/4
TWO = Game((0.5, 0.5), (1.0, 1.0), (1.0, 1.0))


def exact_gradient(game: Game) -> Tensor:
    """Gradient of the expected reward by the logit of each turn, in closed form: the chance to get
    there, times p (1 - p), times what going on is worth more than stopping.
    """
    value, gain_U = 0.0, []
    for go, stop_reward, go_reward in zip(*(reversed(column) for column in game)):
        more = go_reward + value - stop_reward
        gain_U.insert(0, go * (1 - go) * more)
        value = stop_reward + go * more
    reach_U = torch.tensor([1.0, *game.go_U[:-1]], dtype=torch.float64).cumprod(0)
    return reach_U * torch.tensor(gain_U, dtype=torch.float64)


def every_group(game: Game, size: int) -> tuple[cp.TokenBatch, Tensor, Tensor]:
    """All groups of ``size`` rollouts as one batch, the probability of each, and the score of the
    choice at each token: [P] and [N, T].
    """
    groups = list(itertools.product(game.paths, repeat=size))
    rows = [path for group in groups for path in group]
    width = len(game.go_U)
    turn_NU = torch.tensor([[u if u < len(p) else -1 for u in range(width)] for p in rows])
    ids = [_pad([t for a in p for t in (a, END, REPLY)][:-1], 3 * width - 1) for p in rows]
    turn_NT = torch.stack([turn_NU, turn_NU, torch.full_like(turn_NU, -1)], 2).flatten(1)[:, :-1]
    score_NU = _floats([_pad(game.scores(path), width) for path in rows])
    score_NT = torch.stack([score_NU, *[torch.zeros_like(score_NU)] * 2], 2).flatten(1)[:, :-1]
    reward_NU = _floats([_pad(game.rewards(path), width) for path in rows])
    batch = cp.TokenBatch(
        token_ids_NT=torch.tensor(ids),
        mask_NT=turn_NT >= 0,
        group_N=torch.arange(len(groups)).repeat_interleave(size),
        reward_N=reward_NU.sum(1),
        sampler_logp_NT=torch.zeros(turn_NT.shape, dtype=torch.float64),
        turn_NT=turn_NT,
        turn_reward_NU=reward_NU,
        turn_mask_NU=turn_NU >= 0,
        state_NU=turn_NU,
    )
    chance_N = _floats([game.probability(path) for path in rows])
    return batch, chance_N.reshape(-1, size).prod(1), score_NT


def mean_gradient(game: Game, method: cp.Method, size: int = 3) -> Tensor:
    """What the credit of a method gives to the logit of each turn, in the mean over all groups."""
    batch, chance_P, score_NT = every_group(game, size)
    credit_NT = method.assign(batch).credit_NT
    by_turn_NU = (credit_NT * score_NT)[:, ::3]
    return (chance_P.repeat_interleave(size)[:, None] * by_turn_NU).sum(0) / size


def _pad(row: list, width: int) -> list:
    return row + [0] * (width - len(row))


def _floats(rows: list) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)
