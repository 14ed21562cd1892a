"""Rules that whiten credit over tokens: whiten, only_improbable."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from counterpoise.errors import check_number
from counterpoise.maths.reduce import LOCAL, Reduce, masked_mean
from counterpoise.stage import Stage, declare
from counterpoise.types import TokenBatch


def whitened(credit_NT: Tensor, counted_NT: Tensor, eps: float, reduce: Reduce = LOCAL) -> Tensor:
    """(credit - mean) / sqrt(variance + eps) over the counted tokens of all ranks (population
    variance), in float64; 0 elsewhere.
    """
    wide_NT = credit_NT.double()
    centred_NT = wide_NT - masked_mean(wide_NT, counted_NT, reduce)
    variance = masked_mean(centred_NT.square(), counted_NT, reduce)
    return torch.where(counted_NT, centred_NT / (variance + eps).sqrt(), 0).to(credit_NT.dtype)


@Stage
def whiten(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    eps: float = 1e-8,
    size: float = 1.0,
    reduce: Reduce = LOCAL,
) -> Tensor:
    """Credit with mean 0 and standard deviation ``size`` over the tokens of the batch.

    credit' = size (credit - mean) / sqrt(variance + eps), both over the model tokens of all ranks;
    tokens without a segment, where the batch has segments, stay out and have 0

    Keeps neither the sign nor the mass: a token without credit gets minus the mean.

    Args:
        credit_NT: [N, T].
        eps: > 0, added to the variance.
        size: > 0; a loss that is linear in the size of credit has this weight among other terms.

    >>> batch = TokenBatch.from_lists([[1, 2]], group=[0], reward=[1.0], sampler_logp=[[-1.0] * 2])
    >>> whiten(torch.tensor([[3.0, 1.0]]), batch)
    tensor([[ 1., -1.]])
    """
    check_number("whiten", above=0, eps=eps, size=size)
    return size * whitened(credit_NT, _in_segments(batch), eps, reduce)


def _in_segments(batch: TokenBatch) -> Tensor:
    if batch.segment_NT is None:
        return batch.mask_NT
    return batch.mask_NT & (batch.segment_NT >= 0)


def _kept(
    before_NT: Tensor,
    after_NT: Tensor,
    batch: TokenBatch,
    *,
    max_prob: float,
    reduce: Reduce = LOCAL,
) -> dict[str, Tensor]:
    is_rare_NT = batch.sampler_logp_NT.double() < math.log(max_prob)
    return {"improbable_frac": masked_mean(is_rare_NT.double(), batch.mask_NT, reduce)}


@declare(report=_kept)
def only_improbable(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    max_prob: float = 0.9,
    whiten: bool = False,
    eps: float = 1e-8,
    reduce: Reduce = LOCAL,
) -> Tensor:
    """Credit on tokens that might have been others.

    credit' = credit where the sampler's probability of the token is less than ``max_prob``, else 0

    Keeps the sign, not the mass; with ``whiten`` neither.

    Args:
        credit_NT: [N, T].
        max_prob: in (0, 1]; 1 keeps every token.
        whiten: the credit of the kept tokens is whitened over them, as ``whiten`` does over all.
        eps: > 0, added to that variance.

    Reference: SPO, arXiv 2505.23564 (0.9). The denominator without the other tokens is
        ``per_token``'s ``count="credited"``.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2]], group=[0], reward=[1.0], sampler_logp=[[-0.01, -0.7]]
    ... )
    >>> only_improbable(torch.ones(1, 2), batch).tolist()
    [[0.0, 1.0]]
    """
    check_number("only_improbable", above=0, most=1, max_prob=max_prob)
    check_number("only_improbable", above=0, eps=eps)
    limit = math.inf if max_prob == 1 else math.log(max_prob)
    kept_NT = batch.mask_NT & (batch.sampler_logp_NT.double() < limit)
    if whiten:
        return whitened(credit_NT, kept_NT & _in_segments(batch), eps, reduce)
    return torch.where(kept_NT, credit_NT, 0)
