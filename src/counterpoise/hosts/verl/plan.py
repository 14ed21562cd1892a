"""The order of a verl batch: which rollouts share an update, laid out as verl cuts a batch.

Rollouts go by their keys in verl's queue, <prompt>_<session>_<output>.

verl gives each data-parallel rank one contiguous part of the batch, and each rank cuts its part
into contiguous mini-batches. So update k is made of the k-th piece of every rank's part: the order
is rank by rank, in each rank update by update. Every update has the same number of rows; fillers
(rows that verl appends, without a response token) take the places that a plan leaves free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.hosts.verl.method import PREFIX, Setup
from counterpoise.plans.audit import plan_metrics
from counterpoise.types import TokenBatch

Updates = list[list[str]]


class Rollouts(NamedTuple):
    """What a plan looks at: row k of ``batch`` has prompt, reward and length of the k-th key."""

    keys: list[str]
    batch: TokenBatch


def rollouts(
    keys: list[str], reward_N: Tensor, length_N: Tensor, success_N: Tensor | None = None
) -> Rollouts:
    """Rollouts by prompt, prompts numbered in order of first appearance; the tokens are left out.

    >>> rollouts(["b_0_0", "a_0_0", "b_1_0"], torch.zeros(3), torch.ones(3)).batch.group_N.tolist()
    [0, 1, 0]
    """
    prompts = [key.rsplit("_", 2)[0] for key in keys]
    number = {prompt: k for k, prompt in enumerate(dict.fromkeys(prompts))}
    length_N = length_N.clamp(min=1)
    mask_NT = torch.arange(int(length_N.max())) < length_N[:, None]
    batch = TokenBatch(
        token_ids_NT=torch.zeros((), dtype=torch.long).expand(mask_NT.shape),
        mask_NT=mask_NT,
        group_N=torch.tensor([number[prompt] for prompt in prompts]),
        reward_N=reward_N,
        sampler_logp_NT=torch.zeros(()).expand(mask_NT.shape),
        success_N=success_N,
    )
    return Rollouts(keys, batch)


def plan_updates(setup: Setup, rollouts: Rollouts, num_updates: int, batch_number: int) -> Updates:
    """The keys of each update, as the method plans."""
    plan = setup.method.plan(rollouts.batch, num_updates, setup.seed, batch_number)
    return [[rollouts.keys[row] for row in row_R.tolist()] for row_R in plan]


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
    """The keys of each rank, update by update.

    ``cut(workloads, num_ranks)`` shares one update out evenly, as positions in it.

    >>> by_rank([["a", "b"], ["c", "d"]], dict.fromkeys("abcd", 1), 2, lambda *_: [[1], [0]])
    [['b', 'd'], ['a', 'c']]
    """
    parts = [cut([workload[key] for key in update], num_ranks) for update in updates]
    return [
        [update[at] for update, part in zip(updates, parts) for at in part[rank]]
        for rank in range(num_ranks)
    ]


def metrics(updates: Updates, rollouts: Rollouts) -> dict[str, float]:
    """What of each prompt meets in one update, to log; fillers are not counted."""
    number = {key: k for k, key in enumerate(rollouts.keys)}
    rows = [[number[key] for key in update if key in number] for update in updates]
    numbers = plan_metrics([torch.tensor(row) for row in rows if row], rollouts.batch)
    return {f"{PREFIX}{name}": value for name, value in numbers.items()}
