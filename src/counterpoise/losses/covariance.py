"""Clip-Cov and KL-Cov: act on the few tokens whose log-prob and credit rise above their means
together, which drive entropy down.

The tokens are chosen over the whole update with the trainer's log-probs, before it is cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.errors import check_number
from counterpoise.losses.ratio import clip_by_side
from counterpoise.losses.token_loss import Parts, bounded_exp, log_ratio, token_loss
from counterpoise.maths.covariance import token_covariance
from counterpoise.maths.reduce import seeded_generator
from counterpoise.types import Rows


def _num_chosen(fraction: float, mask_NT: Tensor) -> int:
    return max(int(fraction * int(mask_NT.sum())), 1)


def _update_dropped(
    update_logp_NT: Tensor,
    rows: Rows,
    *,
    clip_low: float,
    clip_high: float,
    fraction: float,
    low: float,
    high: float,
    seed: int,
) -> Tensor:
    """1 on the tokens drawn from the band, 0 elsewhere.

    Drawn in the order of the rows' numbers, so that the rows' order does not matter.
    """
    check_number("clip_cov", above=0, most=1, fraction=fraction)
    check_number("clip_cov", low=low)
    check_number("clip_cov", above=low, or_infinite=True, high=high)
    _, _, is_cut_NT = clip_by_side("clip_cov", update_logp_NT, rows, clip_low, clip_high)
    cov_NT = token_covariance(update_logp_NT, rows.credit_NT, rows.mask_NT)
    order_N = rows.row_R.argsort()
    band_NT = ((cov_NT > low) & (cov_NT < high) & rows.mask_NT & ~is_cut_NT)[order_N]
    place_K2 = band_NT.nonzero()
    generator = seeded_generator(seed, 0, f"clip_cov/{rows.row_R[order_N].tolist()}")
    drawn_K = torch.randperm(len(place_K2), generator=generator)[
        : _num_chosen(fraction, rows.mask_NT)
    ].to(place_K2.device)
    row_K, token_K = place_K2[drawn_K].unbind(1)
    return torch.zeros_like(update_logp_NT).index_put(
        (order_N[row_K], token_K), update_logp_NT.new_ones(())
    )


@token_loss(prepare=_update_dropped)
def clip_cov(
    trainer_logp_NT: Tensor,
    rows: Rows,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    fraction: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    seed: int = 0,
) -> Parts:
    """Clip-Cov: ``clipped``, and a small random share of the tokens in a band of covariance loses
    its gradient.

    cov = (logp - mean)(credit - mean), the means over the update's tokens. Of the tokens with low <
    cov < high that the clip has not cut, max(int(fraction * tokens), 1) are drawn at random (all,
    if there are fewer); they are dropped: loss 0, coef 0, ``clipped``.

    Args:
        clip_low, clip_high: as in ``clipped``.
        fraction: share of the update's tokens to drop.
        low, high: the band of covariance.
        seed: with the update's row numbers it decides the draw.

    Reference: arXiv 2505.22617; the details are those of verl's ``clip_cov``. Departs from verl in
        that the means and the draw are over
    the whole update, not over a micro-batch, so that no cut changes the gradient.
    """
    assert rows.update_NT is not None
    loss_NT, ratio_NT, is_cut_NT = clip_by_side(
        "clip_cov", trainer_logp_NT, rows, clip_low, clip_high
    )
    is_dropped_NT = rows.update_NT > 0
    return torch.where(is_dropped_NT, 0, loss_NT), ratio_NT, is_cut_NT | is_dropped_NT


def _update_penalised(update_logp_NT: Tensor, rows: Rows, *, fraction: float) -> Tensor:
    """1 on the tokens with the largest covariance, 0 elsewhere."""
    check_number("kl_cov", above=0, most=1, fraction=fraction)
    cov_NT = token_covariance(update_logp_NT, rows.credit_NT, rows.mask_NT).masked_fill(
        ~rows.mask_NT, -torch.inf
    )
    top_K = cov_NT.flatten().topk(_num_chosen(fraction, rows.mask_NT)).indices
    return torch.zeros_like(cov_NT).flatten().index_fill(0, top_K, 1).view_as(cov_NT)


@token_loss(prepare=_update_penalised)
def kl_cov(
    trainer_logp_NT: Tensor, rows: Rows, *, fraction: float = 2e-4, coef: float = 1.0
) -> Parts:
    """KL-Cov: L = -c r, plus coef |log r| on the tokens with the largest covariance. Unclipped.

    cov as in ``clip_cov``; max(int(fraction * tokens), 1) tokens are penalised. At r = 1 the
    penalty has no gradient, so it acts from the second update of a batch on.

    Args:
        fraction: share of the update's tokens to penalise.
        coef: strength of the penalty; 1 is the default of verl's function, its configuration has
            0.1.

    Reference: arXiv 2505.22617; the details are those of verl's ``kl_cov``. Departs from verl as
        ``clip_cov`` does.
    """
    check_number("kl_cov", least=0, coef=coef)
    assert rows.update_NT is not None
    log_ratio_NT = log_ratio(trainer_logp_NT, rows)
    ratio_NT = bounded_exp(log_ratio_NT)
    return (
        -rows.credit_NT * ratio_NT + coef * rows.update_NT * log_ratio_NT.abs(),
        ratio_NT,
        torch.zeros_like(rows.mask_NT),
    )
