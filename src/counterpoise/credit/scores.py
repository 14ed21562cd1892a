"""Rules that read a score of the state after each turn, which is no part of the reward.

phi_iu is the score after turn u of rollout i; a turn may have none (NaN). They come first in a
chain and replace the credit that arrives.

Axes as in ``types``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.advantages.group import as_float
from counterpoise.credit.turns import OVER, against_others, centre
from counterpoise.errors import check_choice, check_number
from counterpoise.maths.reduce import LOCAL, Reduce, masked_mean
from counterpoise.maths.turns import over_tokens, returns, turns
from counterpoise.stage import declare
from counterpoise.types import TokenBatch

START = "start_score_N"  # the extra column of scores before the first turn


def _scored(
    before_NT: Tensor, after_NT: Tensor, batch: TokenBatch, *, reduce: Reduce = LOCAL
) -> dict[str, Tensor]:
    """Share of turns that have a score."""
    has_NU = ~batch.column("turn_score_NU").isnan()
    return {"scored_frac": masked_mean(has_NU.to(before_NT.dtype), turns(batch).mask_NU, reduce)}


@declare(needs="turn_score_NU", report=_scored, assigns_turns=True)
def turn_credit(
    credit_NT: Tensor, batch: TokenBatch, *, discount: float = 0.9, beta: float = 1.0
) -> Tensor:
    """What a score gained, smeared backwards over the turns that led to it.

    d_u = phi_u - the score before it, 0 at the first score and without one
    c_u = d_u / (1 + discount + .. + discount^u) + discount c_{u+1}
    credit'_iu = A_i + beta (c_iu - mean c_i), A = R + sum d - its mean over the prompt's rollouts

    The c of a rollout add up to its d; mean c_i is over its tokens, so that the mean credit of a
    rollout stays A_i. Without scores, or with ``beta = 0``, credit' = A.

    Args:
        credit_NT: [N, T]; not read.
        batch: reads its turns, their scores and reward_N.
        discount: in [0, 1].
        beta: >= 0.

    Reference: turn_credit, PrimeIntellect-ai/prime-rl#3282.

    >>> batch = TokenBatch.from_lists(
    ...     [[5, 6, 7, 8]],
    ...     group=[0],
    ...     reward=[1.0],
    ...     sampler_logp=[[-1.0] * 4],
    ...     turn_NT=torch.tensor([[0, 1, 2, 3]]),
    ...     turn_score_NU=torch.tensor([[1.0, 3.0, torch.nan, 2.0]]),
    ... )
    >>> turn_credit(torch.zeros(1, 4), batch, discount=0.5)
    tensor([[ 0.3500,  0.9500, -0.5167, -0.7833]])
    """
    check_number("turn_credit", least=0, most=1, discount=discount)
    check_number("turn_credit", least=0, beta=beta)
    played, reward_N = turns(batch), as_float(batch.reward_N)
    gain_NU = gains(batch.column("turn_score_NU"), played.mask_NU).to(reward_N.dtype)
    smear_NT = over_tokens(smear(gain_NU, discount), played.turn_NT)
    mean_N1 = smear_NT.sum(1, keepdim=True) / batch.length_N[:, None].to(smear_NT.dtype)
    row_N = torch.arange(len(reward_N), device=reward_N.device)
    advantage_N = centre(reward_N + gain_NU.sum(1), batch.group_N, row_N, exclude_own=False)
    out_NT = advantage_N[:, None] + beta * (smear_NT - mean_N1)
    return torch.where(batch.mask_NT, out_NT, 0).to(credit_NT.dtype)


@declare(needs="turn_score_NU", report=_scored, assigns_turns=True)
def information_gain(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    weight: float = 1.0,
    over: str = "alive",
    discount: float = 1.0,
) -> Tensor:
    """``turn_baseline`` on rewards to which each turn but the last adds what its score gained.

    r'_iu = r_iu + weight (phi_iu - phi_i(u-1)) for u < K_i - 1, r'_iu = r_iu for the last turn

    The score is the probability of the right answer, forced after the turn. Unbiased for the sum
    of r', which is R and what the probability had risen to before the last turn; biased for R.

    Args:
        credit_NT: [N, T]; not read.
        batch: reads its turns, their rewards and scores; the score before the first turn is
            ``extra["start_score_N"]``, else 0. It is one number for all rollouts of a prompt and
            falls out where every first turn has a score.
        weight: >= 0; 0 is ``turn_baseline``.
        over, discount: as for ``turn_baseline``.

    Reference: IGPO, arXiv 2510.14967. Departs from its code, which subtracts the mean return of the
        group's tokens at the same position, of whatever turn they are.

    >>> batch = TokenBatch.from_lists(
    ...     [[5, 6, 7], [5, 6, 7]],
    ...     group=[0, 0],
    ...     reward=[0.5, 0.0],
    ...     sampler_logp=[[-1.0] * 3] * 2,
    ...     turn_NT=torch.tensor([[0, 1, 2]] * 2),
    ...     turn_score_NU=torch.tensor([[0.3, 0.6, 0.6], [0.1, 0.1, 0.1]]),
    ... )
    >>> information_gain(torch.zeros(2, 3), batch)
    tensor([[ 1.0000,  0.8000,  0.5000],
            [-1.0000, -0.8000, -0.5000]])
    """
    check_number("information_gain", least=0, weight=weight)
    check_number("information_gain", least=0, most=1, discount=discount)
    check_choice("information_gain", OVER, over=over)
    played = turns(batch)
    start_N = batch.extra.get(START, torch.zeros_like(batch.reward_N))
    gain_NU = gains(batch.column("turn_score_NU"), played.mask_NU, start_N)
    is_before_NU = played.mask_NU & torch.nn.functional.pad(played.mask_NU[:, 1:], (0, 1))
    reward_NU = as_float(played.reward_NU) + weight * torch.where(is_before_NU, gain_NU, 0)
    shaped = played._replace(reward_NU=reward_NU)
    advantage_NU = against_others(shaped, batch.group_N, discount, over, exclude_own=True)
    return over_tokens(advantage_NU, played.turn_NT).to(credit_NT.dtype)


def gains(score_NU: Tensor, mask_NU: Tensor, start_N: Tensor | None = None) -> Tensor:
    """What each score adds to the one before it; 0 without a score, and at the first one if there
    is no ``start_N``.

    >>> gains(torch.tensor([[1.0, 3.0, torch.nan, 2.0]]), torch.ones(1, 4).bool()).tolist()
    [[0.0, 2.0, 0.0, -1.0]]
    """
    has_NU = mask_NU & ~score_NU.isnan()
    last_N = score_NU.new_full((len(score_NU),), torch.nan) if start_N is None else start_N
    out_NU = torch.zeros_like(score_NU)
    for turn in range(score_NU.shape[1]):
        has_N, score_N = has_NU[:, turn], score_NU[:, turn]
        out_NU[:, turn] = torch.where(has_N & ~last_N.isnan(), score_N - last_N, 0)
        last_N = torch.where(has_N, score_N, last_N)
    return out_NU


def smear(gain_NU: Tensor, discount: float) -> Tensor:
    """c_u = d_u / (1 + discount + .. + discount^u) + discount c_{u+1}; keeps the sum.

    >>> smear(torch.tensor([[0.0, 0.0, 3.0]]), discount=1.0).tolist()
    [[1.0, 1.0, 1.0]]
    """
    power_U = torch.full_like(gain_NU[0], discount).pow(
        torch.arange(gain_NU.shape[1], device=gain_NU.device)
    )
    return returns(gain_NU / power_U.cumsum(0), discount)
