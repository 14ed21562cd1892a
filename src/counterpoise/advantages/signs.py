"""Advantages that look at one rollout alone: success or failure, or at none.

They work with one rollout a prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.advantages.group import as_float
from counterpoise.errors import check_number
from counterpoise.stage import SUCCESS, declare


@declare(reads_success=True)
def signs(reward_N: Tensor, group_N: Tensor, *, success_N: Tensor | None = None) -> Tensor:
    """A = +1 for a success, else -1.

    Args:
        reward_N: [N] rewards.
        group_N: [N] the prompt of each rollout; not read.
        success_N: [N] which rollouts are successes, from the batch; None: reward >= 0.5.

    >>> signs(torch.tensor([1.0, 0.4, 0.0]), torch.tensor([0, 1, 2])).tolist()
    [1.0, -1.0, -1.0]

    Reference: arXiv 2506.01347 (rewards of +1 and -1).
    """
    return _sides(reward_N, success_N, positive=1.0, negative=1.0)


@declare(reads_success=True)
def positives_only(reward_N: Tensor, group_N: Tensor, *, success_N: Tensor | None = None) -> Tensor:
    """A = 1 for a success, else 0 (positive sample reinforcement). Arguments as for ``signs``.

    >>> positives_only(torch.tensor([1.0, 0.0]), torch.tensor([0, 0])).tolist()
    [1.0, 0.0]

    Reference: PSR, arXiv 2506.01347.
    """
    return _sides(reward_N, success_N, positive=1.0, negative=0.0)


@declare(reads_success=True)
def negatives_only(reward_N: Tensor, group_N: Tensor, *, success_N: Tensor | None = None) -> Tensor:
    """A = 0 for a success, else -1 (negative sample reinforcement). Arguments as for ``signs``.

    >>> negatives_only(torch.tensor([1.0, 0.0]), torch.tensor([0, 0])).tolist()
    [0.0, -1.0]

    Reference: NSR, arXiv 2506.01347.
    """
    return _sides(reward_N, success_N, positive=0.0, negative=1.0)


@declare(reads_success=True)
def weighted_signs(
    reward_N: Tensor, group_N: Tensor, *, positive: float = 0.1, success_N: Tensor | None = None
) -> Tensor:
    """A = positive for a success, else -1. positive = 1 is ``signs``, positive = 0 is
    ``negatives_only``.

    Args:
        reward_N: [N] rewards.
        group_N: [N] the prompt of each rollout; not read.
        positive: the paper's lambda, >= 0.
        success_N: [N] which rollouts are successes, from the batch; None: reward >= 0.5.

    >>> weighted_signs(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), positive=0.25).tolist()
    [0.25, -1.0]

    Reference: W-REINFORCE, arXiv 2506.01347.
    """
    check_number("weighted_signs", least=0, positive=positive)
    return _sides(reward_N, success_N, positive=float(positive), negative=1.0)


def successes(reward_N: Tensor, success_N: Tensor | None) -> Tensor:
    """The successes that a caller offers; without an offer, reward >= ``SUCCESS``."""
    return reward_N >= SUCCESS if success_N is None else success_N


def _sides(
    reward_N: Tensor, success_N: Tensor | None, *, positive: float, negative: float
) -> Tensor:
    reward_N = as_float(reward_N)
    # 0 - negative: a side that is switched off is 0.0, never -0.0
    return torch.where(
        successes(reward_N, success_N),
        reward_N.new_tensor(positive),
        reward_N.new_tensor(0 - negative),
    )


@declare(ignores_rewards=True)
def constant(reward_N: Tensor, group_N: Tensor, *, value: float = -1.0) -> Tensor:
    """A = value for every rollout: rewards are not read.

    For methods whose credit comes from the tokens alone, such as OPSA.

    Args:
        reward_N: [N] rewards; not read.
        group_N: [N] the prompt of each rollout; not read.
        value: the number; not 0, which would teach nothing.

    >>> constant(torch.tensor([1.0, 0.0]), torch.tensor([0, 0])).tolist()
    [-1.0, -1.0]
    """
    check_number("constant", value=value)
    if value == 0:
        raise ValueError("constant: value must not be 0: no token would have credit, got 0.")
    return torch.full_like(as_float(reward_N), value)
