"""Losses of a token's own ratio r = exp(trainer - sampler log-prob): every token stands for itself.
c is its credit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from counterpoise.errors import check_number
from counterpoise.losses.token_loss import Parts, bounded_exp, clamp_by_side, log_ratio, token_loss
from counterpoise.types import Rows


def clip_by_side(
    stage: str,
    trainer_logp_NT: Tensor,
    rows: Rows,
    clip_low: float,
    clip_high: float,
    ceiling: float = math.inf,
) -> Parts:
    """-min(r c, clip(r, 1 - clip_low, 1 + clip_high) c), at most -ceiling c where c < 0."""
    check_number(stage, least=0, or_infinite=True, clip_low=clip_low, clip_high=clip_high)
    check_number(stage, above=1, or_infinite=True, dual_clip=ceiling)
    ratio_NT = bounded_exp(log_ratio(trainer_logp_NT, rows))
    inner_NT, is_cut_NT = clamp_by_side(
        ratio_NT, rows.credit_NT, 1 - clip_low, 1 + clip_high, ceiling
    )
    return -rows.credit_NT * inner_NT, ratio_NT, is_cut_NT


@token_loss
def reinforce(trainer_logp_NT: Tensor, rows: Rows) -> Parts:
    """The score function: L = -c logp, coef = c. No ratio, no clip.

    Reference: Williams 1992. It is the control of every method here: at r = 1 the unclipped losses
        have its gradient.
    """
    ratio_NT = bounded_exp(log_ratio(trainer_logp_NT, rows))
    return -rows.credit_NT * trainer_logp_NT, ratio_NT, torch.zeros_like(rows.mask_NT)


@token_loss
def clipped(
    trainer_logp_NT: Tensor,
    rows: Rows,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = math.inf,
) -> Parts:
    """PPO's clip: L = -min(r c, clip(r, 1 - clip_low, 1 + clip_high) c), and for c < 0 at most
    -dual_clip c.

    Coef is r c, and 0 where the token is clipped: above 1 + clip_high for c > 0, below 1 - clip_low
    or above dual_clip for c < 0.

    Args:
        clip_low, clip_high: widths of the clip, ``inf`` switches one off.
        dual_clip: largest ratio of a token with negative credit, ``inf`` for none.

    Reference: arXiv 1707.06347, Eq. 7; asymmetric as in DAPO (2503.14476, Eq. 8); dual clip as in
        1912.09729, Eq. 5.
    """
    return clip_by_side("clipped", trainer_logp_NT, rows, clip_low, clip_high, dual_clip)


@token_loss
def dual_clip(
    trainer_logp_NT: Tensor,
    rows: Rows,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float = 10.0,
) -> Parts:
    """``clipped`` with its third bound on: the ratio of a token with negative credit counts for at
    most ``dual_clip``.

    Without it one token that the trainer has come to like and the grader does not can dominate a
    update: its ratio has no upper bound.

    Reference: arXiv 1912.09729, Eq. 5; defaults as in DelTA (2605.21467). verl's default ceiling is
        3.
    """
    return clip_by_side("dual_clip", trainer_logp_NT, rows, clip_low, clip_high, dual_clip)


@token_loss
def symmetric_clip(trainer_logp_NT: Tensor, rows: Rows, *, clip: float = 0.2) -> Parts:
    """A clip that does not look at the sign: L = -c clip(r, 1 - clip, 1 + clip), coef = r c 1[1 -
    clip <= r <= 1 + clip].

    PPO's clip drops a shared token for one sign only, so that what the two signs say of it no
    longer cancels; this one drops it for both.

    Reference: the GRPO-fix of arXiv 2604.13088 v1. Reads the paper as a mask on both signs.
    """
    check_number("symmetric_clip", least=0, or_infinite=True, clip=clip)
    ratio_NT = bounded_exp(log_ratio(trainer_logp_NT, rows))
    inner_NT = ratio_NT.clamp(1 - clip, 1 + clip)
    return -rows.credit_NT * inner_NT, ratio_NT, inner_NT != ratio_NT


@token_loss
def detached_ratio(
    trainer_logp_NT: Tensor, rows: Rows, *, clip_low: float = math.inf, clip_high: float = 4.0
) -> Parts:
    """CISPO: L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) c logp.

    No token loses its gradient; ``clipped_NT`` marks cut weights.

    Args:
        clip_low: width below 1, off by default, as in the paper's experiments and in TRL.
        clip_high: width above 1. The default bounds the weight by 5, the value of ScaleRL (arXiv
            2510.13786) that TRL recommends;
            TRL's ``epsilon_high`` is that bound itself, 1 + clip_high.

    Reference: arXiv 2506.13585 (MiniMax-M1), Eq. 4 and 5, which gives no values.
    """
    check_number(
        "detached_ratio", least=0, or_infinite=True, clip_low=clip_low, clip_high=clip_high
    )
    ratio_NT = bounded_exp(log_ratio(trainer_logp_NT, rows))
    weight_NT = ratio_NT.clamp(1 - clip_low, 1 + clip_high).detach()
    return -weight_NT * rows.credit_NT * trainer_logp_NT, ratio_NT, weight_NT != ratio_NT


@token_loss
def soft_gate(
    trainer_logp_NT: Tensor, rows: Rows, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> Parts:
    """SAPO: L = -c (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos where c > 0, else tau_neg.

    Nothing is clipped.

    Coef is r c times 4 s (1 - s) with s the sigmoid: 1 at r = 1, falling smoothly on both sides,
    faster for the larger tau.

    Reference: arXiv 2511.20347.
    """
    check_number("soft_gate", above=0, tau_pos=tau_pos, tau_neg=tau_neg)
    ratio_NT = bounded_exp(log_ratio(trainer_logp_NT, rows))
    tau_NT = torch.where(
        rows.credit_NT > 0, ratio_NT.new_tensor(tau_pos), ratio_NT.new_tensor(tau_neg)
    )
    gate_NT = torch.sigmoid(tau_NT * (ratio_NT - 1)) * 4 / tau_NT
    return -rows.credit_NT * gate_NT, ratio_NT, torch.zeros_like(rows.mask_NT)


@token_loss
def contrastive(
    trainer_logp_NT: Tensor, rows: Rows, *, clip_low: float = 0.2, clip_high: float = 10.0
) -> Parts:
    """C-RF: L = -c min(r, 1 + clip_high) where c > 0, -c max(r, 1 - clip_low) where c < 0.

    With the advantage ``signs`` and the reduction ``side_means`` it is half the mean over correct
    rollouts minus half the mean over failed ones, each over all tokens of a rollout, filtered ones
    included. The shape is ``clipped``'s; what differs is how far a good token may go before it is
    let go.

    Reference: arXiv 2606.17250.
    """
    return clip_by_side("contrastive", trainer_logp_NT, rows, clip_low, clip_high)
