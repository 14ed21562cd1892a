"""Rules that compare turns which began in the same state of an environment.

Axes as in ``types``; M turns that were played, end to end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.advantages.group import as_float
from counterpoise.credit.turns import centre, num_others
from counterpoise.errors import check_choice, check_number
from counterpoise.maths.reduce import LOCAL, Reduce, groups, masked_mean
from counterpoise.maths.turns import Turns, histories, over_tokens, returns, turns
from counterpoise.stage import declare
from counterpoise.types import TokenBatch

MODES = ("zscore", "mean")
COUNTS = ("rollouts", "turns")


def _states(
    before_NT: Tensor, after_NT: Tensor, batch: TokenBatch, *, reduce: Reduce = LOCAL
) -> dict[str, Tensor]:
    """Share of turns that began in a state which another rollout of the prompt was in too, and of
    turns whose state the environment told.
    """
    played = turns(batch)
    place_M, row_M = places(batch, played)
    is_shared_M = num_others(place_M, row_M) > 0
    every_M = torch.ones_like(is_shared_M)
    return {
        "shared_frac": masked_mean(is_shared_M.to(before_NT.dtype), every_M, reduce),
        "known_frac": masked_mean(
            (played.state_NU >= 0).to(before_NT.dtype), played.mask_NU, reduce
        ),
    }


@declare(report=_states, assigns_turns=True)
def state_groups(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    weight: float = 1.0,
    discount: float = 0.95,
    mode: str = "zscore",
    count: str = "rollouts",
    exclude_own: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Add to a rollout's advantage how each turn did among the turns from the same state.

    credit'_iu = A_i + weight (Q_iu - m) / (s + eps), m and s the mean and the unbiased std of Q
    over the turns of the prompt that began in the state of turn u

    A turn whose state no other turn began in gets A_i alone. Where the environment told no state,
    the state is the history: equal tokens so far, replies included.

    Args:
        credit_NT: [N, T] the rollout's advantage A_i on its tokens.
        batch: reads its turns, their rewards and their states.
        weight: >= 0, of the part by state.
        discount: in [0, 1], of the returns Q.
        mode: "zscore", or "mean", which does not divide by s.
        count: "rollouts" takes A_i as it arrives. "turns" takes it anew, by ``mode``, with mean and
            std over the turns of the prompt, so that a rollout counts as often as it has turns.
        exclude_own: m over the turns of other rollouts. Otherwise a rollout that comes back to a
            state has its own later return in its baseline.
        eps: >= 0.

    Reference: GiGPO, arXiv 2505.10978, Eqs. 3 to 8. The authors' code counts turns (``count``), the
        paper rollouts.

    >>> batch = TokenBatch.from_lists(
    ...     [[5, 6], [7, 8]],
    ...     group=[0, 0],
    ...     reward=[1.0, 0.0],
    ...     sampler_logp=[[-1.0] * 2] * 2,
    ...     turn_NT=torch.tensor([[0, 1], [0, 1]]),
    ...     state_NU=torch.tensor([[1, 2], [1, 3]]),
    ... )
    >>> state_groups(torch.tensor([[0.5] * 2, [-0.5] * 2]), batch, mode="mean")
    tensor([[ 0.9750,  0.5000],
            [-0.9750, -0.5000]])
    """
    check_choice("state_groups", MODES, mode=mode)
    check_choice("state_groups", COUNTS, count=count)
    check_number("state_groups", least=0, weight=weight, eps=eps)
    check_number("state_groups", least=0, most=1, discount=discount)
    played = turns(batch)
    place_M, row_M = places(batch, played)
    return_M = returns(as_float(played.reward_NU), discount)[played.mask_NU]
    by_state_M = _compare(return_M, place_M, row_M, mode, exclude_own, eps)
    state_NT = over_tokens(_lay_out(by_state_M, played), played.turn_NT).to(credit_NT.dtype)
    if count == "turns":
        prompt_M, total_M = batch.group_N[row_M], as_float(batch.reward_N)[row_M]
        episode_M = _compare(total_M, prompt_M, row_M, mode, False, eps)
        credit_NT = over_tokens(_lay_out(episode_M, played), played.turn_NT).to(credit_NT.dtype)
    return credit_NT + weight * state_NT


def places(batch: TokenBatch, played: Turns) -> tuple[Tensor, Tensor]:
    """A number for the state in which each turn began, apart for each prompt, and the rollout of
    the turn: [M] and [M].

    A state that is not known is the history; a turn without tokens has none and stands alone.
    """
    num_turns = played.mask_NU.shape[1]
    row_M, turn_M = played.mask_NU.nonzero(as_tuple=True)
    state_M = played.state_NU[played.mask_NU]
    history_M = histories(batch, played.turn_NT, num_turns)[played.mask_NU]
    alone_M = row_M * num_turns + turn_M
    kind_M = torch.where(state_M >= 0, 0, torch.where(history_M >= 0, 1, 2))
    key_M = torch.where(kind_M == 0, state_M, torch.where(kind_M == 1, history_M, alone_M))
    keys_M3 = torch.stack([batch.group_N[row_M], kind_M, key_M], 1)
    return torch.unique(keys_M3, dim=0, return_inverse=True)[1], row_M


def _compare(
    value_M: Tensor, place_M: Tensor, row_M: Tensor, mode: str, exclude_own: bool, eps: float
) -> Tensor:
    """Value minus mean at the same place, over the std there in mode "zscore"; 0 if all are equal,
    and with ``exclude_own`` where there is no other rollout.
    """
    at, out_M = groups(place_M), centre(value_M, place_M, row_M, exclude_own)
    if exclude_own:
        out_M = torch.where(num_others(place_M, row_M) > 0, out_M, 0)
    if mode == "mean":
        return out_M
    return torch.where(at.is_constant(value_M), 0, out_M / (at.std(value_M)[at.index_N] + eps))


def _lay_out(value_M: Tensor, played: Turns) -> Tensor:
    """Numbers of the turns at their places, 0 where none was played, [N, U]."""
    return value_M.new_zeros(played.mask_NU.shape).masked_scatter(played.mask_NU, value_M)
