"""Reductions as a column: total = (loss_NT * scale_NT).sum().

Each is ``fn(mask_NT, credit_NT, advantage_N, *, params) -> scale_NT``.

A reduction sees the whole update (the rows of this rank; counts are pooled by ``reduce``),
and any cut of the update slices the column. Padding is 0. ``count`` says which tokens the
denominator counts, which is another thing than which tokens have a loss: "mask" all response
tokens, "credited" those whose credit is not 0. Credit 0 still has its scale (a KL term may live
there)."""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.errors import check_choice, check_whole
from counterpoise.maths.reduce import LOCAL, Reduce
from counterpoise.stage import Stage

COUNTS = ("mask", "credited")


@Stage
def per_token(
    mask_NT: Tensor,
    credit_NT: Tensor,
    advantage_N: Tensor,
    *,
    count: str = "mask",
    reduce: Reduce = LOCAL,
) -> Tensor:
    """scale = 1 / (counted tokens of the update): every token weighs the same (DAPO).

    No counted token: 0 everywhere.

    Args:
        mask_NT: [N, T] response tokens.
        credit_NT: [N, T] credit, read by ``count="credited"``.
        advantage_N: [N], not read.
        count: "mask" or "credited".
        reduce: pools counts over ranks.

    >>> mask_NT = torch.tensor([[True, True, True], [True, False, False]])
    >>> per_token(mask_NT, mask_NT.float(), torch.ones(2)).tolist()
    [[0.25, 0.25, 0.25], [0.25, 0.0, 0.0]]

    Reference: DAPO, arXiv 2503.14476, Eq. 12.
    """
    counted_NT = _counted("per_token", mask_NT, credit_NT, count)
    return _inverse(mask_NT, reduce.sum(counted_NT.sum()).to(credit_NT.dtype))


@Stage
def per_sequence(
    mask_NT: Tensor,
    credit_NT: Tensor,
    advantage_N: Tensor,
    *,
    count: str = "mask",
    reduce: Reduce = LOCAL,
) -> Tensor:
    """scale = 1 / (N n_i), n_i the counted tokens of rollout i, N the rollouts of the update,
    uncredited ones included (GRPO).

    A rollout without a counted token has scale 0. Arguments as for ``per_token``.

    >>> mask_NT = torch.tensor([[True, True], [True, False]])
    >>> per_sequence(mask_NT, mask_NT.float(), torch.ones(2)).tolist()
    [[0.25, 0.25], [0.5, 0.0]]

    Reference: GRPO, arXiv 2402.03300, Eq. 3.
    """
    count_N1 = _counted("per_sequence", mask_NT, credit_NT, count).sum(1, keepdim=True)
    num_rows = reduce.sum(count_N1.new_tensor(len(count_N1)))
    return _inverse(mask_NT, (num_rows * count_N1).to(credit_NT.dtype))


@Stage
def constant_length(
    mask_NT: Tensor,
    credit_NT: Tensor,
    advantage_N: Tensor,
    *,
    length: int | None = None,
    max_length: int | None = None,
    reduce: Reduce = LOCAL,
) -> Tensor:
    """scale = 1 / (N length): a token's weight does not depend on how long its rollout is
    (Dr.GRPO).

    Args:
        mask_NT: [N, T] response tokens.
        credit_NT: [N, T], not read.
        advantage_N: [N], not read.
        length: the constant; None takes the batch's ``max_length`` (the generation limit), else the
            longest response of the update.
        max_length: offered by the caller from the batch.
        reduce: pools over ranks.

    >>> constant_length(
    ...     torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 2), torch.ones(2), length=4
    ... ).tolist()
    [[0.125, 0.125], [0.125, 0.125]]

    Reference: Dr.GRPO, arXiv 2503.20783.
    """
    check_whole("constant_length", least=1, or_none=True, length=length)
    length_N = reduce.cat(mask_NT.sum(1))
    constant = length or max_length or int(length_N.max())
    return _inverse(
        mask_NT,
        torch.as_tensor(len(length_N) * constant, dtype=credit_NT.dtype, device=mask_NT.device),
    )


@Stage
def side_means(
    mask_NT: Tensor, credit_NT: Tensor, advantage_N: Tensor, *, reduce: Reduce = LOCAL
) -> Tensor:
    """scale = 1/2 * 1/(rollouts of the side) * 1/n_i, sides by the sign of the advantage, n_i all
    response tokens.

    Tokens that a rule dropped still count in n_i. Rollouts with advantage 0 are on no side: scale
    0. A update with one side only keeps that side with its weight of 1/2.

    Args:
        mask_NT: [N, T] response tokens.
        credit_NT: [N, T], not read.
        advantage_N: [N] its sign is the side.
        reduce: pools counts over ranks.

    >>> mask_NT = torch.tensor([[True, True], [True, False], [True, False]])
    >>> side_means(mask_NT, mask_NT.float(), torch.tensor([1.0, -1.0, -1.0])).tolist()
    [[0.25, 0.25], [0.25, 0.0], [0.25, 0.0]]

    Reference: C-RF, arXiv 2606.17250. Reads the one-sided batch, which the paper leaves open, as
        above.
    """
    sign_N = advantage_N.sign()
    num_positive, num_negative = reduce.sum(torch.stack([(sign_N > 0).sum(), (sign_N < 0).sum()]))
    side_N = torch.where(sign_N > 0, num_positive, num_negative) * (sign_N != 0)
    return _inverse(mask_NT, (2 * side_N * mask_NT.sum(1)).to(credit_NT.dtype)[:, None])


def _counted(name: str, mask_NT: Tensor, credit_NT: Tensor, count: str) -> Tensor:
    check_choice(name, COUNTS, count=count)
    return mask_NT if count == "mask" else mask_NT & (credit_NT != 0)


def _inverse(mask_NT: Tensor, denominator: Tensor) -> Tensor:
    """1 / denominator on response tokens; 0 on padding and where the denominator is 0."""
    inverse = torch.where(denominator > 0, 1 / denominator.clamp(min=1), 0)
    return torch.where(mask_NT, inverse, 0)
