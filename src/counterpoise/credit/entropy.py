"""Rules that read the entropy of the sampling distribution: top_entropy, spurious,
entropy_filter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from counterpoise.errors import check_choice, check_number
from counterpoise.maths.reduce import LOCAL, Reduce, masked_mean
from counterpoise.stage import declare
from counterpoise.types import TokenBatch


def pooled_quantile(
    value_NT: Tensor, mask_NT: Tensor, level: float, reduce: Reduce = LOCAL
) -> Tensor:
    """The ``level`` quantile of the masked values of all ranks, linear between neighbours; +inf
    where there are none.

    Equal to ``torch.quantile``, without its limit of 16 M values.

    >>> pooled_quantile(torch.tensor([[0.0, 1.0, 9.0]]), torch.tensor([[True, True, False]]), 0.25)
    tensor(0.2500)
    """
    value_M = reduce.cat(value_NT[mask_NT]).sort().values
    if len(value_M) == 0:
        return value_NT.new_tensor(math.inf)
    rank = level * (len(value_M) - 1)
    rank = round(rank) if abs(rank - round(rank)) < 1e-9 * len(value_M) else rank
    return torch.lerp(value_M[math.floor(rank)], value_M[math.ceil(rank)], rank - math.floor(rank))


def _threshold(
    before_NT: Tensor,
    after_NT: Tensor,
    batch: TokenBatch,
    *,
    fraction: float = 0.2,
    reduce: Reduce = LOCAL,
) -> dict[str, Tensor]:
    return {
        "threshold": pooled_quantile(
            batch.column("entropy_NT"), batch.mask_NT, 1 - fraction, reduce
        )
    }


@declare(needs="entropy_NT", report=_threshold)
def top_entropy(
    credit_NT: Tensor, batch: TokenBatch, *, fraction: float = 0.2, reduce: Reduce = LOCAL
) -> Tensor:
    """Credit only where the policy was undecided.

    credit' = credit * 1[H >= Q], Q the (1 - fraction) quantile of the entropy H of all response
    tokens of the batch, over all ranks.

    The selection is that of TRL's ``top_entropy_quantile``. Keeps the sign, not the mass; ties at Q
    are all kept.

    Args:
        credit_NT: [N, T].
        fraction: share of tokens kept, in (0, 1]; 1 keeps every token.

    Reference: Beyond the 80/20 Rule, arXiv 2506.01939 (rho = 0.2).

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2, 3]],
    ...     group=[0],
    ...     reward=[1.0],
    ...     sampler_logp=[[-1.0] * 3],
    ...     entropy=[[0.1, 2.0, 0.3]],
    ... )
    >>> top_entropy(torch.ones(1, 3), batch, fraction=0.2).tolist()
    [[0.0, 1.0, 0.0]]
    """
    check_number("top_entropy", above=0, most=1, fraction=fraction)
    entropy_NT = batch.column("entropy_NT")
    threshold = pooled_quantile(entropy_NT, batch.mask_NT, 1 - fraction, reduce)
    return torch.where(batch.mask_NT & (entropy_NT >= threshold), credit_NT, 0)


def _silenced(
    before_NT: Tensor, after_NT: Tensor, batch: TokenBatch, *, reduce: Reduce = LOCAL
) -> dict[str, Tensor]:
    is_dropped_NT = (before_NT != 0) & (after_NT == 0)
    return {
        "spurious_frac": masked_mean(is_dropped_NT.to(before_NT.dtype), batch.mask_NT, reduce),
        "spurious_entropy": masked_mean(batch.column("entropy_NT"), is_dropped_NT, reduce),
    }


@declare(needs="entropy_NT", report=_silenced)
def spurious(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    max_prob: float = 0.002,
    entropy_quantile: float = 0.75,
    quantile_over: str = "rare",
    renormalise: str = "tokens",
    reduce: Reduce = LOCAL,
) -> Tensor:
    """Silence tokens that a confident policy sampled by accident in a rewarded rollout.

    credit' = z * credit * 1[not (credit > 0 and p < max_prob and H < Q)], p the sampler's
    probability, H the entropy, Q a quantile of H

    Keeps the sign. The factor z makes up for what was dropped: ``tokens`` (the paper's: the loss is
    averaged over the kept tokens) is
    (all tokens)/(kept tokens), ``mass`` keeps sum|credit|, ``none`` is 1. All pooled over ranks; z
    = 1 where nothing is left.

    Args:
        credit_NT: [N, T].
        max_prob: tau_p, a token is rare below it.
        entropy_quantile: q in [0, 1]; 0 drops nothing.
        quantile_over: ``rare`` takes Q over the rare tokens of positive credit, ``batch`` over all
            response tokens.
        renormalise: ``tokens``, ``mass`` or ``none``.

    Reference: STAPO, arXiv 2602.15620 (tau_p 0.002, q 0.75 over the rare tokens in its later
        versions; the first took q = 0.8 over the
    mini-batch). Departs from the paper in that Q and z are those of the batch, not of each
    mini-batch, and p is the sampler's.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2, 3]],
    ...     group=[0],
    ...     reward=[1.0],
    ...     sampler_logp=[[-0.1, -9.0, -9.0]],
    ...     entropy=[[0.1, 0.1, 3.0]],
    ... )
    >>> spurious(torch.ones(1, 3), batch).tolist()
    [[1.5, 0.0, 1.5]]
    """
    check_number("spurious", least=0, most=1, max_prob=max_prob)
    check_number("spurious", least=0, most=1, entropy_quantile=entropy_quantile)
    check_choice("spurious", ("rare", "batch"), quantile_over=quantile_over)
    check_choice("spurious", ("tokens", "mass", "none"), renormalise=renormalise)
    entropy_NT, mask_NT = batch.column("entropy_NT"), batch.mask_NT
    is_rare_NT = mask_NT & (credit_NT > 0) & (batch.sampler_logp_NT.exp() < max_prob)
    threshold = pooled_quantile(
        entropy_NT, is_rare_NT if quantile_over == "rare" else mask_NT, entropy_quantile, reduce
    )
    is_kept_NT = mask_NT & ~(is_rare_NT & (entropy_NT < threshold))
    kept_NT = torch.where(is_kept_NT, credit_NT, 0)
    if renormalise == "none":
        return kept_NT
    if renormalise == "mass":
        whole, kept = reduce.sum(credit_NT.abs().sum()), reduce.sum(kept_NT.abs().sum())
    else:
        whole, kept = (
            reduce.sum(mask_NT.sum()).to(credit_NT.dtype),
            reduce.sum(is_kept_NT.sum()).to(credit_NT.dtype),
        )
    return kept_NT * torch.where(kept > 0, whole / torch.where(kept > 0, kept, 1), 1)


def rollout_entropy(batch: TokenBatch) -> Tensor:
    """Mean entropy over the tokens of each rollout, [N]; 0 for one without a token."""
    entropy_NT = torch.where(batch.mask_NT, batch.column("entropy_NT"), 0)
    return entropy_NT.sum(1) / batch.length_N.clamp(min=1).to(entropy_NT.dtype)


def _filtered(
    before_NT: Tensor,
    after_NT: Tensor,
    batch: TokenBatch,
    *,
    limit: float = 0.7,
    reduce: Reduce = LOCAL,
) -> dict[str, Tensor]:
    entropy_N, is_row_N = rollout_entropy(batch), batch.mask_NT.any(1)
    return {
        "filtered_frac": masked_mean((entropy_N > limit).to(before_NT.dtype), is_row_N, reduce),
        "rollout_entropy": masked_mean(entropy_N, is_row_N, reduce),
    }


@declare(needs="entropy_NT", report=_filtered)
def entropy_filter(
    credit_NT: Tensor, batch: TokenBatch, *, limit: float = 0.7, coef: float = 0.1
) -> Tensor:
    """Drop rollouts that the policy wrote undecided, and charge the others for their entropy.

    credit' = 0 where H > limit, credit - coef * H elsewhere, H the mean entropy over the tokens of
    the rollout

    Keeps neither the sign nor the mass: rollouts without an advantage are charged too. An infinite
    ``limit`` drops none, ``coef = 0`` charges none.

    Args:
        credit_NT: [N, T].
        limit: of the mean entropy, in nats.
        coef: >= 0.

    Reference: GTPO, arXiv 2508.03772, with the values of the authors' code. The paper has a
        threshold of ln 2, and only where the policy starts below it. Departs from the code in that
        H is that of the sampling distribution, not of the policy at each update.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2], [3, 4]],
    ...     group=[0, 0],
    ...     reward=[1.0, 0.0],
    ...     sampler_logp=[[-1.0] * 2] * 2,
    ...     entropy=[[0.2, 0.6], [0.4, 2.0]],
    ... )
    >>> entropy_filter(torch.tensor([[0.5, 0.5], [-0.5, -0.5]]), batch)
    tensor([[0.4600, 0.4600],
            [0.0000, 0.0000]])
    """
    check_number("entropy_filter", least=0, or_infinite=True, limit=limit)
    check_number("entropy_filter", least=0, coef=coef)
    entropy_N1 = rollout_entropy(batch)[:, None].to(credit_NT.dtype)
    is_kept_NT = batch.mask_NT & (entropy_N1 <= limit)
    return torch.where(is_kept_NT, credit_NT - coef * entropy_N1, 0)
