"""Rules that read the probability of a token: probability_scaled, covariance, kl_penalty."""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.credit.draws import token_keys
from counterpoise.errors import check_number
from counterpoise.maths.covariance import token_covariance
from counterpoise.maths.kl import kl_estimator
from counterpoise.maths.reduce import LOCAL, Reduce, masked_mean
from counterpoise.stage import Stage, declare
from counterpoise.types import TokenBatch


@Stage
def probability_scaled(credit_NT: Tensor, batch: TokenBatch, *, alpha: float = 0.3) -> Tensor:
    """Damp unlikely tokens, whose gradients are the largest.

    credit' = credit (alpha p + 1 - alpha), p the sampler's probability of the token

    Keeps the sign, not the mass (it can only fall). ``alpha = 0`` changes nothing.

    Args:
        credit_NT: [N, T].
        alpha: in [0, 1].

    Reference: Advantage Reweighting, arXiv 2505.12929 (alpha 0.3). Departs from the paper in that p
        is the sampler's, not that of the
    policy in training; they agree at the first update of a batch.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2]], group=[0], reward=[1.0], sampler_logp=[[0.0, -20.0]]
    ... )
    >>> probability_scaled(torch.ones(1, 2), batch)
    tensor([[1.0000, 0.7000]])
    """
    check_number("probability_scaled", least=0, most=1, alpha=alpha)
    factor_NT = alpha * batch.sampler_logp_NT.exp() + (1 - alpha)
    return torch.where(batch.mask_NT, credit_NT * factor_NT.to(credit_NT.dtype), 0)


def _dropped(
    before_NT: Tensor,
    after_NT: Tensor,
    batch: TokenBatch,
    *,
    low: float = 1.0,
    high: float = 5.0,
    reduce: Reduce = LOCAL,
) -> dict:
    covariance_NT = token_covariance(batch.sampler_logp_NT, before_NT, batch.mask_NT, reduce)
    return {
        "band_frac": masked_mean(
            ((covariance_NT > low) & (covariance_NT < high)).to(before_NT.dtype),
            batch.mask_NT,
            reduce,
        ),
        "covariance_mean": masked_mean(covariance_NT, batch.mask_NT, reduce),
        "dropped": reduce.sum(((before_NT != 0) & (after_NT == 0)).sum()),
    }


@declare(report=_dropped)
def covariance(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    fraction: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    reduce: Reduce = LOCAL,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Spare a few of the tokens that drive the entropy down.

    credit' = 0 on max(1, floor(fraction * M)) tokens drawn at random from those with low < cov <
    high (all of them, if there are fewer), cov = (logp - mean)(credit - mean), M and the means over
    all response tokens of all ranks; elsewhere credit' = credit.

    Keeps the sign, not the mass. A batch with no token in the band is unchanged.

    Args:
        credit_NT: [N, T].
        fraction: in (0, 1].
        low, high: the open band of covariance.
        generator: draws; identical rollouts of a prompt are drawn together, so the draw depends on
            no order, padding or rank.

    Reference: Clip-Cov, arXiv 2505.22617; the number and the band are those of verl's ``clip_cov``.
        Departs from it in that the selection is
    made once for the batch with the sampler's log-probs, and not at each update
    among the tokens that are not clipped.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2], [3, 4]],
    ...     group=[0, 0],
    ...     reward=[1.0, 0.0],
    ...     sampler_logp=[[0.0, -3.0], [-3.0, -3.0]],
    ... )
    >>> covariance(
    ...     torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), batch
    ... ).tolist()  # covariances 2.25, -0.75, 0.75, 0.75
    [[0.0, 1.0], [-1.0, -1.0]]
    """
    check_number("covariance", above=0, most=1, fraction=fraction)
    check_number("covariance", low=low)
    check_number("covariance", above=low, or_infinite=True, high=high)
    covariance_NT = token_covariance(batch.sampler_logp_NT, credit_NT, batch.mask_NT, reduce)
    is_candidate_NT = batch.mask_NT & (covariance_NT > low) & (covariance_NT < high)
    key_NT = token_keys(batch, generator)
    key_C = reduce.cat(key_NT[is_candidate_NT])
    if len(key_C) == 0:
        return credit_NT
    count = min(max(int(fraction * int(reduce.sum(batch.mask_NT.sum()))), 1), len(key_C))
    return torch.where(is_candidate_NT & (key_NT <= key_C.sort().values[count - 1]), 0, credit_NT)


def _mean_kl(
    before_NT: Tensor,
    after_NT: Tensor,
    batch: TokenBatch,
    *,
    estimator: str = "k1",
    reduce: Reduce = LOCAL,
) -> dict[str, Tensor]:
    kl_NT = kl_estimator(estimator)(batch.sampler_logp_NT, batch.column("ref_logp_NT"))
    return {"kl": masked_mean(kl_NT, batch.mask_NT, reduce)}


@declare(needs="ref_logp_NT", report=_mean_kl)
def kl_penalty(
    credit_NT: Tensor, batch: TokenBatch, *, estimator: str = "k1", coef: float = 1e-3
) -> Tensor:
    """Take a per-token KL penalty out of the credit.

    credit' = credit - coef * k(sampler_logp, ref_logp), k one of the three estimators of
    ``counterpoise.maths.kl``

    Keeps neither the mass nor the sign. ``coef = 0`` changes nothing. As credit the penalty is a
    reward on single tokens and has no gradient of its own; the loss term of the same name
    differentiates it.

    Args:
        credit_NT: [N, T].
        estimator: ``k1``, ``k2`` or ``k3``.
        coef: >= 0.

    Reference: J. Schulman, "Approximating KL Divergence" (2020); KL in the reward as in arXiv
        2203.02155, here by token and after the
    advantage.

    >>> batch = TokenBatch.from_lists(
    ...     [[1]], group=[0], reward=[1.0], sampler_logp=[[-1.0]], ref_logp=[[-3.0]]
    ... )
    >>> kl_penalty(torch.ones(1, 1), batch, coef=0.25).tolist()
    [[0.5]]
    """
    check_number("kl_penalty", least=0, coef=coef)
    kl_NT = kl_estimator(estimator)(batch.sampler_logp_NT, batch.column("ref_logp_NT"))
    return torch.where(batch.mask_NT, credit_NT - coef * kl_NT.to(credit_NT.dtype), 0)
