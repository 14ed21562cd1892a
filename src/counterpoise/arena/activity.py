"""Does a method do anything here? The cosine of its weight change over a batch with its control's,
on the same rollouts.

All arms start every batch from the control's weights and moments, so they sample the same rollouts;
after it they are set back to where the control went. Methods with memory see every batch of the
control's way. Arms that cannot share a stack take turns on one model.

Axes: S members (arms), P parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoise.arena.batch import train_batch
from counterpoise.arena.collect import Bench
from counterpoise.arena.member import Member
from counterpoise.catalogue.method import Method
from counterpoise.maths.many import copies, copy_, subtract_
from counterpoise.policy import REFERENCE, Policy
from counterpoise.rollouts import RolloutBatch
from counterpoise.tasks import task as make_task
from counterpoise.trainer.collect import APART, RolloutSampler, collect, measure_columns
from counterpoise.trainer.importance import COLUMN, score_tokens
from counterpoise.trainer.loop import load_policy, set_rate
from counterpoise.trainer.update import adamw, apply_update


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


class Point(NamedTuple):
    """Trained weights and the optimizer's memory, copied."""

    weights: list[Tensor]
    moments: dict[Any, dict[str, Any]]


def cosines_apart(
    members: Sequence[Member], num_batches: int, note: Callable[[], None]
) -> list[list[float]]:
    """``cosines`` of members that cannot share a stack, by the trainer's own update; the first of
    them is the control.
    """
    config, task = members[0].config, make_task(**members[0].config.task)
    policy, reference = load_policy(config, reader(members, REFERENCE))
    optimizer, out = adamw(policy.model, config.optimizer, config.seed), []
    needs = frozenset[str]().union(*(member.method.needs for member in members))
    for batch_number in range(num_batches):
        start = batch_number * config.rollouts.prompts
        sampler = RolloutSampler(policy, task, config, batch_number, start=start, needs=needs)
        collected = collect(members[0].method, sampler)
        collected = measure_columns(
            policy, members[0].method, config, collected, reference, also=needs - APART
        )
        scorer = reader(members, {COLUMN})
        collected, _ = score_tokens(policy, scorer, task, config, collected, batch_number)
        before, changes, row = point(policy, optimizer), [], []
        after = before
        for member in members:
            go_to_(policy, optimizer, before)
            update_once(policy, optimizer, member, collected, batch_number)
            change = copies(trained(policy))
            subtract_(change, before.weights)
            if not changes:
                changes, after = change, point(policy, optimizer)
            row.append(cosine_of(change, changes))
        go_to_(policy, optimizer, after)
        out.append(row)
        note()
    return out


def reader(members: Sequence[Member], columns: Collection[str]) -> Method:
    """The first method that reads one of these columns; the control's where none does."""
    methods = [member.method for member in members]
    return next((one for one in methods if one.needs.intersection(columns)), methods[0])


def update_once(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    member: Member,
    collected: RolloutBatch,
    batch_number: int,
) -> None:
    """All updates of a batch that is sampled already."""
    config, method, batch = member.config, member.method, collected.batch
    seed, settings = config.seed, config.optimizer
    credit = method.assign(batch, member.state, seed=seed, batch_number=batch_number)
    plan = method.plan(batch, settings.updates_per_batch, seed=seed, batch_number=batch_number)
    updates = plan.updates * settings.epochs
    for number, row_R in enumerate(updates, batch_number * len(updates)):
        set_rate(optimizer, config, number)
        rows = method.rows(batch, credit, row_R)
        apply_update(policy.model, optimizer, method, rows, collected, config)
    member.state = credit.state


def trained(policy: Policy) -> list[Tensor]:
    return [p.detach() for p in policy.model.parameters() if p.requires_grad]


def point(policy: Policy, optimizer: torch.optim.Optimizer) -> Point:
    return Point(copies(trained(policy)), memory_of(optimizer.state))


def go_to_(policy: Policy, optimizer: torch.optim.Optimizer, there: Point) -> None:
    copy_(trained(policy), there.weights)
    optimizer.state.clear()
    optimizer.state.update(memory_of(there.moments))


def memory_of(state: Mapping[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """A copy per parameter in its own precision, which ``load_state_dict`` would not keep."""
    return {p: copy.deepcopy(own) for p, own in state.items()}


def cosine_of(change: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The cosine of two changes of all weights; NaN where one is 0."""

    def product(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
        return sum((a.double() * b.double()).sum() for a, b in zip(left, right))  # pyright: ignore[reportReturnType]

    return float(product(change, other) / (product(change, change) * product(other, other)).sqrt())
