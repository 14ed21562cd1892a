"""Cut one update into ranks and micro-batches.

No cut changes a gradient: statistics and scales are columns of the whole update.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from counterpoise.plans.orders import rows_by_prompt


def shard(
    row_R: Tensor,
    length_N: Tensor,
    *,
    num_ranks: int = 1,
    token_budget: int | None = None,
    max_rows: int | None = None,
    groups: Tensor | None = None,
) -> list[list[Tensor]]:
    """``[rank][micro-batch] -> rows``: every row exactly once, ranks balanced by tokens, no random
    numbers.

    Rows (or whole prompts) go to ranks longest first, each to the rank with the fewest tokens so
    far. On a rank they are sorted by length, so that a micro-batch wastes little padding, and cut
    so that rows * longest <= token_budget and rows <= max_rows. A row longer than the budget is a
    micro-batch of its own. A rank that gets no row has an empty list; ranks may differ in their
    number of micro-batches.

    Args:
        row_R: rows of the update, numbers into ``length_N``; ``shard(torch.arange(len(update)),
            length_N[update])`` gives positions in the update,
            as ``Rows.select`` takes them.
        length_N: [N] tokens of each rollout (add the prompt's if the budget is to count them).
        num_ranks: data-parallel ranks.
        token_budget: padded tokens of a micro-batch; None is no limit.
        max_rows: rows of a micro-batch; None is no limit.
        groups: [N] the prompt of each rollout; if given, a prompt's rows of the update stay on one
            rank.

    >>> [[micro.tolist() for micro in rank] for rank in shard(torch.arange(4), torch.tensor([9, 2, 3, 8]), num_ranks=2, token_budget=9)]
    [[[0], [1]], [[3], [2]]]
    """
    for name, value in (
        ("num_ranks", num_ranks),
        ("token_budget", token_budget),
        ("max_rows", max_rows),
    ):
        if (not isinstance(value, int) and (value is not None or name == "num_ranks")) or (
            value is not None and value < 1
        ):
            raise ValueError(
                f"shard: {name} must be an integer >= 1{'' if name == 'num_ranks' else ' or None'},"
                f" got {value!r}."
            )
    row_R, length_N = row_R.cpu(), length_N.cpu()
    blocks = (
        row_R.split(1)
        if groups is None
        else [row_R[part] for part in rows_by_prompt(groups.cpu()[row_R])]
    )
    return [
        _micro_batches(rows, length_N, token_budget, max_rows)
        for rows in _ranks(blocks, length_N, num_ranks)
    ]


def _ranks(
    blocks: list[Tensor] | tuple[Tensor, ...], length_N: Tensor, num_ranks: int
) -> list[Tensor]:
    """Blocks, longest first, each to the rank with the fewest tokens so far; ties go to the first
    rank.
    """
    heap, held = (
        [(0, k) for k in range(num_ranks)],
        [[torch.zeros(0, dtype=torch.long)] for _ in range(num_ranks)],
    )
    tokens = {k: int(length_N[block].sum()) for k, block in enumerate(blocks)}
    for index in sorted(tokens, key=lambda k: -tokens[k]):
        num_tokens, rank = heap[0]
        held[rank].append(blocks[index])
        heapq.heapreplace(heap, (num_tokens + tokens[index], rank))
    return [torch.cat(parts) for parts in held]


def _micro_batches(
    row_R: Tensor, length_N: Tensor, token_budget: int | None, max_rows: int | None
) -> list[Tensor]:
    """Longest first, so the first row of a micro-batch sets its padded length and with it how many
    rows fit.
    """
    ordered_R, out = row_R[torch.argsort(length_N[row_R], descending=True, stable=True)], []
    while len(ordered_R):
        room = (
            len(ordered_R)
            if token_budget is None
            else max(1, token_budget // max(1, int(length_N[ordered_R[0]])))
        )
        size = min(room, max_rows or len(ordered_R))
        out.append(ordered_R[:size])
        ordered_R = ordered_R[size:]
    return out
