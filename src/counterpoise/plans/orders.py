"""Plans: ``fn(group_N, reward_N, length_N, *, num_updates, generator, params) -> [row_R, ...]``,
the rows of each update, ascending.

A plan is cut before ranks and micro-batches. Randomness comes from ``generator`` alone (None: one
fixed seed). Updates are as equal in rows as the plan allows and never empty: too few prompts or
rows is an error."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from counterpoise.errors import check_whole
from counterpoise.maths.reduce import groups, seeded_generator
from counterpoise.stage import Stage, declare


@declare(keeps_prompts_whole=True)
def query_preserved(
    group_N: Tensor,
    reward_N: Tensor,
    length_N: Tensor,
    *,
    num_updates: int,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """Whole prompts only: all rollouts of a prompt meet in one update.

    Prompts are shuffled, never rows.

    With groups of unequal size the larger ones are dealt first, each to the update with the fewest
    rows so far.

    Args:
        group_N: [N] the prompt of each rollout.
        reward_N: [N], not read.
        length_N: [N], not read.
        num_updates: updates.
        generator: shuffles the prompts.

    >>> updates = query_preserved(
    ...     torch.tensor([0, 0, 1, 1, 2, 2]), torch.zeros(6), torch.ones(6), num_updates=3
    ... )
    >>> sorted(update.tolist() for update in updates)
    [[0, 1], [2, 3], [4, 5]]

    Reference: the Cancellation Hypothesis, arXiv 2605.08666.
    """
    rows_P = rows_by_prompt(group_N)
    check_updates("query_preserved", num_updates, len(rows_P), "prompts")
    return deal([rows_P[p] for p in shuffle(len(rows_P), generator)], num_updates)


@declare(shuffles_rows=True)
def random_rows(
    group_N: Tensor,
    reward_N: Tensor,
    length_N: Tensor,
    *,
    num_updates: int,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """Rows shuffled and cut: what TRL does.

    A pair of rollouts of one prompt meets with probability about 1 / num_updates.

    Arguments as for ``query_preserved``; only the number of rows is read.

    >>> updates = random_rows(
    ...     torch.tensor([0, 0, 1, 1]), torch.zeros(4), torch.ones(4), num_updates=2
    ... )
    >>> [len(update) for update in updates], sorted(torch.cat(updates).tolist())
    ([2, 2], [0, 1, 2, 3])
    """
    check_updates("random_rows", num_updates, len(group_N), "rollouts")
    return _cut(torch.tensor(shuffle(len(group_N), generator)), num_updates)


@Stage
def length_sorted(
    group_N: Tensor, reward_N: Tensor, length_N: Tensor, *, num_updates: int
) -> list[Tensor]:
    """Rows in order of length, every second one ascending, the others back down again, cut into
    updates: short, long, long, short.

    This is the order into which verl brings each data-parallel rank when it balances tokens
    (``trainer.balance_batch``), before mini-batches are cut in that order. Departs from verl: it
    first splits rows over ranks by Karmarkar-Karp and measures prompt plus response by a workload
    formula; here all rows are one rank and the measure is the response.

    Args:
        group_N: [N], not read.
        reward_N: [N], not read.
        length_N: [N] response tokens.
        num_updates: updates.

    >>> [
    ...     s.tolist()
    ...     for s in length_sorted(torch.zeros(8), torch.zeros(8), torch.arange(8), num_updates=4)
    ... ]
    [[0, 2], [4, 6], [5, 7], [1, 3]]
    """
    check_updates("length_sorted", num_updates, len(length_N), "rollouts")
    order_N = torch.argsort(length_N, stable=True)
    return _cut(torch.cat([order_N[::2], order_N[1::2].flip(0)]), num_updates)


@Stage
def round_robin(
    group_N: Tensor, reward_N: Tensor, length_N: Tensor, *, num_updates: int
) -> list[Tensor]:
    """Row i goes to update i mod num_updates: every prompt is spread over the updates.

    Arguments as for ``query_preserved``; nothing is drawn.

    >>> [
    ...     s.tolist()
    ...     for s in round_robin(torch.zeros(5), torch.zeros(5), torch.ones(5), num_updates=2)
    ... ]
    [[0, 2, 4], [1, 3]]
    """
    check_updates("round_robin", num_updates, len(group_N), "rollouts")
    return [torch.arange(k, len(group_N), num_updates) for k in range(num_updates)]


def check_updates(name: str, num_updates: int, available: int, what: str) -> None:
    """Every update needs at least one prompt (or rollout)."""
    check_whole(name, least=1, num_updates=num_updates)
    if available < num_updates:
        raise ValueError(
            f"{name}: {num_updates} updates need at least {num_updates} {what}, got"
            f" {available}. Lower the number of updates or sample more {what}."
        )


def rows_by_prompt(group_N: Tensor) -> list[Tensor]:
    """Rows of each prompt, prompts in order of their number."""
    by_prompt = groups(group_N.cpu())
    return list(torch.argsort(by_prompt.index_N, stable=True).split(by_prompt.size_P.tolist()))


def shuffle(count: int, generator: torch.Generator | None) -> list[int]:
    """A permutation of 0 .. count-1 from the generator; from a fixed seed without one."""
    return torch.randperm(count, generator=generator or seeded_generator(0, 0, "plan")).tolist()


def deal(blocks: Sequence[Tensor], num_updates: int) -> list[Tensor]:
    """Blocks of rows, larger ones first, each to the update with the fewest rows so far; ties go to
    the first update.
    """
    heap, held = [(0, k) for k in range(num_updates)], [[] for _ in range(num_updates)]
    for block in sorted(blocks, key=len, reverse=True):
        num_rows, k = heap[0]
        held[k].append(block)
        heapq.heapreplace(heap, (num_rows + len(block), k))
    return [join_blocks(blocks) for blocks in held]


def join_blocks(blocks: Iterable[Tensor]) -> Tensor:
    """The rows of some blocks, ascending."""
    return torch.cat(list(blocks)).sort().values


def _cut(order_N: Tensor, num_updates: int) -> list[Tensor]:
    return [part.sort().values for part in order_N.tensor_split(num_updates)]
