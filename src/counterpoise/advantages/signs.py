"""Advantages that look at one rollout alone: success is R > threshold.

They work with one rollout a prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.advantages.group import as_float
from counterpoise.errors import check_number
from counterpoise.stage import Stage


@Stage
def signs(reward_N: Tensor, group_N: Tensor, *, threshold: float = 0.5) -> Tensor:
    """A = +1 if R > threshold, else -1.

    Args:
        reward_N: [N] rewards.
        group_N: [N] the prompt of each rollout; not read.
        threshold: a reward above it is a success.

    >>> signs(torch.tensor([1.0, 0.5, 0.0]), torch.tensor([0, 1, 2])).tolist()
    [1.0, -1.0, -1.0]

    Reference: arXiv 2506.01347 (rewards of +1 and -1).
    """
    return _sides("signs", reward_N, threshold, positive=1.0, negative=1.0)


@Stage
def positives_only(reward_N: Tensor, group_N: Tensor, *, threshold: float = 0.5) -> Tensor:
    """A = 1 if R > threshold, else 0 (positive sample reinforcement). Arguments as for ``signs``.

    >>> positives_only(torch.tensor([1.0, 0.0]), torch.tensor([0, 0])).tolist()
    [1.0, 0.0]

    Reference: PSR, arXiv 2506.01347.
    """
    return _sides("positives_only", reward_N, threshold, positive=1.0, negative=0.0)


@Stage
def negatives_only(reward_N: Tensor, group_N: Tensor, *, threshold: float = 0.5) -> Tensor:
    """A = 0 if R > threshold, else -1 (negative sample reinforcement). Arguments as for ``signs``.

    >>> negatives_only(torch.tensor([1.0, 0.0]), torch.tensor([0, 0])).tolist()
    [0.0, -1.0]

    Reference: NSR, arXiv 2506.01347.
    """
    return _sides("negatives_only", reward_N, threshold, positive=0.0, negative=1.0)


@Stage
def weighted_signs(
    reward_N: Tensor, group_N: Tensor, *, positive: float = 0.1, threshold: float = 0.5
) -> Tensor:
    """A = positive if R > threshold, else -1. positive = 1 is ``signs``, positive = 0 is
    ``negatives_only``.

    Args:
        reward_N: [N] rewards.
        group_N: [N] the prompt of each rollout; not read.
        positive: the paper's lambda, >= 0.
        threshold: a reward above it is a success.

    >>> weighted_signs(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), positive=0.25).tolist()
    [0.25, -1.0]

    Reference: W-REINFORCE, arXiv 2506.01347.
    """
    check_number("weighted_signs", least=0, positive=positive)
    return _sides("weighted_signs", reward_N, threshold, positive=float(positive), negative=1.0)


def _sides(
    name: str, reward_N: Tensor, threshold: float, *, positive: float, negative: float
) -> Tensor:
    check_number(name, threshold=threshold)
    reward_N = as_float(reward_N)
    # 0 - negative: a side that is switched off is 0.0, never -0.0
    return torch.where(
        reward_N > threshold, reward_N.new_tensor(positive), reward_N.new_tensor(0 - negative)
    )
