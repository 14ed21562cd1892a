"""Which tokens of a failed rollout may be punished."""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.errors import check_number
from counterpoise.maths.reduce import LOCAL, Reduce, masked_mean
from counterpoise.stage import declare
from counterpoise.types import TokenBatch


def _negative_side(
    before_NT: Tensor, after_NT: Tensor, batch: TokenBatch, *, reduce: Reduce = LOCAL
) -> dict[str, Tensor]:
    was_NT, is_kept_NT = before_NT < 0, (before_NT < 0) & (after_NT != 0)
    return {
        "negative_kept_frac": masked_mean(is_kept_NT.to(before_NT.dtype), was_NT, reduce),
        "negative_kept_logp": masked_mean(batch.sampler_logp_NT, is_kept_NT, reduce),
        "negative_dropped_logp": masked_mean(batch.sampler_logp_NT, was_NT & ~is_kept_NT, reduce),
    }


@declare(report=_negative_side)
def negative_token_filter(credit_NT: Tensor, batch: TokenBatch, *, fraction: float = 0.1) -> Tensor:
    """Punish only the rarest tokens of a failed rollout.

    credit' = credit * 1[credit >= 0 or the token is one of the k = max(1, ceil(fraction * n)) of
    lowest sampler log-prob]

    ``n`` counts the rollout's tokens with negative credit (all of them, for the first rule of a
    chain); ties go to the earlier token. The dropped tokens still count in the denominator of any
    reduction. Keeps the sign, not the mass. Works with one rollout a prompt.

    Args:
        credit_NT: [N, T].
        fraction: kappa, in (0, 1]; 1 keeps every token.

    Reference: negative token filtering, arXiv 2606.17250. Departs from a bare ceil in that rounding
        noise of ``fraction * n`` adds no token.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2, 3]], group=[0], reward=[0.0], sampler_logp=[[-0.1, -4.0, -0.2]]
    ... )
    >>> negative_token_filter(torch.full((1, 3), -0.5), batch, fraction=0.1).tolist()
    [[0.0, -0.5, 0.0]]
    """
    check_number("negative_token_filter", above=0, most=1, fraction=fraction)
    is_negative_NT = credit_NT < 0
    num_kept_N = torch.ceil(is_negative_NT.sum(1).double() * fraction - 1e-9).clamp(min=1)
    order_NT = torch.where(is_negative_NT, batch.sampler_logp_NT, torch.inf).argsort(
        dim=1, stable=True
    )
    position_NT = torch.arange(credit_NT.shape[1], device=credit_NT.device).expand_as(order_NT)
    rank_NT = torch.empty_like(order_NT).scatter_(1, order_NT, position_NT)
    return torch.where(is_negative_NT & (rank_NT >= num_kept_N[:, None]), 0, credit_NT)
