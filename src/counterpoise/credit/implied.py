"""VIMPO's actor: the advantage that is implied by the log-ratio to the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.errors import check_number
from counterpoise.maths.reduce import LOCAL, Reduce, masked_mean
from counterpoise.stage import declare
from counterpoise.types import TokenBatch


def implied_terms(batch: TokenBatch, beta: float) -> Tensor:
    """beta (trainer_logp - ref_logp - KL) of each model token, float64; 0 elsewhere."""
    names = ("trainer_logp_NT", "ref_logp_NT", "ref_kl_NT")
    logp_NT, ref_NT, kl_NT = (batch.column(name).double() for name in names)
    return torch.where(batch.mask_NT, beta * (logp_NT - ref_NT - kl_NT), 0)


def _values(
    before_NT: Tensor, after_NT: Tensor, batch: TokenBatch, *, beta: float, reduce: Reduce = LOCAL
) -> dict[str, Tensor]:
    value_N, every_N = implied_terms(batch, beta).sum(1), batch.mask_NT.any(1)
    return {
        "ref_kl": masked_mean(batch.column("ref_kl_NT").double(), batch.mask_NT, reduce),
        "value": masked_mean(value_N, every_N, reduce),
        "value_size": masked_mean(value_N.square(), every_N, reduce).sqrt(),
    }


@declare(needs=("trainer_logp_NT", "ref_logp_NT", "ref_kl_NT"), report=_values)
def implied_advantage(
    credit_NT: Tensor, batch: TokenBatch, *, beta: float = 5e-4, decay: float = 1.0
) -> Tensor:
    """Credit from the log-ratio to the reference; what came in is replaced.

    term_t = beta (trainer_logp - ref_logp - KL(trainer || ref)_t), A_t = sum_{l >= t} decay^(l - t)
    term_l over the model tokens of the rollout

    KL is exact over the vocabulary, so that a term has mean 0 under the policy: it says whether
    the token drawn was one that training has made likelier than its siblings. Where the policy is
    the reference all credit is 0. Keeps neither the sign nor the mass.

    Args:
        credit_NT: [N, T], not read.
        beta: > 0, the same as in the loss ``implied_value``; under ``whiten`` it does not matter.
        decay: in [0, 1], the lambda of the sum.

    Reference: VIMPO, arXiv 2606.20008 (beta 5e-4, lambda 1), who whiten it over the batch.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2]],
    ...     group=[0],
    ...     reward=[1.0],
    ...     sampler_logp=[[-1.0] * 2],
    ...     trainer_logp=[[-1.0, -1.0]],
    ...     ref_logp=[[-1.2, -0.9]],
    ...     ref_kl=[[0.05, 0.05]],
    ... )
    >>> [round(x, 4) for x in implied_advantage(torch.ones(1, 2), batch, beta=0.1)[0].tolist()]
    [0.0, -0.015]
    """
    check_number("implied_advantage", above=0, beta=beta)
    check_number("implied_advantage", least=0, most=1, decay=decay)
    term_NT = implied_terms(batch, beta)
    if decay == 1:
        total_NT = term_NT.flip(1).cumsum(1).flip(1)
    else:
        total_NT, rest_N = torch.zeros_like(term_NT), torch.zeros_like(term_NT[:, 0])
        for t in reversed(range(term_NT.shape[1])):
            rest_N = torch.where(batch.mask_NT[:, t], term_NT[:, t] + decay * rest_N, rest_N)
            total_NT[:, t] = rest_N
    return torch.where(batch.mask_NT, total_NT, 0).to(credit_NT.dtype)
