"""The gap between sampler and trainer: weights that undo it, bounded in one of several ways."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from counterpoise.errors import check_choice, check_number
from counterpoise.maths.reduce import LOCAL, Reduce, masked_mean
from counterpoise.stage import declare
from counterpoise.types import TokenBatch

# mode -> bounds of the weight where none are given
BOUNDS = {
    "none": (0.0, math.inf),
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "mis": (0.5, 2.0),
    "geo": (0.999, 1.001),
}
DROPS_ROLLOUTS = ("mis", "geo")
MAX_LOG_WEIGHT = 20.0


def log_gap(batch: TokenBatch) -> Tensor:
    """trainer - sampler log-prob of each token, both before the first update; 0 on padding."""
    gap_NT = batch.column("trainer_logp_NT") - batch.sampler_logp_NT
    return torch.where(batch.mask_NT, gap_NT, 0)


def _raw_weight(batch: TokenBatch, mode: str) -> Tensor:
    """The unbounded weight: of each token, or of its rollout, [N, T] or [N, 1]."""
    gap_NT = log_gap(batch)
    if mode == "mis":
        gap_NT = gap_NT.sum(1, keepdim=True)
    elif mode == "geo":
        gap_NT = gap_NT.sum(1, keepdim=True) / batch.length_N.clamp(min=1)[:, None]
    return gap_NT.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()


def _is_inside(
    batch: TokenBatch, mode: str, low: float | None, high: float | None
) -> tuple[Tensor, Tensor, float]:
    """Weights, where they are within the bounds, and the upper bound."""
    check_choice("mismatch_weight", tuple(BOUNDS), mode=mode)
    check_number("mismatch_weight", least=0, or_none=True, low=low)
    check_number("mismatch_weight", above=0, or_none=True, or_infinite=True, high=high)
    least = BOUNDS[mode][0] if low is None else low
    most = BOUNDS[mode][1] if high is None else high
    weight_NT = _raw_weight(batch, mode)
    return weight_NT, (weight_NT >= least) & (weight_NT <= most), most


def _kept(batch: TokenBatch, *, mode: str, low: float | None, high: float | None) -> Tensor | None:
    """[N] the rollouts that stay in the update's denominator; None where all do."""
    if mode not in DROPS_ROLLOUTS:
        return None
    return _is_inside(batch, mode, low, high)[1].squeeze(1)


def _numbers(
    before_NT: Tensor,
    after_NT: Tensor,
    batch: TokenBatch,
    *,
    mode: str,
    low: float | None,
    high: float | None,
    reduce: Reduce = LOCAL,
) -> dict[str, Tensor]:
    """Mean weight and share outside the bounds, over tokens; KL(sampler, trainer) of a rollout."""
    raw_NT, is_inside_NT, _ = _is_inside(batch, mode, low, high)
    weight_NT = mismatch_weight.fn(
        torch.ones_like(log_gap(batch)), batch, mode=mode, low=low, high=high
    )
    outside_NT = (~is_inside_NT).to(raw_NT.dtype).expand_as(weight_NT)
    kl_N = -log_gap(batch).sum(1)
    return {
        "weight_mean": masked_mean(weight_NT, batch.mask_NT, reduce),
        "outside_frac": masked_mean(outside_NT, batch.mask_NT, reduce),
        "sequence_kl": masked_mean(kl_N, batch.mask_NT.any(1), reduce),
    }


@declare(needs="trainer_logp_NT", report=_numbers, keeps=_kept, anchors_at_trainer=True)
def mismatch_weight(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    mode: str = "tis",
    low: float | None = None,
    high: float | None = None,
) -> Tensor:
    """credit' = w credit, w = p_trainer / p_sampler before the first update, bounded; and every
    ratio of the loss is then taken against the trainer's log-probs, not the sampler's.

    Without this rule r = trainer / sampler has the gap in it; a weight on top would count it twice,
    so the rule moves the anchor too. Keeps the sign, not the mass. Log-weights are clamped to +-20.

    | mode | w | bounds | outside |
    |---|---|---|---|
    | none | 1 | | only the anchor moves |
    | tis | token | at most 2 | the bound |
    | icepop | token | 0.5 to 5 | 0, still in the denominator |
    | mis | product over the rollout | 0.5 to 2 | the rollout leaves loss and denominator |
    | geo | geometric mean over the rollout | 0.999 to 1.001 | as mis |

    Args:
        credit_NT: [N, T].
        mode: one of the table.
        low, high: other bounds than the mode's; ``tis`` reads ``high`` alone.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2]],
    ...     group=[0],
    ...     reward=[1.0],
    ...     sampler_logp=[[-3.0, -1.0]],
    ...     trainer_logp=[[-3.0 + math.log(4), -1.0 + math.log(0.3)]],
    ... )
    >>> mismatch_weight(torch.ones(1, 2), batch, mode="tis")
    tensor([[2.0000, 0.3000]])
    >>> mismatch_weight(torch.ones(1, 2), batch, mode="icepop")
    tensor([[4., 0.]])

    Reference: TIS, F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
        Training" (2025); IcePop; MIS and geo are rejection as in verl's ``rollout_correction``.
        Reads kept rollouts of ``mis`` and ``geo`` as weighed by their w, which verl sets apart.
    """
    weight_NT, is_inside_NT, most = _is_inside(batch, mode, low, high)
    if mode == "none":
        return torch.where(batch.mask_NT, credit_NT, 0)
    bounded_NT = weight_NT.clamp(max=most) if mode == "tis" else weight_NT * is_inside_NT
    return torch.where(batch.mask_NT, credit_NT * bounded_NT.to(credit_NT.dtype), 0)
