"""Losses whose ratio belongs to a rollout or to a prefix of it.

The ratio is detached; each token brings its own derivative.

With s = f(all ratios of a row), a token's ratio is s * r_t / sg(r_t): its value is s, its
derivative by the token's own log-prob is s, and by any other token's 0. Where s is a mean in log
space, s = exp(1/n sum log r), and credit and scale are the same along a row, the gradient equals
that of the sequence-level objective: there every token gets n terms of size s/n, here one of size
s."""

from __future__ import annotations

from torch import Tensor

from counterpoise.errors import check_number
from counterpoise.losses.token_loss import (
    Parts,
    bounded_exp,
    clamp_by_side,
    log_ratio,
    own_gradient,
    token_loss,
)
from counterpoise.types import Rows


def mean_log_ratio(log_ratio_NT: Tensor, rows: Rows) -> Tensor:
    """(1/n) sum_t log r_t of each rollout, [N, 1]."""
    return log_ratio_NT.sum(1, keepdim=True) / rows.mask_NT.sum(1, keepdim=True).clamp(min=1)


@token_loss
def sequence_ratio(
    trainer_logp_NT: Tensor,
    rows: Rows,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    mean: bool = True,
) -> Parts:
    """GSPO: s_i = exp(mean_t log r_t), L = -min(s c, clip(s, 1 - clip_low, 1 + clip_high) c) on
    every token of the rollout. Without ``mean`` s_i = exp(sum_t log r_t), the ratio of the whole
    rollout.

    Coef is s_i c, and 0 where s_i is clipped on the side of c. This is the paper's token form: the
    same gradient as its sequence form while credit and scale are constant along a row, and still
    defined when a credit rule makes them differ.

    Args:
        clip_low, clip_high: widths of the clip of s_i.
        mean: False takes the ratio of the whole rollout; with ``constant_length(length=1)`` this
            is the gradient of -(1/N) sum_i min(s_i A_i, clip(s_i) A_i), as in TRL's RLOO, which
            has widths of 0.2.

    Reference: arXiv 2507.18071, Eq. 7 (s_i), Eq. 13 and 14 (token form), section 5.1 (widths).
    """
    check_number(
        "sequence_ratio", least=0, or_infinite=True, clip_low=clip_low, clip_high=clip_high
    )
    log_ratio_NT = log_ratio(trainer_logp_NT, rows)
    log_N1 = mean_log_ratio(log_ratio_NT, rows) if mean else log_ratio_NT.sum(1, keepdim=True)
    ratio_NT = own_gradient(bounded_exp(log_N1).expand_as(log_ratio_NT), log_ratio_NT)
    inner_NT, is_cut_NT = clamp_by_side(ratio_NT, rows.credit_NT, 1 - clip_low, 1 + clip_high)
    return -rows.credit_NT * inner_NT, ratio_NT, is_cut_NT


@token_loss
def geometric(
    trainer_logp_NT: Tensor, rows: Rows, *, clip_low: float = 0.4, clip_high: float = 0.4
) -> Parts:
    """GMPO: s_i = exp(mean_t k_t), k_t = log r_t clipped by side in log space, L = -c s_i,
    differentiated through the token's own k_t.

    k_t <= clip_high where c > 0, k_t >= -clip_low where c < 0, both where c = 0. Coef is s_i c, and
    0 on clipped tokens, which still count in the mean. With credit constant along a row and
    ``per_sequence`` this is the gradient of -(1/N) sum_i A_i s_i.

    Args:
        clip_low, clip_high: bounds of log r, so a ratio between exp(-clip_low) and exp(clip_high).

    Reference: arXiv 2507.20673, whose clip range is (e^-0.4, e^0.4).
    """
    check_number("geometric", least=0, or_infinite=True, clip_low=clip_low, clip_high=clip_high)
    log_ratio_NT = log_ratio(trainer_logp_NT, rows)
    inner_NT, is_cut_NT = clamp_by_side(log_ratio_NT, rows.credit_NT, -clip_low, clip_high)
    ratio_NT = own_gradient(
        bounded_exp(mean_log_ratio(inner_NT, rows)).expand_as(inner_NT), inner_NT
    )
    return -rows.credit_NT * ratio_NT, ratio_NT, is_cut_NT


@token_loss
def cumulative(
    trainer_logp_NT: Tensor,
    rows: Rows,
    *,
    clip_low: float = 0.025,
    clip_high: float = 0.05,
    dual_clip: float = 0.05,
    power: float = 0.5,
) -> Parts:
    """CTPO: R_t = prod_{s <= t} r_s, clipped in log space to [-clip_low t^power, clip_high t^power]
    on the side that c names.

    L = -c R_t after the clip, differentiated through the token's own r_t; for c < 0 log R_t counts
    for at most dual_clip t^power. t counts response tokens from 1. The prefix product corrects the
    token's gradient for how its context was sampled, without the rest of the rollout; its log
    spreads like sqrt(t), hence the bounds.

    Args:
        clip_low, clip_high, dual_clip: log-space bounds at t = 1; ``inf`` switches one off.
        power: growth of the bounds with the position.

    Reference: arXiv 2605.07331; bounds, dual clip and defaults as in the authors' released code.
    """
    check_number("cumulative", least=0, or_infinite=True, clip_low=clip_low, clip_high=clip_high)
    check_number("cumulative", above=0, or_infinite=True, dual_clip=dual_clip)
    check_number("cumulative", least=0, power=power)
    log_ratio_NT = log_ratio(trainer_logp_NT, rows)
    prefix_NT = (log_ratio_NT.cumsum(1) - log_ratio_NT).detach() + log_ratio_NT
    growth_NT = rows.mask_NT.cumsum(1).clamp(min=1).to(prefix_NT.dtype) ** power
    inner_NT, is_cut_NT = clamp_by_side(
        prefix_NT,
        rows.credit_NT,
        -clip_low * growth_NT,
        clip_high * growth_NT,
        dual_clip * growth_NT,
    )
    return -rows.credit_NT * bounded_exp(inner_NT), bounded_exp(prefix_NT), is_cut_NT
