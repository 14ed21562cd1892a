"""FADE's advantage: hard prompts are damped by a power, failures divided by delta.

The controller of the same name moves both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.advantages.group import centre, group_rewards
from counterpoise.errors import check_number
from counterpoise.stage import declare


@declare(needs_groups=True)
def fade(reward_N: Tensor, group_N: Tensor, *, alpha: float = 1.0, delta: float = 1.0) -> Tensor:
    """A = (1 - m)^(alpha - 1) (R - m), and negative values are divided by delta; m is the prompt's
    solve rate. No std.

    The success mass of a prompt, the sum of its positive advantages over G, is m (1 - m)^alpha, the
    failure mass that over delta.
    (alpha, delta) = (1, 1) is ``group_mean``; other fixed values give its power and asymmetric
    variants.

    Args:
        reward_N: [N] rewards, 0 or 1.
        group_N: [N] the prompt of each rollout.
        alpha: the power, > 0.
        delta: divides negative advantages, > 0.

    >>> fade(
    ...     torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 0]), alpha=2.0, delta=0.5
    ... ).tolist()
    [0.25, -0.5, -0.5, 0.25]

    Reference: FADE, arXiv 2607.01490.
    """
    check_number("fade", above=0, alpha=alpha, delta=delta)
    reward_N, by_prompt = group_rewards("fade", reward_N, group_N)
    check_binary("fade", reward_N)
    failed_N = 1 - by_prompt.mean(reward_N)[by_prompt.index_N]
    # (1 - m) is 0 only in constant groups, where 0 to a negative power would make NaN of an
    # advantage of 0
    failed_N = torch.where(by_prompt.is_constant(reward_N), 1, failed_N)
    advantage_N = failed_N ** (alpha - 1) * centre(reward_N, by_prompt)
    return torch.where(advantage_N < 0, advantage_N / delta, advantage_N)


def check_binary(name: str, reward_N: Tensor) -> None:
    """FADE's solve rates are means of rewards 0 and 1."""
    other_N = (reward_N != 0) & (reward_N != 1)
    if other_N.any():
        first = int(other_N.nonzero()[0])
        raise ValueError(
            f"{name}: rewards must be 0 or 1, got {float(reward_N[first]):g} at rollout {first}. "
            "Grade to 0 or 1 (for example reward > 0.5), or use group_mean."
        )
