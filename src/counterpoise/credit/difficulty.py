"""Rules that weight whole groups by how hard their prompt is."""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.errors import check_number
from counterpoise.maths.reduce import LOCAL, Reduce, groups
from counterpoise.stage import declare
from counterpoise.types import TokenBatch


def _solve_rates(
    before_NT: Tensor, after_NT: Tensor, batch: TokenBatch, *, reduce: Reduce = LOCAL
) -> dict:
    is_solved_N = batch.is_success_N.to(before_NT.dtype)
    return {
        "solve_rate": (
            reduce.sum(is_solved_N.sum())
            / reduce.sum(torch.tensor(float(len(is_solved_N)), device=before_NT.device))
        )
    }


@declare(report=_solve_rates, reads_rewards_only=True, reads_success=True)
def focal(credit_NT: Tensor, batch: TokenBatch, *, gamma: float = 1.0) -> Tensor:
    """Learn less from prompts that are already solved.

    credit' = credit (1 - m)^gamma, m the share of successes among the group's rollouts

    Keeps the sign, not the mass (it can only fall). ``gamma = 0`` changes nothing; it is FADE's
    factor with gamma = alpha - 1.

    Args:
        credit_NT: [N, T].
        gamma: >= 0.

    Reference: F-GRPO, arXiv 2602.06717, g(x) = (1 - mu)^gamma. Reads mu as the share of correct
        rollouts, not the mean reward; for rewards
    of 0 and 1 they are the same.

    >>> batch = TokenBatch.from_lists(
    ...     [[1], [2], [3], [4]],
    ...     group=[0] * 4,
    ...     reward=[1.0, 1.0, 1.0, 0.0],
    ...     sampler_logp=[[-1.0]] * 4,
    ... )
    >>> focal(torch.ones(4, 1), batch).flatten().tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    check_number("focal", least=0, gamma=gamma)
    by = groups(batch.group_N)
    solve_rate_P = by.mean(batch.is_success_N.to(credit_NT.dtype))
    return credit_NT * ((1 - solve_rate_P) ** gamma)[by.index_N, None]
