"""Monte Carlo values: the mean reward of fresh completions from where each segment begins.

States that several rollouts of a prompt share, their common start above all, are sampled once. The
completions are drawn by the policy that sampled the batch, with its settings, and none of them is
trained on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from counterpoise.credit.steps import improbable_starts, step_starts
from counterpoise.rollouts import RolloutBatch
from counterpoise.stage import Sampler


def measure_values(
    rollouts: RolloutBatch,
    sampler: Sampler,
    *,
    split: str,
    samples: int,
    max_steps: int | None,
    every: int,
    max_prob: float,
) -> RolloutBatch:
    """The batch with ``segment_NT`` and ``value_NT``.

    States behind the first ``max_steps`` segments are not sampled: the rest of the response is one
    segment whose value is the rollout's own reward. A response without segments has none.
    """
    starts = segment_starts(rollouts, sampler, split, every, max_prob)
    batch = rollouts.batch
    kept = [row if max_steps is None else row[:max_steps] for row in starts]
    ids_NT, group = batch.token_ids_NT.tolist(), batch.group_N.tolist()
    keys = [[(group[i], *ids_NT[i][:t]) for t in row] for i, row in enumerate(kept)]
    first = {
        key: (i, t) for i, row in reversed(list(enumerate(kept))) for key, t in zip(keys[i], row)
    }
    value: dict[tuple[int, ...], float] = {}
    if first:
        states = sorted(first.items(), key=lambda state: state[1])
        fresh = sampler.complete(
            rollouts, [place for _, place in states], samples=samples, purpose="values"
        )
        total_K = torch.zeros(len(states), dtype=torch.float64)
        total_K.index_add_(0, fresh.source_N.cpu(), fresh.reward_N.cpu().double())
        value = {key: total / samples for (key, _), total in zip(states, total_K.tolist())}
        rollouts = rollouts._replace(
            num_grader_failures=rollouts.num_grader_failures + fresh.num_grader_failures,
            grader_messages=rollouts.grader_messages + fresh.grader_messages,
        )
    segment_NT = torch.full(batch.mask_NT.shape, -1)
    value_NT = torch.zeros(batch.mask_NT.shape, dtype=batch.reward_N.dtype)
    length, reward = batch.length_N.tolist(), batch.reward_N.tolist()
    for i, row in enumerate(kept):
        numbers = [*(value[key] for key in keys[i]), reward[i]]
        ends = [*starts[i], length[i]]
        for segment, (begin, end) in enumerate(segments(ends, len(row))):
            segment_NT[i, begin:end] = segment
            value_NT[i, begin:end] = numbers[segment]
    device = batch.mask_NT.device
    columns = {"segment_NT": segment_NT.to(device), "value_NT": value_NT.to(device)}
    return rollouts._replace(batch=batch.replace(**columns))


def segments(ends: Sequence[int], num: int) -> list[tuple[int, int]]:
    """(begin, end) of the first ``num`` segments, and of the rest as one where there is any.

    >>> segments([0, 4, 9, 12], 3), segments([0, 4, 9, 12], 1)
    ([(0, 4), (4, 9), (9, 12)], [(0, 4), (4, 12)])
    """
    rest = [(ends[num], ends[-1])] if num < len(ends) - 1 else []
    return [*itertools.pairwise(ends[: num + 1]), *rest]


def segment_starts(
    rollouts: RolloutBatch, sampler: Sampler, split: str, every: int, max_prob: float
) -> list[list[int]]:
    """The positions where the segments of each response begin, the first at 0; a response that is
    not cut at improbable tokens has none.
    """
    if split != "improbable":
        offsets = [step_starts(text, split) for text in rollouts.texts]
        return [[0, *row] for row in sampler.tokens_at(rollouts, offsets)]
    batch = rollouts.batch
    cuts = [
        improbable_starts(logp_T[:length], every, max_prob)
        for logp_T, length in zip(batch.sampler_logp_NT.cpu(), batch.length_N.tolist())
    ]
    return [[0, *row] if row else [] for row in cuts]
