"""DFPO: sequence weights transformed within each group so that tokens shared by its rollouts
cancel.

A token that several rollouts of a group share (same context, same token) gets (1/G) sum_i A_i
alpha_i times one gradient, alpha_i the weight of rollout i. sum_i A_i = 0, so equal weights give
exactly 0 there; the group's own sequence weights w_i do not. ``min`` makes the weights equal,
``orth`` takes the part along A out of them."""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.errors import check_choice
from counterpoise.losses.sequence import mean_log_ratio
from counterpoise.losses.token_loss import Parts, bounded_exp, log_ratio, token_loss
from counterpoise.maths.reduce import groups
from counterpoise.types import Rows

TRANSFORMS = ("min", "orth", "none")
WEIGHTS = ("geometric_mean", "product")
LENGTHS = ("outside", "inside")


def dfpo_weight(
    update_logp_NT: Tensor,
    rows: Rows,
    *,
    transform: str = "min",
    weight: str = "geometric_mean",
    length: str = "outside",
) -> Tensor:
    """The transformed weight of every rollout of a update, [N], detached; parameters as in
    ``dfpo``.

    ``orth`` can make weights negative (such a rollout is pushed against its advantage): log
    ``(dfpo_weight(...) < 0).float().mean()``. Where all advantages of a group are 0, ``orth``
    leaves its weights as they are (they multiply 0).

    Two rollouts of one token, advantages +1 and -1, ratios e and 1: w = (e, 1), and A.w / |A|^2 =
    (e - 1) / 2 comes off along A.

    >>> one = torch.ones(2, 1, dtype=torch.float64)
    >>> rows = Rows(
    ...     torch.arange(2),
    ...     one.bool(),
    ...     torch.zeros(2),
    ...     one[:, 0],
    ...     torch.tensor([1.0, -1.0]).double(),
    ...     one,
    ...     -2 * one,
    ...     one,
    ... )
    >>> logp = torch.tensor([[-1.0], [-2.0]]).double()
    >>> [round(w, 4) for w in dfpo_weight(logp, rows, transform="orth").tolist()]
    [1.8591, 1.8591]
    >>> dfpo_weight(logp, rows, transform="min").tolist()
    [1.0, 1.0]
    """
    check_choice("dfpo", TRANSFORMS, transform=transform)
    check_choice("dfpo", WEIGHTS, weight=weight)
    check_choice("dfpo", LENGTHS, length=length)
    length_N = rows.mask_NT.sum(1)
    log_ratio_NT = torch.where(rows.mask_NT, log_ratio(update_logp_NT.detach(), rows), 0)
    log_weight_N = (
        log_ratio_NT.sum(1)
        if weight == "product"
        else mean_log_ratio(log_ratio_NT, rows).squeeze(1)
    )
    weight_N = bounded_exp(log_weight_N) / (length_N if length == "inside" else 1)
    return _transformed(weight_N, rows.advantage_N, rows.group_N, transform)


def _transformed(weight_N: Tensor, advantage_N: Tensor, group_N: Tensor, transform: str) -> Tensor:
    by_group = groups(group_N)
    if transform == "min":
        return by_group.extremes(weight_N)[0][by_group.index_N]
    if transform == "orth":
        size_P = by_group.sum(advantage_N.square())
        along_P = by_group.sum(advantage_N * weight_N) / torch.where(size_P == 0, 1, size_P)
        return weight_N - along_P[by_group.index_N] * advantage_N
    return weight_N


def _update_weight(
    update_logp_NT: Tensor, rows: Rows, *, transform: str, weight: str, length: str
) -> Tensor:
    weight_N = dfpo_weight(update_logp_NT, rows, transform=transform, weight=weight, length=length)
    return weight_N[:, None].expand_as(rows.mask_NT)


@token_loss(prepare=_update_weight, prepares_by_prompt=True)
def dfpo(
    trainer_logp_NT: Tensor,
    rows: Rows,
    *,
    transform: str = "min",
    weight: str = "geometric_mean",
    length: str = "outside",
) -> Parts:
    """L = -c w~_i logp with w~ the group's transformed sequence weights, detached; coef = c w~_i.

    Unclipped.

    Args:
        transform: ``min`` w~_i = min_j w_j over the group; ``orth`` w~ = w - (A.w / |A|^2) A;
            ``none`` the weights themselves (the control
            in which sequences couple).
        weight: ``geometric_mean`` w_i = exp(mean_t log r_t); ``product`` w_i = exp(sum_t log r_t).
        length: ``inside`` divides w_i by the rollout's length before the transformation, so that a
            mean over each rollout keeps the
            cancellation; ``outside`` leaves lengths to the reduction (``constant_length``: 1/length
            after the transformation breaks it).

    All rollouts of a group must be in the same update (plan ``query_preserved``). A is
    ``advantage_N``, and it must sum to 0 over the group (``group_mean``, ``group_zscore``) for
    ``min`` to cancel; credit rules that change shared tokens change what cancels. With ``min`` and
    uniform credit this is ``reinforce`` times one scalar a prompt: run that as its control.

    Reference: arXiv 2604.13088 v1, Eq. 17 (min) and 18 (orth). Reads the paper's loss as the
        weighted score function, unclipped.
    """
    assert rows.update_NT is not None
    ratio_NT = bounded_exp(log_ratio(trainer_logp_NT, rows))
    return (
        -rows.credit_NT * rows.update_NT * trainer_logp_NT,
        ratio_NT,
        torch.zeros_like(rows.mask_NT),
    )
