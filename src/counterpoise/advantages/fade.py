"""FADE's advantage: hard prompts are damped by a power, failures divided by delta.

The controller of the same name moves both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.advantages.group import centre, group_rewards
from counterpoise.advantages.signs import successes
from counterpoise.errors import check_number
from counterpoise.stage import declare


@declare(needs_groups=True, reads_success=True)
def fade(
    reward_N: Tensor,
    group_N: Tensor,
    *,
    alpha: float = 1.0,
    delta: float = 1.0,
    success_N: Tensor | None = None,
) -> Tensor:
    """A = (1 - m)^(alpha - 1) (S - m), and negative values are divided by delta; S is 1 for a
    success, else 0, and m the prompt's solve rate. No std.

    The success mass of a prompt, the sum of its positive advantages over G, is m (1 - m)^alpha, the
    failure mass that over delta.
    (alpha, delta) = (1, 1) is ``group_mean`` of rewards 0 and 1; other fixed values give its power
    and asymmetric variants.

    Args:
        reward_N: [N] rewards.
        group_N: [N] the prompt of each rollout.
        alpha: the power, > 0.
        delta: divides negative advantages, > 0.
        success_N: [N] which rollouts are successes, from the batch; None: reward >= 0.5.

    >>> fade(
    ...     torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 0]), alpha=2.0, delta=0.5
    ... ).tolist()
    [0.25, -0.5, -0.5, 0.25]

    Reference: FADE, arXiv 2607.01490.
    """
    check_number("fade", above=0, alpha=alpha, delta=delta)
    reward_N, by_prompt = group_rewards("fade", reward_N, group_N)
    solved_N = successes(reward_N, success_N).to(reward_N.dtype)
    failed_N = 1 - by_prompt.mean(solved_N)[by_prompt.index_N]
    # (1 - m) is 0 only in constant groups, where 0 to a negative power would make NaN of an
    # advantage of 0
    failed_N = torch.where(by_prompt.is_constant(solved_N), 1, failed_N)
    advantage_N = failed_N ** (alpha - 1) * centre(solved_N, by_prompt)
    return torch.where(advantage_N < 0, advantage_N / delta, advantage_N)
