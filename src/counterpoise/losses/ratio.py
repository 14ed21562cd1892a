"""Losses of the ratio family: reinforce, clipped, dual_clip, symmetric_clip, detached_ratio, soft_gate. r = exp(trainer - sampler log-prob)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from counterpoise.losses.token_loss import Parts, log_ratio, token_loss
from counterpoise.types import Rows


def check_clip(name: str, **bounds: float) -> None:
    """Clip widths are >= 0; ``inf`` switches one off."""
    for key, value in bounds.items():
        if not isinstance(value, (int, float)) or math.isnan(value) or value < 0:
            raise ValueError(f"{name}: {key} must be a number >= 0, got {value!r}.")


@token_loss
def reinforce(trainer_logp_NT: Tensor, rows: Rows) -> Parts:
    """L = -credit * logp, no ratio, no clip (Williams 1992). coef = credit."""
    ratio_NT = log_ratio(trainer_logp_NT, rows).exp()
    return -rows.credit_NT * trainer_logp_NT, ratio_NT, torch.zeros_like(rows.mask_NT)


@token_loss
def clipped(trainer_logp_NT: Tensor, rows: Rows, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = math.inf) -> Parts:
    """L = -min(r c, clip(r, 1 - clip_low, 1 + clip_high) c), and for c < 0 at most -dual_clip * c.

    PPO's clip (arXiv 1707.06347, Eq. 7), asymmetric as in DAPO (2503.14476, Eq. 8); ``dual_clip`` as in 1912.09729, Eq. 5. A token whose
    value comes from the clipped side is ``clipped`` and has coef 0.
    """
    check_clip("clipped", clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    if dual_clip <= 1:
        raise ValueError(f"clipped: dual_clip must be above 1 (a bound on the ratio of bad tokens), got {dual_clip!r}.")
    ratio_NT, credit_NT = log_ratio(trainer_logp_NT, rows).exp(), rows.credit_NT
    inner_NT = ratio_NT.clamp(1 - clip_low, 1 + clip_high)
    plain_NT, cut_NT = -credit_NT * ratio_NT, -credit_NT * inner_NT
    loss_NT = torch.maximum(plain_NT, cut_NT)
    is_cut_NT = cut_NT > plain_NT
    if math.isfinite(dual_clip):
        ceiling_NT = -credit_NT * dual_clip
        is_over_NT = (credit_NT < 0) & (loss_NT > ceiling_NT)
        loss_NT, is_cut_NT = torch.where(is_over_NT, ceiling_NT, loss_NT), is_cut_NT | is_over_NT
    return loss_NT, ratio_NT, is_cut_NT
