"""Estimators that divide by the spread of the whole batch, over all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.advantages.group import as_float, centre, group_rewards
from counterpoise.maths.reduce import LOCAL, Reduce
from counterpoise.stage import Stage, declare


@Stage
def batch_whitened(reward_N: Tensor, group_N: Tensor, *, reduce: Reduce = LOCAL) -> Tensor:
    """A = (R - mean of the batch) / unbiased std of the batch; works with one rollout a prompt.

    A batch whose rewards are all equal gets exactly 0; a batch of one rollout is an error.

    Args:
        reward_N: [N] rewards.
        group_N: [N] the prompt of each rollout; not read.
        reduce: pools the batch over ranks.

    >>> batch_whitened(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0, 1, 2])).tolist()
    [1.0, -1.0, 0.0]

    Reference: REINFORCE++, arXiv 2501.03262. Departs from the paper's code, which whitens over
        tokens, so that long rollouts count more
    in mean and std: here every rollout counts once.
    """
    reward_N = as_float(reward_N)
    count = _batch_size("batch_whitened", reward_N, reduce)
    if _is_constant(reward_N, reduce):
        return torch.zeros_like(reward_N)
    centred_N = reward_N - reduce.sum(reward_N.sum()) / count
    return centred_N / _std(centred_N, count, reduce)


@declare(needs_groups=True)
def group_mean_batch_std(reward_N: Tensor, group_N: Tensor, *, reduce: Reduce = LOCAL) -> Tensor:
    """A = (R - m) / unbiased std of R - m over the batch, m the group's mean.

    Constant groups get exactly 0 and count in the std; if every group is constant all advantages
    are 0.

    Args:
        reward_N: [N] rewards.
        group_N: [N] the prompt of each rollout.
        reduce: pools the batch over ranks.

    >>> group_mean_batch_std(
    ...     torch.tensor([4.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ...     torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 1]),
    ... ).tolist()
    [2.0, -2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]

    Reference: REINFORCE++-baseline, arXiv 2501.03262. Departs from the paper's code as
        ``batch_whitened`` does.
    """
    reward_N, by_prompt = group_rewards("group_mean_batch_std", reward_N, group_N)
    centred_N = centre(reward_N, by_prompt)
    std = _std(centred_N, _batch_size("group_mean_batch_std", reward_N, reduce), reduce)
    return centred_N / torch.where(std > 0, std, 1)


def _batch_size(name: str, reward_N: Tensor, reduce: Reduce) -> Tensor:
    count = reduce.sum(reward_N.new_tensor(len(reward_N)))
    if count < 2:
        raise ValueError(
            f"{name} divides by the spread of the batch, but the batch has one rollout. Sample"
            " more, or use signs."
        )
    return count


def _is_constant(reward_N: Tensor, reduce: Reduce) -> bool:
    ends = reduce.cat(torch.stack(reward_N.aminmax()))
    return bool(ends.min() == ends.max())


def _std(centred_N: Tensor, count: Tensor, reduce: Reduce) -> Tensor:
    return (reduce.sum(centred_N.square().sum()) / (count - 1)).sqrt()
