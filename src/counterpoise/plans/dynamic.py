"""Dynamic sampling: prompts whose rollouts differ, until the batch is full of them.

Reference: DAPO, arXiv 2503.14476, Eq. 11; the details are those of the authors' recipe for verl."""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.errors import ConfigError, check_choice, check_whole
from counterpoise.maths.reduce import groups
from counterpoise.plans.orders import check_updates, random_rows
from counterpoise.rollouts import RolloutBatch
from counterpoise.stage import SUCCESS, Sampler, Stage, call, declare

METRICS = ("success", "reward")


def _fills(*, max_rounds: int) -> bool:
    return max_rounds > 1


def _keeps_prompts(*, order: Stage) -> bool:
    return order.has("keeps_prompts_whole")


def _drops_rollouts(*, order: Stage) -> bool:
    return order.has("drops_rollouts")


def is_mixed(group_N: Tensor, value_N: Tensor) -> Tensor:
    """True for rollouts of a prompt whose values are not all equal, [N]; a prompt with one rollout
    counts as mixed.

    >>> is_mixed(torch.tensor([0, 0, 1, 1, 2]), torch.tensor([1, 0, 1, 1, 0])).tolist()
    [True, True, False, False, True]
    """
    by_prompt = groups(group_N)
    is_alone_N = (by_prompt.size_P == 1)[by_prompt.index_N]
    return is_alone_N | ~by_prompt.is_constant(value_N * 1.0)  # a bool has no infinity


def fill_with_mixed(
    rollouts: RolloutBatch, sampler: Sampler, *, metric: str, max_rounds: int
) -> RolloutBatch:
    """Sample round after round, the policy frozen, until as many prompts are mixed as the batch
    has; what comes after the last of them is dropped.
    """
    size = len(rollouts.prompts)
    for _ in range(max_rounds - 1):
        if len(_mixed_prompts(rollouts, metric)) >= size:
            break
        rollouts = rollouts.join(sampler.more())
    mixed = _mixed_prompts(rollouts, metric)
    if len(mixed) < size:
        num = len(rollouts.prompts)
        raise ConfigError(
            f"dynamic_sampling: {max_rounds} rounds gave {len(mixed)} of {size} prompts whose"
            f" rollouts differ in {metric} ({num} sampled). The prompts are too easy or too hard:"
            " take others, lower rollouts.prompts, or raise max_rounds."
        )
    return _first_prompts(rollouts, mixed[size - 1] + 1)


def _mixed_prompts(rollouts: RolloutBatch, metric: str) -> list[int]:
    batch = rollouts.batch
    value_N = batch.is_success_N if metric == "success" else batch.reward_N
    return batch.group_N[is_mixed(batch.group_N, value_N)].unique().tolist()


def _first_prompts(rollouts: RolloutBatch, num: int) -> RolloutBatch:
    if num == len(rollouts.prompts):
        return rollouts
    rows = (rollouts.batch.group_N < num).nonzero().flatten().tolist()
    return rollouts.select(rows)._replace(prompts=rollouts.prompts[:num])


@declare(
    keeps_prompts_whole=_keeps_prompts,
    drops_rollouts=_drops_rollouts,
    collect=fill_with_mixed,
    samples_more=_fills,
    reads_success=True,
)
def dynamic_sampling(
    group_N: Tensor,
    reward_N: Tensor,
    length_N: Tensor,
    *,
    num_updates: int,
    generator: torch.Generator | None = None,
    success_N: Tensor | None = None,
    order: Stage = random_rows,
    metric: str = "success",
    max_rounds: int = 10,
) -> list[Tensor]:
    """Prompts that were solved by all of their rollouts, or by none, are left out of the updates;
    ``order`` cuts the rest.

    Where the trainer lets a method sample more, further rounds of prompts are sampled until the
    batch has as many mixed prompts as one round has prompts; surplus prompts are dropped in the
    order of the stream. The prompts left out stay in the batch: they are graded, shown and counted
    in the metrics, and rules that take statistics over the batch see them.

    Args:
        group_N: [N] the prompt of each rollout; one with a single rollout stays.
        reward_N: [N] rewards.
        length_N: [N] response tokens.
        num_updates: updates.
        generator: for ``order``.
        success_N: [N] the successes, from the batch; None: reward >= 0.5.
        order: the plan that cuts the prompts that stay; where they are too few to cut, that of all
            rows.
        metric: what must differ over a prompt's rollouts: "success", which a penalty in the reward
            does not change, or "reward".
        max_rounds: most rounds of sampling for one batch; fewer mixed prompts than the batch needs
            are then an error. 1 samples nothing more and leaves constant prompts out.

    >>> group_N, reward_N = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([1.0, 0, 1, 1, 0, 1])
    >>> [
    ...     update.tolist()
    ...     for update in dynamic_sampling(group_N, reward_N, torch.ones(6), num_updates=1)
    ... ]
    [[0, 1, 4, 5]]

    Reference: DAPO, arXiv 2503.14476, Eq. 11. Departs from the authors' code, in which a round has
        three times the prompts of a batch: here it has as many.
    """
    check_choice("dynamic_sampling", METRICS, metric=metric)
    check_whole("dynamic_sampling", least=1, max_rounds=max_rounds)
    is_success_N = reward_N >= SUCCESS if success_N is None else success_N
    value_N = is_success_N if metric == "success" else reward_N
    row_R = is_mixed(group_N, value_N).nonzero().flatten()
    if len(group_N[row_R].unique()) < num_updates:
        row_R = torch.arange(len(group_N), device=group_N.device)
    check_updates("dynamic_sampling", num_updates, len(row_R), "rollouts")
    columns = group_N[row_R], reward_N[row_R], length_N[row_R]
    offers = {"num_updates": num_updates, "generator": generator, "success_N": is_success_N[row_R]}
    return [row_R[pick_R] for pick_R in call(order, *columns, **offers)]
