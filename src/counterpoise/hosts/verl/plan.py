"""The order of a verl batch: which rollouts share an update, laid out as verl cuts a batch.

Rollouts go by their keys in verl's queue.

verl gives each data-parallel rank one contiguous part of the batch, and each rank cuts its part
into contiguous mini-batches. So update k is made of the k-th piece of every rank's part:
the order is rank by rank, in each rank step by step. Every update has the same number of rows;
fillers (rows that verl appends, without a response token) take the places that a plan leaves free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.hosts.verl.method import Setup
from counterpoise.maths.reduce import seeded_generator
from counterpoise.plans import audit
from counterpoise.stage import call
from counterpoise.types import TokenBatch

Updates = list[list[str]]


class Rollouts(NamedTuple):
    """What a plan looks at."""

    keys: list[str]
    reward_N: Tensor
    length_N: Tensor

    @property
    def group_N(self) -> Tensor:
        """Numbers of the prompts, in order of first appearance; verl's keys are
        <prompt>_<session>_<output>.

        >>> Rollouts(["b_0_0", "a_0_0", "b_1_0"], torch.zeros(3), torch.ones(3)).group_N.tolist()
        [0, 1, 0]
        """
        prompts = [key.rsplit("_", 2)[0] for key in self.keys]
        number = {prompt: k for k, prompt in enumerate(dict.fromkeys(prompts))}
        return torch.tensor([number[prompt] for prompt in prompts])


def make_plan(made: Setup, rollouts: Rollouts, num_updates: int, update: int) -> Updates:
    """The keys of each update; ``update`` is verl's global step, from which random draws are
    derived.
    """
    group_N, reward_N, length_N = rollouts.group_N, rollouts.reward_N, rollouts.length_N
    generator = seeded_generator(made.seed, update, "plan")
    rows = call(
        made.method.planner,
        group_N,
        reward_N,
        length_N,
        num_updates=num_updates,
        generator=generator,
    )
    return [[rollouts.keys[row] for row in row_R.tolist()] for row_R in rows]


def fill_updates(updates: Sequence[Sequence[str]], fillers: Sequence[str], size: int) -> Updates:
    """Updates of exactly ``size`` rows.

    Rows beyond it move to the updates that have room, which splits a prompt; fillers take the rest.

    >>> fill_updates([["a", "b", "c"], ["d"]], ["x", "y"], 3)
    [['a', 'b', 'c'], ['d', 'x', 'y']]
    >>> fill_updates([["a", "b", "c"], ["d"]], [], 2)
    [['a', 'b'], ['d', 'c']]
    """
    total = sum(map(len, updates)) + len(fillers)
    if total != size * len(updates):
        raise ValueError(
            f"fill_updates: {total} rows do not make {len(updates)} updates of {size}."
        )
    spare = [key for update in updates for key in update[size:]] + list(fillers)
    out = [list(update[:size]) for update in updates]
    for update in out:
        while len(update) < size:
            update.append(spare.pop(0))
    return out


def by_rank(
    updates: Updates,
    workload: Mapping[str, int],
    num_ranks: int,
    cut: Callable[[list[int], int], Sequence[Sequence[int]]],
) -> list[list[str]]:
    """The keys of each rank, step by step; ``cut(workloads, num_ranks)`` shares one update out
    evenly, as positions in it.

    >>> by_rank([["a", "b"], ["c", "d"]], dict.fromkeys("abcd", 1), 2, lambda work, num_ranks: [[1], [0]])
    [['b', 'd'], ['a', 'c']]
    """
    parts = [cut([workload[key] for key in update], num_ranks) for update in updates]
    return [
        [update[at] for update, part in zip(updates, parts) for at in part[rank]]
        for rank in range(num_ranks)
    ]


def plan_numbers(updates: Updates, rollouts: Rollouts) -> dict[str, float]:
    """What of each prompt meets in one update, to log; fillers are not counted."""
    one_N1, number = (
        torch.ones(len(rollouts.keys), 1),
        {key: k for k, key in enumerate(rollouts.keys)},
    )
    batch = TokenBatch(one_N1.long(), one_N1.bool(), rollouts.group_N, rollouts.reward_N, -one_N1)
    rows = [[number[key] for key in update if key in number] for update in updates]
    seen = audit([torch.tensor(update) for update in rows if update], batch)
    return {
        "counterpoise/plan/pairs_kept": seen.pairs_kept,
        "counterpoise/plan/prompts_split_frac": seen.prompts_split_frac,
        "counterpoise/plan/positive_frac_lowest": min(seen.positive_frac),
        "counterpoise/plan/positive_frac_highest": max(seen.positive_frac),
        "counterpoise/plan/rows_left_out": float(seen.num_left_out),
    }
