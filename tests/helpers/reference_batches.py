"""Reductions, plan audits and rank pooling in plain Python, from the mathematics; and tables of
prompts to plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from counterpoise.maths.reduce import Reduce
from counterpoise.types import TokenBatch


def per_token(lengths, credit, advantages, count="mask"):
    total = 0
    for i in range(len(lengths)):
        for t in range(lengths[i]):
            total += 1 if count == "mask" or credit[i][t] != 0 else 0
    return [[1 / total if total else 0.0 for _ in range(lengths[i])] for i in range(len(lengths))]


def per_sequence(lengths, credit, advantages, count="mask"):
    out = []
    for i in range(len(lengths)):
        own = sum(1 for t in range(lengths[i]) if count == "mask" or credit[i][t] != 0)
        out.append([1 / len(lengths) / own if own else 0.0 for _ in range(lengths[i])])
    return out


def constant_length(lengths, credit, advantages, length=None):
    constant = max(lengths) if length is None else length
    return [[1 / (len(lengths) * constant)] * n for n in lengths]


def side_means(lengths, credit, advantages):
    out = []
    for i in range(len(lengths)):
        same = [a for a in advantages if a * advantages[i] > 0]
        out.append([0.5 / len(same) / lengths[i] if advantages[i] != 0 else 0.0] * lengths[i])
    return out


def pairs_kept(
    updates: list[list[int]], groups: list[int], is_positive: list[bool]
) -> tuple[int, int]:
    """(pairs that meet, all pairs), by going through every pair of rollouts."""
    batch_of = {row: k for k, batch_number in enumerate(updates) for row in batch_number}
    met, total = 0, 0
    for i in range(len(groups)):
        for j in range(len(groups)):
            if groups[i] == groups[j] and is_positive[i] and not is_positive[j]:
                total += 1
                met += i in batch_of and j in batch_of and batch_of[i] == batch_of[j]
    return met, total


def prompts(num, size, seed=0, share=0.4):
    """``num`` prompts of ``size`` rollouts each, rewards 0 / 1, lengths 1..60."""
    generator = torch.Generator().manual_seed(seed)
    group_N = torch.arange(num).repeat_interleave(size)
    reward_N = (torch.rand(num * size, generator=generator) < share).double()
    return group_N, reward_N, torch.randint(1, 61, (num * size,), generator=generator)


def batch_of(group_N, reward_N, length_N):
    ids = [[1] * int(length) for length in length_N]
    return TokenBatch.from_lists(
        ids,
        group=group_N.tolist(),
        reward=reward_N.tolist(),
        sampler_logp=[[-1.0] * len(row) for row in ids],
        dtype=torch.float64,
    )


def on_ranks(calls: list[Callable[[Reduce], Any]]) -> list[Any]:
    """Run one call a rank, in threads that pool by meeting at a barrier: what ``over_ranks`` does,
    without processes.
    """
    slots, out, failed = [None] * len(calls), [None] * len(calls), []
    barrier = threading.Barrier(len(calls), timeout=600)

    def pooled(
        rank: int, join: Callable[[list], torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        def pool(value: torch.Tensor) -> torch.Tensor:
            slots[rank] = value
            barrier.wait()
            result = join(list(slots))
            barrier.wait()
            return result

        return pool

    def run(rank: int) -> None:
        try:
            out[rank] = calls[rank](
                Reduce(
                    sum=pooled(rank, lambda parts: torch.stack(parts).sum(0)),
                    cat=pooled(rank, torch.cat),
                )
            )
        except Exception as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return out
