"""A batch cut into updates by a plan, and what the plan gave checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from counterpoise.errors import is_ours
from counterpoise.maths.reduce import seeded_generator
from counterpoise.stage import Stage, call


def cut(
    plan: Stage,
    group_N: Tensor,
    reward_N: Tensor,
    length_N: Tensor,
    *,
    num_updates: int,
    generator: torch.Generator,
    success_N: Tensor,
) -> list[Tensor]:
    """The rows of each update; a result that no trainer could take is an error here."""
    offers = {"num_updates": num_updates, "generator": generator, "success_N": success_N}
    updates = call(plan, group_N, reward_N, length_N, **offers)
    _check_updates(plan, updates, len(group_N), num_updates)
    return list(updates)


def check_plan(plan: Stage, num_prompts: int, group_size: int, num_updates: int) -> None:
    """Cut a batch of these sizes, half of it successes: what the plan cannot do it says now."""
    num_rows, size = num_prompts * group_size, plan.settings.get("update_size") or 0
    if size * num_updates > num_rows:
        raise ValueError(
            f"{plan.name}: {num_updates} updates of update_size {size} need {size * num_updates}"
            f" rollouts, got {num_rows}. Lower update_size or sample more."
        )
    row_R = torch.arange(num_rows)
    is_success_N = row_R % 2 == 1
    columns = row_R // group_size, is_success_N.float(), torch.ones_like(row_R)
    generator = seeded_generator(0, 0, "plan")
    cut(plan, *columns, num_updates=num_updates, generator=generator, success_N=is_success_N)


def _check_updates(plan: Stage, updates: Any, num_rows: int, num_updates: int) -> None:
    name = f"plan {plan.name if is_ours(plan.fn) else f'{plan.fn.__module__}:{plan.name}'}"
    if not isinstance(updates, (list, tuple)):
        raise ValueError(
            f"{name} returned a {type(updates).__name__}, expected a list of {num_updates} tensors:"
            " the rows of each update."
        )
    if len(updates) != num_updates:
        raise ValueError(f"{name} returned {len(updates)} updates, expected {num_updates}.")
    for k, row_R in enumerate(updates):
        if not isinstance(row_R, Tensor) or row_R.dim() != 1 or row_R.dtype != torch.long:
            is_tensor = isinstance(row_R, Tensor)
            got = f"{row_R.dtype} {list(row_R.shape)}" if is_tensor else type(row_R).__name__
            raise ValueError(
                f"{name}: update {k} is a {got}, expected a torch.int64 tensor [R] with the numbers"
                " of its rollouts."
            )
        if len(row_R) == 0:
            raise ValueError(f"{name}: update {k} has no rollouts. Give each update one or more.")
    rows = torch.cat(list(updates))
    strange = rows[(rows < 0) | (rows >= num_rows)]
    if len(strange):
        raise ValueError(
            f"{name} gave rollout {int(strange[0])}, expected numbers from 0 to {num_rows - 1}."
        )
    twice = rows.bincount() > 1
    if twice.any():
        raise ValueError(
            f"{name} gave rollout {int(twice.nonzero()[0])} more than once. A rollout is in one"
            " update, once; optimizer.epochs goes through the updates again."
        )
