"""OAR's rule: more credit where a token's influence on the answer is large, less where it is
small.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.errors import check_number
from counterpoise.maths.reduce import LOCAL, Reduce, masked_mean
from counterpoise.stage import declare
from counterpoise.types import TokenBatch

EPS = 1e-8  # scores of a rollout that differ by less are constant


def row_quantile(value_NT: Tensor, mask_NT: Tensor, level: float) -> Tensor:
    """The ``level`` quantile of each row's masked values, linear between neighbours, [N, 1]; 0 in a
    row without any.

    >>> row_quantile(torch.tensor([[0.0, 1.0, 9.0]]), torch.tensor([[True, True, False]]), 0.25)
    tensor([[0.2500]])
    """
    sorted_NT = torch.where(mask_NT, value_NT, torch.inf).sort(1).values
    last_N1 = mask_NT.sum(1, keepdim=True) - 1
    rank_N1 = level * last_N1.clamp(min=0).to(value_NT.dtype)
    low_N1, high_N1 = (sorted_NT.gather(1, x.long()) for x in (rank_N1.floor(), rank_N1.ceil()))
    low_N1, high_N1 = (torch.where(last_N1 >= 0, x, 0) for x in (low_N1, high_N1))
    return torch.lerp(low_N1, high_N1, rank_N1 - rank_N1.floor())


def influence(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """(log1p of the scores, scaled to [0, 1] in each rollout, float64; the tokens that count):
    those with a score, in rollouts whose scores differ.
    """
    score_NT = batch.column("importance_NT").double()
    mask_NT = batch.mask_NT & (score_NT >= 0)
    log_NT = torch.where(mask_NT, score_NT, 0).log1p()
    low_N1 = torch.where(mask_NT, log_NT, torch.inf).amin(1, keepdim=True)
    high_N1 = torch.where(mask_NT, log_NT, -torch.inf).amax(1, keepdim=True)
    mask_NT = mask_NT & (high_N1 - low_N1 > EPS)
    scaled_NT = (log_NT - low_N1) / (high_N1 - low_N1)
    return torch.where(mask_NT, scaled_NT, 0), mask_NT


def _spread(
    before_NT: Tensor,
    after_NT: Tensor,
    batch: TokenBatch,
    *,
    quantile: float,
    reduce: Reduce = LOCAL,
) -> dict[str, Tensor]:
    scaled_NT, mask_NT = influence(batch)
    has_N, tau_N = mask_NT.any(1), row_quantile(scaled_NT, mask_NT, quantile)[:, 0]
    return {
        "scored_frac": masked_mean(has_N.double(), batch.mask_NT.any(1), reduce),
        "tau": masked_mean(tau_N, has_N, reduce),
    }


@declare(needs="importance_NT", report=_spread)
def answer_influence(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    quantile: float = 0.5,
    beta: float = 1.0,
    floor: float = 0.1,
) -> Tensor:
    """Credit by each reasoning token's influence on the distribution of the answer.

    credit' = credit * w L / sum w, w = max(I / tau, floor) where I < tau, 1 + beta (I - tau) / (1 -
    tau) elsewhere

    I is log1p of ``importance_NT``, scaled in each rollout so that its least is 0 and its largest
    1; tau is a quantile of I in the rollout, L its number of scored tokens. Weights have mean 1
    over them. Tokens without a score (below 0: the answer, all of a rollout without one) keep their
    credit, and so does a rollout whose scores are all the same. Keeps the sign and, where all
    tokens of a rollout came with one credit, the mass of each rollout.

    Args:
        credit_NT: [N, T].
        batch: reads importance_NT.
        quantile: q in [0, 1], of tau; 0 damps no token.
        beta: >= 0, how much more the most influential token gets.
        floor: in [0, 1], the least weight before scaling.

    Reference: OAR, arXiv 2601.07408, and the authors' code (floor 0.1). ``quantile`` and ``beta``
        are our reading: neither is given there. Departs from the code in that scores which differ
        by less than 1e-8 are constant, instead of 1e-8 in every denominator.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2, 3, 4]],
    ...     group=[0],
    ...     reward=[1.0],
    ...     sampler_logp=[[-1.0] * 4],
    ...     importance=[[0.0, 0.3, 2.0, -1.0]],
    ... )
    >>> answer_influence(torch.ones(1, 4), batch)
    tensor([[0.0968, 0.9677, 1.9355, 1.0000]])
    """
    check_number("answer_influence", least=0, most=1, quantile=quantile)
    check_number("answer_influence", least=0, beta=beta)
    check_number("answer_influence", least=0, most=1, floor=floor)
    scaled_NT, mask_NT = influence(batch)
    tau_N1 = row_quantile(scaled_NT, mask_NT, quantile)
    low_NT = (scaled_NT / tau_N1.clamp(min=1e-300)).clamp(min=floor)
    gain_NT = (scaled_NT - tau_N1) / torch.where(tau_N1 < 1, 1 - tau_N1, 1)
    raw_NT = torch.where(scaled_NT < tau_N1, low_NT, 1 + beta * gain_NT)
    sum_N1 = torch.where(mask_NT, raw_NT, 0).sum(1, keepdim=True)
    scale_N1 = mask_NT.sum(1, keepdim=True) / torch.where(sum_N1 > 0, sum_N1, 1)
    weight_NT = torch.where(mask_NT, raw_NT * scale_N1, 1)
    return credit_NT * weight_NT.to(credit_NT.dtype)
