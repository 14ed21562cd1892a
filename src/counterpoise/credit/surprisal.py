"""Rules that read how improbable a token was among all tokens of the batch: surprisal_boost,
rare_uncertain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.credit.entropy import pooled_quantile
from counterpoise.errors import check_number
from counterpoise.maths.reduce import LOCAL, Reduce, masked_mean
from counterpoise.maths.select import highest_of_batch
from counterpoise.stage import declare
from counterpoise.types import TokenBatch


def _boosted(
    before_NT: Tensor, after_NT: Tensor, batch: TokenBatch, *, reduce: Reduce = LOCAL
) -> dict[str, Tensor]:
    is_changed_NT = before_NT != after_NT
    frac = masked_mean(is_changed_NT.to(before_NT.dtype), batch.mask_NT, reduce)
    return {
        "changed_frac": frac,
        "changed_logp": masked_mean(batch.sampler_logp_NT, is_changed_NT, reduce),
    }


@declare(report=_boosted)
def surprisal_boost(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    share: float = 0.1,
    boost: float = 1.1,
    damp: float = 1.0,
    reduce: Reduce = LOCAL,
) -> Tensor:
    """Reward surprising tokens a little more, and punish them a little less.

    credit' = boost * credit on the max(1, ceil(share n)) most surprising of the n tokens with
    credit > 0, damp * credit on the same share of those with credit < 0; elsewhere credit

    Surprisal is -log p under the sampler; n counts the tokens of all ranks, and tokens that tie
    with the last one chosen are chosen too. Keeps the sign, not the mass. ``boost = damp = 1``
    changes nothing.

    Args:
        credit_NT: [N, T].
        share: in (0, 1].
        boost: W >= 0, of rewarded tokens.
        damp: M >= 0, of punished tokens; 1 leaves them alone, the paper's variant C2 has 0.9.

    Reference: STARE, arXiv 2606.19236 (1.1 and 0.9; 1.05 and 0.95 from 14B on). Departs from the
        authors' code, which ranks the trainer's log-probs inside a micro-batch.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2, 3, 4]], group=[0], reward=[1.0], sampler_logp=[[-0.1, -2.0, -0.5, -3.0]]
    ... )
    >>> surprisal_boost(torch.ones(1, 4), batch, share=0.25, boost=1.5).tolist()
    [[1.0, 1.0, 1.0, 1.5]]
    """
    check_number("surprisal_boost", above=0, most=1, share=share)
    check_number("surprisal_boost", least=0, boost=boost, damp=damp)
    surprisal_NT = -batch.sampler_logp_NT
    sides = ((credit_NT > 0, boost), (credit_NT < 0, damp))
    out_NT = credit_NT
    for is_side_NT, factor in sides:
        is_chosen_NT = highest_of_batch(surprisal_NT, is_side_NT, share, reduce)
        out_NT = torch.where(is_chosen_NT, factor * credit_NT + 0.0, out_NT)
    return out_NT


@declare(needs="entropy_NT")
def rare_uncertain(
    credit_NT: Tensor, batch: TokenBatch, *, fraction: float = 0.2, reduce: Reduce = LOCAL
) -> Tensor:
    """Credit on the rarest tokens alone, more of it where the policy was less certain.

    credit' = credit (1/2 + (H - Hmin) / (2 (Hmax - Hmin))) where the sampler's log-prob is at most
    the ``fraction`` quantile of all response tokens, else 0; Hmin and Hmax of the entropy H over
    the tokens that are kept

    All pooled over ranks. The factor is in [1/2, 1], and 3/4 where Hmax = Hmin. Keeps the sign, not
    the mass; tokens that tie at the quantile are all kept.

    Args:
        credit_NT: [N, T].
        fraction: share of tokens kept, in (0, 1].

    Reference: OPSA, arXiv 2608.31046, read second hand; its code was not readable. There credit is
        -1 everywhere (advantage ``constant``). Reads the paper as: the quantile is that of the
        batch, Hmin and Hmax are over the kept tokens, and equal entropies give 3/4. Experimental.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2, 3]],
    ...     group=[0],
    ...     reward=[0.0],
    ...     sampler_logp=[[-4.0, -0.1, -4.0]],
    ...     entropy=[[1.0, 5.0, 2.0]],
    ... )
    >>> rare_uncertain(torch.full((1, 3), -1.0), batch, fraction=0.5).tolist()
    [[-0.5, 0.0, -1.0]]
    """
    check_number("rare_uncertain", above=0, most=1, fraction=fraction)
    entropy_NT, logp_NT = batch.column("entropy_NT"), batch.sampler_logp_NT
    is_rare_NT = batch.mask_NT & (
        logp_NT <= pooled_quantile(logp_NT, batch.mask_NT, fraction, reduce)
    )
    low, high = (pooled_quantile(entropy_NT, is_rare_NT, level, reduce) for level in (0.0, 1.0))
    is_flat = low == high
    place_NT = torch.where(is_flat, 0.5, (entropy_NT - low) / torch.where(is_flat, 1, high - low))
    return torch.where(is_rare_NT, credit_NT * (1 + place_NT).to(credit_NT.dtype) / 2, 0)
