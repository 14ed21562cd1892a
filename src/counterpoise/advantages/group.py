"""Estimators that compare a rollout with the others of its prompt.

Group: rewards R_1..R_G, mean m, unbiased std s.

All share two laws: a group whose rewards are all equal gets exactly 0, decided on rewards (rounding
leaves R - m != 0 for seven rewards of
0.7, and dividing by s + eps blows it up); a group of one is an error, nothing silently becomes 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.errors import check_number
from counterpoise.maths.reduce import Groups, groups
from counterpoise.stage import declare

WORK_ALONE = "batch_whitened, signs, positives_only, negatives_only, weighted_signs"


@declare(needs_groups=True)
def group_mean(reward_N: Tensor, group_N: Tensor) -> Tensor:
    """A = R - m.

    Args:
        reward_N: [N] rewards.
        group_N: [N] the prompt of each rollout.

    >>> group_mean(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 0])).tolist()
    [0.5, -0.5, -0.5, 0.5]

    Reference: Dr.GRPO, arXiv 2503.20783.
    """
    reward_N, by_prompt = group_rewards("group_mean", reward_N, group_N)
    return centre(reward_N, by_prompt)


@declare(needs_groups=True)
def group_zscore(reward_N: Tensor, group_N: Tensor, *, eps: float = 1e-4) -> Tensor:
    """A = (R - m) / (s + eps).

    Args:
        reward_N: [N] rewards.
        group_N: [N] the prompt of each rollout.
        eps: added to the standard deviation; 1e-4 is TRL's value.

    >>> group_zscore(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0, 0, 0]), eps=0.0).tolist()
    [1.0, -1.0, 0.0]

    Reference: GRPO, arXiv 2402.03300, Section 4.1.2. Reads the paper's std as the unbiased one and
        adds eps, as TRL and verl do.
    """
    check_number("group_zscore", least=0, eps=eps)
    reward_N, by_prompt = group_rewards("group_zscore", reward_N, group_N)
    std_N = by_prompt.std(reward_N)[by_prompt.index_N]
    is_constant_N = by_prompt.is_constant(reward_N)
    return centre(reward_N, by_prompt) / torch.where(is_constant_N, 1, std_N + eps)


@declare(needs_groups=True, is_unbiased=True)
def leave_one_out(reward_N: Tensor, group_N: Tensor) -> Tensor:
    """A_i = R_i - mean of the other rewards of the group = (R_i - m) G / (G - 1).

    Args:
        reward_N: [N] rewards.
        group_N: [N] the prompt of each rollout.

    >>> leave_one_out(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 0, 0])).tolist()
    [1.0, -0.5, -0.5]

    Reference: RLOO, arXiv 2402.14740.
    """
    reward_N, by_prompt = group_rewards("leave_one_out", reward_N, group_N)
    others_N = by_prompt.sum(reward_N)[by_prompt.index_N] - reward_N
    num_others_N = (by_prompt.size_P - 1)[by_prompt.index_N].to(reward_N.dtype)
    return torch.where(by_prompt.is_constant(reward_N), 0, reward_N - others_N / num_others_N)


@declare(needs_groups=True)
def max_rl(reward_N: Tensor, group_N: Tensor) -> Tensor:
    """A = (R - m) / m, and 0 where m = 0.

    Rewards are >= 0, so that m = 0 only where nothing was solved.

    Args:
        reward_N: [N] rewards, >= 0.
        group_N: [N] the prompt of each rollout.

    >>> max_rl(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 0])).tolist()
    [3.0, -1.0, -1.0, -1.0]

    Reference: MaxRL, arXiv 2602.02710. A negative mean would turn every sign around: that is an
        error here.
    """
    reward_N, by_prompt = group_rewards("max_rl", reward_N, group_N)
    if (reward_N < 0).any():
        first = int((reward_N < 0).nonzero()[0])
        raise ValueError(
            f"max_rl: rewards must be >= 0, got {float(reward_N[first])} at rollout {first}. Shift"
            " the rewards, or use group_mean."
        )
    mean_N = by_prompt.mean(reward_N)[by_prompt.index_N]
    return centre(reward_N, by_prompt) / torch.where(by_prompt.is_constant(reward_N), 1, mean_N)


def group_rewards(name: str, reward_N: Tensor, group_N: Tensor) -> tuple[Tensor, Groups]:
    """Rewards as float32 or wider, and their groups; a group of one is an error that names the
    estimators that work.
    """
    by_prompt = groups(group_N)
    is_alone_P = by_prompt.size_P == 1
    if is_alone_P.any():
        num_alone, num_prompts = int(is_alone_P.sum()), len(is_alone_P)
        raise ValueError(
            f"{name} compares the rollouts of one prompt, but {num_alone} of {num_prompts} prompts"
            " have only one rollout (G = 1). Sample two or more a prompt, or use an estimator that"
            f" works with one: {WORK_ALONE}."
        )
    return as_float(reward_N), by_prompt


def centre(reward_N: Tensor, by_prompt: Groups) -> Tensor:
    """R - m, exactly 0 in constant groups."""
    mean_N = by_prompt.mean(reward_N)[by_prompt.index_N]
    return torch.where(by_prompt.is_constant(reward_N), 0, reward_N - mean_N)


def as_float(reward_N: Tensor) -> Tensor:
    """float32 at least; integers and half precision are widened."""
    return reward_N.to(torch.promote_types(reward_N.dtype, torch.float32))
