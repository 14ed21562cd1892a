"""Rules that give each turn of a conversation one number, from the rewards of turns.

r_iu is the reward of turn u of rollout i, which plays the turns 0..K_i - 1; Q_iu = sum_{l>=u}
discount^(l-u) r_il is its return from there on. These rules replace the credit that arrives: it can
be other than 0 where all rewards of a prompt are equal. They come first in a chain.

A baseline may depend on the other rollouts and on the number of the turn; then it adds no bias. One
that depends on how many turns the rollout itself went on to play does (``turn_index_baseline``).

Axes as in ``types``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.advantages.group import as_float, group_zscore
from counterpoise.errors import check_choice, check_number
from counterpoise.maths.reduce import LOCAL, Reduce, groups, masked_mean
from counterpoise.maths.trie import pair_index
from counterpoise.maths.turns import Turns, over_tokens, returns, turns
from counterpoise.stage import declare
from counterpoise.types import TokenBatch

OVER = ("alive", "all")


def _alone(
    before_NT: Tensor, after_NT: Tensor, batch: TokenBatch, *, reduce: Reduce = LOCAL
) -> dict[str, Tensor]:
    """Share of turns that no other rollout of the prompt got to."""
    mask_NU, by_prompt = turns(batch).mask_NU, groups(batch.group_N)
    is_alone_NU = by_prompt.sum(mask_NU.long())[by_prompt.index_N] == 1
    return {"alone_frac": masked_mean(is_alone_NU.to(before_NT.dtype), mask_NU, reduce)}


def _is_policy_gradient(*, discount: float, exclude_own: bool) -> bool:
    return discount == 1 and exclude_own


@declare(report=_alone, assigns_turns=True, is_unbiased=_is_policy_gradient)
def turn_baseline(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    over: str = "alive",
    discount: float = 1.0,
    exclude_own: bool = True,
) -> Tensor:
    """The return from a turn on, minus the mean of the same over the prompt's other rollouts.

    credit'_iu = Q_iu - mean_{j != i} Q_ju

    Rewards are added up first and one number is subtracted, which depends on the other rollouts
    and on u alone: unbiased. With one turn it is ``leave_one_out``, bit for bit.

    Args:
        credit_NT: [N, T]; not read.
        batch: reads its turns and their rewards.
        over: "alive": the mean is over the rollouts that play turn u; where there is no other the
            baseline is 0. "all": over all of them, Q = 0 for those that ended before.
        discount: in [0, 1]; 0 gives the turn's own reward, which ignores what follows.
        exclude_own: False takes the mean with the rollout itself, which shrinks the credit by
            (n - 1) / n, n the rollouts in the mean: late turns more than early ones.

    >>> batch = TokenBatch.from_lists(
    ...     [[5, 6], [5, 7], [5]],
    ...     group=[0] * 3,
    ...     reward=[3.0, 1.0, 0.0],
    ...     sampler_logp=[[-1.0] * 2, [-1.0] * 2, [-1.0]],
    ...     turn_NT=torch.tensor([[0, 1], [0, 1], [0, -1]]),
    ...     turn_reward_NU=torch.tensor([[1.0, 2.0], [1.0, 0.0], [0.0, 0.0]]),
    ... )
    >>> turn_baseline(torch.zeros(3, 2), batch).tolist()
    [[2.5, 2.0], [-0.5, -2.0], [-2.0, 0.0]]
    """
    check_choice("turn_baseline", OVER, over=over)
    check_number("turn_baseline", least=0, most=1, discount=discount)
    played = turns(batch)
    advantage_NU = against_others(played, batch.group_N, discount, over, exclude_own)
    return over_tokens(advantage_NU, played.turn_NT).to(credit_NT.dtype)


@declare(report=_alone, needs_groups=True, assigns_turns=True)
def turn_index_baseline(
    credit_NT: Tensor, batch: TokenBatch, *, discount: float = 1.0, exclude_own: bool = False
) -> Tensor:
    """Each reward minus the mean reward of that turn, then added up from a turn on: biased.

    credit'_iu = sum_{l=u}^{K_i - 1} discount^(l-u) (r_il - m_l), m_l the mean of r_jl over the
    rollouts of the prompt that play turn l

    Every further turn is charged m_l, and how many there are is the rollout's own choice: going on
    is punished where rewards are positive. ``turn_baseline`` is the repair. Here as the baseline
    that many trainers use, and for comparison.

    Args:
        credit_NT: [N, T]; not read.
        batch: reads its turns and their rewards.
        discount: in [0, 1].
        exclude_own: True takes m_l over the other rollouts, 0 where there is none; the bias stays.

    Reference: the extension to any number of turns of MT-GRPO, arXiv 2505.11821, without its std.

    >>> batch = TokenBatch.from_lists(
    ...     [[5, 6], [5]],
    ...     group=[0, 0],
    ...     reward=[2.0, 1.0],
    ...     sampler_logp=[[-1.0] * 2, [-1.0]],
    ...     turn_NT=torch.tensor([[0, 1], [0, -1]]),
    ...     turn_reward_NU=torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
    ... )
    >>> turn_index_baseline(torch.zeros(2, 2), batch).tolist()  # the second turn brought 1 more
    [[0.0, 0.0], [0.0, 0.0]]
    """
    check_number("turn_index_baseline", least=0, most=1, discount=discount)
    played = turns(batch)
    one_NU = against_others(played, batch.group_N, 0.0, "alive", exclude_own)
    return over_tokens(returns(one_NU, discount), played.turn_NT).to(credit_NT.dtype)


@declare(needs_groups=True, assigns_turns=True)
def mt_grpo(
    credit_NT: Tensor, batch: TokenBatch, *, weight: float = 1.0, eps: float = 1e-4
) -> Tensor:
    """The outcome's z-score on all turns, and that of each turn's reward on the turns up to it.

    credit'_iu = z(o)_i + weight sum_{l=u}^{K_i - 2} z(r_l)_i, o the reward of the last turn; for a
    rollout of one turn z(R)_i

    z(x) = (x - mean) / (std + eps) over the rollouts of the prompt, r_l = 0 for those that did not
    play turn l or ended with it. Biased: what a rollout is measured against depends on how many
    turns it plays, and the std on its own reward.

    Args:
        credit_NT: [N, T]; not read.
        batch: reads its turns and their rewards.
        weight: >= 0, of the turns before the last.
        eps: >= 0, added to the standard deviation (unbiased).

    Reference: MT-GRPO, arXiv 2505.11821, and its code, for two turns; more turns are our reading.

    >>> batch = TokenBatch.from_lists(
    ...     [[5, 6], [5, 7]],
    ...     group=[0, 0],
    ...     reward=[1.0, 1.0],
    ...     sampler_logp=[[-1.0] * 2] * 2,
    ...     turn_NT=torch.tensor([[0, 1], [0, 1]]),
    ...     turn_reward_NU=torch.tensor([[0.0, 1.0], [1.0, 0.0]]),
    ... )
    >>> (mt_grpo(torch.zeros(2, 2), batch, eps=0.0) * 2**0.5).round().tolist()
    [[0.0, 1.0], [0.0, -1.0]]
    """
    check_number("mt_grpo", least=0, weight=weight, eps=eps)
    played = turns(batch)
    is_last_NU = played.mask_NU & (played.mask_NU.cumsum(1) == played.mask_NU.sum(1, keepdim=True))
    reward_NU = as_float(played.reward_NU)
    outcome_N, total_N = torch.where(is_last_NU, reward_NU, 0).sum(1), as_float(batch.reward_N)
    before_NU = torch.where(played.mask_NU & ~is_last_NU, reward_NU, 0)
    z_NU = torch.stack([group_zscore(r_N, batch.group_N, eps=eps) for r_N in before_NU.unbind(1)])
    later_NU = returns(torch.where(played.mask_NU & ~is_last_NU, z_NU.T, 0))
    outcome_z_N, total_z_N = (
        group_zscore(value_N, batch.group_N, eps=eps) for value_N in (outcome_N, total_N)
    )
    is_one_N1 = played.mask_NU.sum(1, keepdim=True) == 1
    advantage_NU = torch.where(
        is_one_N1, total_z_N[:, None], outcome_z_N[:, None] + weight * later_NU
    )
    return over_tokens(advantage_NU, played.turn_NT).to(credit_NT.dtype)


def against_others(
    played: Turns, group_N: Tensor, discount: float, over: str, exclude_own: bool
) -> Tensor:
    """Returns minus a mean over the rollouts of a prompt at the same turn, [N, U]; 0 where none
    was played.
    """
    return_NU = torch.where(played.mask_NU, returns(as_float(played.reward_NU), discount), 0)
    is_in_NU = played.mask_NU if over == "alive" else torch.ones_like(played.mask_NU)
    row_M, turn_M = is_in_NU.nonzero(as_tuple=True)
    place_M, _ = pair_index(groups(group_N).index_N[row_M], turn_M)
    out_NU = torch.zeros_like(return_NU)
    out_NU[is_in_NU] = centre(return_NU[is_in_NU], place_M, row_M, exclude_own)
    return torch.where(played.mask_NU, out_NU, 0)


def centre(value_M: Tensor, place_M: Tensor, row_M: Tensor, exclude_own: bool) -> Tensor:
    """x - mean of the values at the same place; with ``exclude_own`` over those of other rollouts,
    the mean of none being 0. Exactly 0 where there is something to compare with and all are equal.

    Args:
        value_M: [M] a number for each turn.
        place_M: [M] turns with the same number are compared.
        row_M: [M] the rollout of each turn.

    >>> centre(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 0, 1]), torch.arange(3), True)
    tensor([-1.,  1.,  6.])
    """
    at = groups(place_M)
    total_M, num_M = at.sum(value_M)[at.index_N], at.size_P[at.index_N]
    if exclude_own:
        mine = groups(pair_index(place_M, row_M)[0])
        total_M = total_M - mine.sum(value_M)[mine.index_N]
        num_M = num_others(place_M, row_M)
    mean_M = total_M / num_M.clamp(min=1).to(value_M.dtype)
    return torch.where(at.is_constant(value_M) & (num_M > 0), 0, value_M - mean_M)


def num_others(place_M: Tensor, row_M: Tensor) -> Tensor:
    """Turns of other rollouts at the same place, [M].

    >>> num_others(torch.tensor([0, 0, 0]), torch.tensor([0, 0, 1])).tolist()
    [1, 1, 2]
    """
    at, mine = groups(place_M), groups(pair_index(place_M, row_M)[0])
    return at.size_P[at.index_N] - mine.size_P[mine.index_N]
