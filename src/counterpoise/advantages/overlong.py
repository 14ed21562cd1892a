"""Overlong shaping: the reward sinks as a response comes near the limit, before any advantage."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from counterpoise.advantages.group import as_float, group_zscore
from counterpoise.advantages.signs import successes
from counterpoise.errors import check_number, check_whole
from counterpoise.maths.reduce import LOCAL, Reduce
from counterpoise.stage import Stage, call, declare
from counterpoise.types import TokenBatch

SHARE = 5  # the buffer is the last fifth of the limit, as the authors' 4096 of 20480


def overlong_penalty(
    length_N: Tensor, *, limit: int, buffer: int | None = None, factor: float = 1.0
) -> Tensor:
    """min(-(length - (limit - buffer)) / buffer * factor, 0): 0 up to the buffer's start, -factor
    at the limit.

    >>> overlong_penalty(torch.tensor([16384, 18432, 20480]), limit=20480, buffer=4096).tolist()
    [0.0, -0.5, -1.0]
    """
    buffer = max(limit // SHARE, 1) if buffer is None else buffer
    if buffer > limit:
        raise ValueError(
            f"overlong: buffer must be at most the limit ({limit} tokens), got {buffer}. It is the"
            " part of the limit in which the penalty grows."
        )
    beyond_N = length_N.double() - (limit - buffer)
    return torch.clamp(-beyond_N / buffer * factor, max=0) + 0.0  # no -0.0


def _penalty(
    length_N: Tensor, limit: int | None, max_length: int | None, buffer: int | None, factor: float
) -> Tensor:
    check_whole("overlong", least=1, or_none=True, limit=limit, buffer=buffer)
    check_number("overlong", least=0, factor=factor)
    longest = limit or max_length
    if longest is None:
        raise ValueError(
            "overlong: the batch has no max_length. Give the generation limit:"
            " TokenBatch(max_length=...), or the parameter limit."
        )
    return overlong_penalty(length_N, limit=longest, buffer=buffer, factor=factor)


def _numbers(
    batch: TokenBatch,
    *,
    limit: int | None,
    buffer: int | None,
    factor: float,
    reduce: Reduce = LOCAL,
) -> dict[str, Tensor]:
    """Share of rollouts with a penalty, and the mean penalty of all."""
    penalty_N = _penalty(batch.length_N, limit, batch.max_length, buffer, factor)
    num = reduce.sum(penalty_N.new_tensor(len(penalty_N)))
    return {
        "penalised_frac": reduce.sum((penalty_N < 0).to(penalty_N).sum()) / num,
        "penalty": reduce.sum(penalty_N.sum()) / num,
    }


def _of_rule(fact: str) -> Callable[..., bool]:
    """What the advantage inside declares."""

    def ask(*, rule: Stage) -> bool:
        return rule.has(fact)

    return ask


@declare(
    report=_numbers, needs_groups=_of_rule("needs_groups"), reads_success=_of_rule("reads_success")
)
def overlong(
    reward_N: Tensor,
    group_N: Tensor,
    *,
    rule: Stage = group_zscore,
    limit: int | None = None,
    buffer: int | None = None,
    factor: float = 1.0,
    length_N: Tensor | None = None,
    max_length: int | None = None,
    success_N: Tensor | None = None,
    reduce: Reduce = LOCAL,
) -> Tensor:
    """Any advantage, of R + min(-(length - (limit - buffer)) / buffer * factor, 0).

    Successes stay those of the reward without the penalty. A prompt that is always solved, by
    answers of unequal length in the buffer, gets an advantage.

    Args:
        reward_N: [N] rewards.
        group_N: [N] the prompt of each rollout.
        rule: the advantage of the shaped rewards.
        limit: the longest response; None takes the batch's ``max_length`` (the generation limit).
        buffer: tokens before the limit over which the penalty grows; None takes a fifth of it.
        factor: the penalty at the limit.
        length_N: [N] tokens that the model wrote, offered by the caller.
        max_length: offered by the caller from the batch.
        success_N: [N] the successes, from the batch; None: reward >= 0.5.
        reduce: pools over ranks.

    >>> from counterpoise.advantages import group_mean
    >>> reward_N, group_N, length_N = torch.ones(2), torch.zeros(2), torch.tensor([80, 90])
    >>> overlong(
    ...     reward_N, group_N, rule=group_mean, limit=100, buffer=20, length_N=length_N
    ... ).tolist()
    [0.25, -0.25]

    Reference: DAPO, arXiv 2503.14476, Eq. 13; the form is that of the authors' recipe for verl
        (limit 20480, buffer 4096, factor 1).
    """
    if length_N is None:
        raise ValueError("overlong: expected length_N, the tokens of each rollout, got None.")
    reward_N = as_float(reward_N)
    penalty_N = _penalty(length_N, limit, max_length, buffer, factor)
    offers = {"success_N": successes(reward_N, success_N), "reduce": reduce}
    return call(rule, reward_N + penalty_N.to(reward_N.dtype), group_N, **offers)
