"""VinePPO and SPO: a segment's credit is what it added to the expected reward.

Axes as in ``types``; S segments of a rollout.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from counterpoise.credit.steps import SPLITS
from counterpoise.credit.values import measure_values
from counterpoise.errors import check_choice, check_number, check_whole
from counterpoise.maths.reduce import LOCAL, Reduce, masked_mean
from counterpoise.maths.turns import by_turn, over_tokens
from counterpoise.stage import declare
from counterpoise.types import TokenBatch


def _segments(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """The segment of every model token, and the value of every segment, [N, T] and [N, S]."""
    segment_NT = torch.where(batch.mask_NT, batch.column("segment_NT"), -1)
    num = max(int(segment_NT.max()) + 1, 1)
    return segment_NT, by_turn(batch.column("value_NT"), segment_NT, num)


def _values(
    before_NT: Tensor, after_NT: Tensor, batch: TokenBatch, *, reduce: Reduce = LOCAL
) -> dict[str, Tensor]:
    segment_NT, value_NS = _segments(batch)
    num_N = segment_NT.amax(1) + 1
    is_cut_N, start_N = num_N > 0, value_NS[:, 0]
    gap_N = batch.reward_N - start_N.to(batch.reward_N.dtype)
    zero_NT = (after_NT == 0) & (segment_NT >= 0)
    return {
        "segments": masked_mean(num_N.double(), torch.ones_like(is_cut_N), reduce),
        "cut_frac": masked_mean(is_cut_N.double(), torch.ones_like(is_cut_N), reduce),
        "start_value": masked_mean(start_N, is_cut_N, reduce),
        "start_gap": masked_mean(gap_N, is_cut_N, reduce),
        "zero_frac": masked_mean(zero_NT.double(), batch.mask_NT, reduce),
    }


@declare(needs=("segment_NT", "value_NT"), report=_values, collect=measure_values)
def prefix_value(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    split: str = "sentences",
    samples: int = 9,
    max_steps: int | None = None,
    every: int = 5,
    max_prob: float = 0.9,
) -> Tensor:
    """A segment's credit is what it added to the expected reward. REPLACES the incoming credit.

    credit' = V(next segment) - V(this one), and reward - V(this one) for the last; all tokens of a
    segment have it, tokens without a segment have 0

    V is ``value_NT``, the mean reward of ``samples`` fresh completions of the response up to where
    the segment begins. Over a rollout's segments it adds up to reward - V(start). Groups that are
    all right or all wrong get credit too. Keeps neither the sign nor the mass.

    Args:
        credit_NT: [N, T]; only its dtype is read.
        batch: reads segment_NT and value_NT; the rule itself samples them in the trainer.
        split: where segments begin: ``sentences`` (and lines), ``lines``, or ``improbable`` tokens.
        samples: completions per state.
        max_steps: segments whose start is valued; what follows them has the rollout's reward for
            its value, and so credit 0. None values all.
        every, max_prob: ``improbable`` cuts before every so many-th token that the sampler gave a
            probability less than ``max_prob``.

    Reference: VinePPO, arXiv 2410.01679 (``sentences``); SPO, arXiv 2505.23564 (``improbable``).
        Departs from SPO in that the text before the first cut is a segment too, whose value is the
        prompt's; there it has no credit.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2, 3, 4]],
    ...     group=[0],
    ...     reward=[1.0],
    ...     sampler_logp=[[-1.0] * 4],
    ...     segment_NT=torch.tensor([[0, 0, 1, 2]]),
    ...     value_NT=torch.tensor([[0.5, 0.5, 0.75, 0.25]]),
    ... )
    >>> prefix_value(torch.zeros(1, 4), batch).tolist()
    [[0.25, 0.25, -0.5, 0.75]]
    """
    check_choice("prefix_value", SPLITS, split=split)
    check_whole("prefix_value", least=1, samples=samples, every=every)
    check_whole("prefix_value", least=1, or_none=True, max_steps=max_steps)
    check_number("prefix_value", above=0, most=1, max_prob=max_prob)
    segment_NT, value_NS = _segments(batch)
    last_N1 = segment_NT.amax(1, keepdim=True).clamp(min=0)
    reward_N1 = batch.reward_N[:, None].to(value_NS.dtype)
    next_NS = pad(value_NS[:, 1:], (0, 1)).scatter(1, last_N1, reward_N1)
    return over_tokens(next_NS - value_NS, segment_NT).to(credit_NT.dtype)
