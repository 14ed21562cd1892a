"""TPO: fit the policy, restricted to the sampled rollouts of a prompt, to a target distribution
over them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.errors import check_number
from counterpoise.losses.token_loss import Parts, bounded_exp, log_ratio, start_logp, token_loss
from counterpoise.maths.reduce import Groups, groups
from counterpoise.types import Rows


def group_softmax(value_N: Tensor, by_group: Groups) -> Tensor:
    """exp(value) over its sum in the group, [N].

    >>> group_softmax(torch.tensor([0.0, 5.0, 0.0]), groups(torch.tensor([1, 2, 1]))).tolist()
    [0.5, 1.0, 0.5]
    """
    exp_N = (value_N - by_group.extremes(value_N)[1][by_group.index_N]).exp()
    return exp_N / by_group.sum(exp_N)[by_group.index_N]


def standardise(reward_N: Tensor, by_group: Groups) -> Tensor:
    """(R - mean) / population std of the group; 0 where all rewards of the group are equal.

    >>> standardise(torch.tensor([1.0, 0.0, 3.0]), groups(torch.tensor([0, 0, 1]))).tolist()
    [1.0, -1.0, 0.0]
    """
    is_constant_N = by_group.is_constant(reward_N)
    centred_N = reward_N - by_group.mean(reward_N)[by_group.index_N]
    std_N = by_group.mean(centred_N.square()).sqrt()[by_group.index_N]
    return torch.where(is_constant_N, 0, centred_N / torch.where(is_constant_N, 1, std_N))


def _update_pull(update_logp_NT: Tensor, rows: Rows, *, temperature: float) -> Tensor:
    """q_i - p_i of every rollout, along its tokens."""
    check_number("target", above=0, temperature=temperature)
    by_group = groups(rows.group_N)
    sampler_logp_N, trainer_logp_N = start_logp(rows).sum(1), update_logp_NT.sum(1)
    tilt_N = standardise(rows.reward_N.to(trainer_logp_N.dtype), by_group) / temperature
    pull_N = group_softmax(sampler_logp_N + tilt_N, by_group) - group_softmax(
        trainer_logp_N, by_group
    )
    return pull_N[:, None].expand_as(rows.mask_NT)


@token_loss(prepare=_update_pull, prepares_by_prompt=True)
def target(trainer_logp_NT: Tensor, rows: Rows, *, temperature: float = 1.0) -> Parts:
    """L = -sg(q_i - p_i) logp, whose gradient is exactly that of the group's cross-entropy -sum_i
    q_i log p_i.

    p_i = softmax over the group of the rollouts' log-probs under the trainer, q_i ~ p_i^sampler
    exp(u_i / temperature) with u the rewards standardised in the group (population std; 0 for a
    constant group). A rollout's log-prob is the **sum** over its tokens. Coef is q_i - p_i: it
    vanishes once the policy matches the target.

    Args:
        temperature: of the tilt by the rewards.

    Rewards are read from the batch; advantage and credit are not used. All rollouts of a group must
    be in the same update
    (plan ``query_preserved``), and the gradient is the paper's up to one factor with a reduction
    that gives all tokens the same scale
    (``constant_length``).

    Reference: arXiv 2604.06159, Eq. 1 to 3, appendix A (standardisation). The value differs from
        the cross-entropy, the gradient does not.
    """
    check_number("target", above=0, temperature=temperature)
    assert rows.update_NT is not None
    ratio_NT = bounded_exp(log_ratio(trainer_logp_NT, rows))
    return -rows.update_NT * trainer_logp_NT, ratio_NT, torch.zeros_like(rows.mask_NT)
