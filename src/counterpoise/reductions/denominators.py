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
    constant = length or max_length or max(length_N.tolist(), default=1)
    return _inverse(
        mask_NT,
        torch.as_tensor(len(length_N) * constant, dtype=credit_NT.dtype, device=mask_NT.device),
    )


@Stage
def side_means(
    mask_NT: Tensor,
    credit_NT: Tensor,
    advantage_N: Tensor,
    *,
    advantage_NT: Tensor | None = None,
    reduce: Reduce = LOCAL,
) -> Tensor:
    """scale = 1/2 * 1/(rollouts of the side) * 1/n_i, sides by the sign of the advantage, n_i the
    rollout's model tokens on its side.

    Tokens that a rule dropped still count in n_i. An advantage of 0 is on no side: scale 0. An
    update with one side only keeps that side with its weight of 1/2. Where a rule tells turns apart
    a rollout may be on both sides, each with the tokens of its turns.

    Args:
        mask_NT: [N, T] response tokens.
        credit_NT: [N, T], not read.
        advantage_N: [N] its sign is the side.
        advantage_NT: [N, T] the advantage of each token's turn, offered by the caller; its sign is
            then the side.
        reduce: pools counts over ranks.

    >>> mask_NT = torch.tensor([[True, True], [True, False], [True, False]])
    >>> side_means(mask_NT, mask_NT.float(), torch.tensor([1.0, -1.0, -1.0])).tolist()
    [[0.25, 0.25], [0.25, 0.0], [0.25, 0.0]]

    Reference: C-RF, arXiv 2606.17250. Reads the one-sided batch, which the paper leaves open, as
        above.
    """
    sign_NT = (advantage_N[:, None] if advantage_NT is None else advantage_NT).sign()
    is_side_2NT = torch.stack([sign_NT > 0, sign_NT < 0]) & mask_NT
    num_2 = reduce.sum(is_side_2NT.any(2).sum(1))
    weight_2N1 = num_2[:, None, None] * is_side_2NT.sum(2, keepdim=True)
    return _inverse(mask_NT, (2 * weight_2N1 * is_side_2NT).sum(0).to(credit_NT.dtype))


def _counted(name: str, mask_NT: Tensor, credit_NT: Tensor, count: str) -> Tensor:
    check_choice(name, COUNTS, count=count)
    return mask_NT if count == "mask" else mask_NT & (credit_NT != 0)


def _inverse(mask_NT: Tensor, denominator: Tensor) -> Tensor:
    """1 / denominator on response tokens; 0 on padding and where the denominator is 0."""
    inverse = torch.where(denominator > 0, 1 / denominator.clamp(min=1), 0)
    return torch.where(mask_NT, inverse, 0)
