"""Reward-balanced plans: positives (successes) and negatives balanced in each update.

Reference for all: the Cancellation Hypothesis, arXiv 2605.08666. The idea is the paper's; the
numbers 3/8 and 5/8 and the ``buffer`` mode follow public code of its likely authors; ``groups`` is
ours."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.errors import check_choice, check_number, check_whole
from counterpoise.plans.orders import check_updates, deal, join_blocks, rows_by_prompt, shuffle
from counterpoise.rollouts import RolloutBatch
from counterpoise.stage import SUCCESS, Sampler, declare

MODES = ("groups", "per_query", "buffer")


def _is_buffer(*, mode: str) -> bool:
    return mode == "buffer"


def _draws_rollouts(*, mode: str) -> bool:
    return mode != "groups"


def _keeps_prompts(*, mode: str) -> bool:
    return mode != "buffer"


def fill_buffer(
    rollouts: RolloutBatch, sampler: Sampler, *, low: float, max_rounds: int
) -> RolloutBatch:
    """Sample round after round, the policy frozen, until the rarer sign is large enough."""
    size = rollouts.batch.num_rollouts
    for _ in range(max_rounds - 1):
        num_pos = int(rollouts.batch.is_success_N.sum())
        if is_ready(num_pos, rollouts.batch.num_rollouts - num_pos, size, low=low):
            break
        rollouts = rollouts.join(sampler.more())
    return rollouts


@declare(
    keeps_prompts_whole=_keeps_prompts,
    drops_rollouts=_draws_rollouts,
    collect=fill_buffer,
    samples_more=_is_buffer,
    reads_success=True,
)
def reward_balanced(
    group_N: Tensor,
    reward_N: Tensor,
    length_N: Tensor,
    *,
    num_updates: int,
    generator: torch.Generator | None = None,
    success_N: Tensor | None = None,
    mode: str = "groups",
    low: float = 3 / 8,
    high: float = 5 / 8,
    update_size: int | None = None,
    max_rounds: int = 10,
) -> list[Tensor]:
    """Updates whose share of positives lies in [low, high], as far as the mode can.

    ``groups``: whole prompts only. Constant groups (all rewards equal, no advantage) are left out.
    If the rest cannot be dealt into updates inside the band, the most one-sided prompts of the more
    frequent sign are left out too, as few as needed; if even that does not help, none of them is.
    ``per_query``: each prompt keeps min(positives, negatives) rollouts of each sign, drawn at
    random, and stays whole. Where fewer prompts than updates are usable, both modes are
    ``query_preserved`` of all rows.
    ``buffer``: the rollouts are a buffer, of which ``quota`` draws ``update_size * num_updates``
    rows; prompts are not kept whole.

    Args:
        group_N: [N] the prompt of each rollout.
        reward_N: [N] rewards.
        length_N: [N], not read.
        num_updates: updates.
        generator: draws rows and breaks ties.
        mode: "groups", "per_query" or "buffer".
        success_N: [N] the positives, from the batch; None: reward >= 0.5.
        low, high: the band of the positive share.
        update_size: ``buffer`` only: rows of one update; None takes the largest for which the
            buffer is
            ready, all rows if that is none.
        max_rounds: ``buffer`` only: most rounds of sampling for one batch, where the trainer lets a
            method sample more.

    >>> group_N, reward_N = (
    ...     torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2]),
    ...     torch.tensor([1.0, 0, 0, 1, 1, 0, 1, 1, 1]),
    ... )
    >>> [
    ...     update.tolist()
    ...     for update in reward_balanced(group_N, reward_N, torch.ones(9), num_updates=1)
    ... ]
    [[0, 1, 2, 3, 4, 5]]
    """
    _check(mode, low, high, update_size)
    check_whole("reward_balanced", least=1, max_rounds=max_rounds)
    is_positive_N = (reward_N >= SUCCESS if success_N is None else success_N).cpu()
    if mode == "buffer":
        return _buffer(is_positive_N, num_updates, update_size, low, high, generator)
    rows_P = rows_by_prompt(group_N)
    check_updates("reward_balanced", num_updates, len(rows_P), "prompts")
    rows_P = [rows_P[p] for p in shuffle(len(rows_P), generator)]
    if mode == "per_query":
        updates = _per_query(rows_P, is_positive_N, num_updates, generator)
    else:
        updates = _groups(rows_P, reward_N.cpu(), is_positive_N, num_updates, low, high)
    return updates or deal(rows_P, num_updates)


def is_ready(num_pos: int, num_neg: int, size: int, *, low: float = 3 / 8) -> bool:
    """Whether a buffer can give a balanced batch of ``size`` rows: the rarer sign has at least
    ceil(low * size).

    >>> is_ready(384, 384, 1024), is_ready(383, 2000, 1024)
    (True, False)
    """
    return min(num_pos, num_neg) >= math.ceil(low * size - 1e-9)


def quota(num_pos: int, num_neg: int, size: int, *, high: float = 5 / 8) -> tuple[int, int]:
    """How many positives and negatives a batch of ``size`` rows takes: the rarer sign min(all,
    floor(high * size)), the other fills up.

    Nothing is taken twice, so the batch is smaller than ``size`` where the other sign cannot fill
    it. Equal counts: positives are the rarer.

    >>> quota(400, 800, 1024), quota(2634, 6582, 1024)
    ((400, 624), (640, 384))
    """
    rare = min(num_pos, num_neg, math.floor(high * size + 1e-9))
    common = min(max(num_pos, num_neg), size - rare)
    return (rare, common) if num_pos <= num_neg else (common, rare)


def _check(mode: str, low: float, high: float, update_size: int | None) -> None:
    where = "reward_balanced"
    check_choice(where, MODES, mode=mode)
    check_number(where, above=0, most=0.5, low=low)
    check_number(where, least=0.5, below=1, high=high)
    check_whole(where, least=1, or_none=True, update_size=update_size)
    if update_size is not None and mode != "buffer":
        raise ValueError(
            f"reward_balanced: update_size belongs to mode 'buffer', got mode {mode!r}."
        )


class _Block(NamedTuple):
    """A whole prompt: its rows, how many of them are positive."""

    row_R: Tensor
    num_pos: int

    @property
    def share(self) -> float:
        return self.num_pos / len(self.row_R)


def _groups(
    rows_P: list[Tensor],
    reward_N: Tensor,
    is_positive_N: Tensor,
    num_updates: int,
    low: float,
    high: float,
) -> list[Tensor]:
    mixed = [row_R for row_R in rows_P if reward_N[row_R].min() < reward_N[row_R].max()]
    # Python's sort is stable: equal shares stay in the order that the generator drew
    blocks = sorted(
        (_Block(row_R, int(is_positive_N[row_R].sum())) for row_R in mixed),
        key=lambda block: block.share,
    )
    if len(blocks) < num_updates:
        return []
    updates = _inside(blocks, num_updates, low, high) or _level(blocks, num_updates)
    return [join_blocks(block.row_R for block in update) for update in updates]


def _inside(
    blocks: list[_Block], num_updates: int, low: float, high: float
) -> list[list[_Block]] | None:
    """Updates inside the band, with as few blocks left out as needed (from the end of the more
    frequent sign); None if there are none.
    """
    while len(blocks) >= num_updates:
        share = _share(blocks)
        # the share of the whole is a mean of the updates' shares: outside the band no deal can help
        if low <= share <= high:
            updates = _level(blocks, num_updates)
            if all(low <= _share(update) <= high for update in updates):
                return updates
        blocks = blocks[1:] if share < 0.5 else blocks[:-1]
    return None


def _level(blocks: list[_Block], num_updates: int) -> list[list[_Block]]:
    """Deal blocks, sorted by share, in hands of one per update: the highest share of a hand to the
    update that lags most. Then swap.
    """
    target, updates, excess = _share(blocks), [[] for _ in range(num_updates)], [0.0] * num_updates
    for start in range(0, len(blocks), num_updates):
        hand = blocks[start : start + num_updates][::-1]
        for k, block in zip(sorted(range(num_updates), key=excess.__getitem__), hand):
            updates[k].append(block)
            excess[k] += block.num_pos - target * len(block.row_R)
    for _ in blocks:
        if not _swapped(updates):
            break
    return updates


def _swapped(updates: list[list[_Block]]) -> bool:
    """Swap the pair of blocks that best levels the updates of highest and lowest share; False if no
    swap brings them nearer.
    """
    rich, poor = max(updates, key=_share), min(updates, key=_share)
    if rich is poor:
        return False
    (pos_a, rows_a), (pos_b, rows_b) = _totals(rich), _totals(poor)

    def gap(pair: tuple[int, int]) -> float:
        a, b = rich[pair[0]], poor[pair[1]]
        more_pos, more_rows = b.num_pos - a.num_pos, len(b.row_R) - len(a.row_R)
        return abs(
            (pos_a + more_pos) / (rows_a + more_rows) - (pos_b - more_pos) / (rows_b - more_rows)
        )

    best = min(itertools.product(range(len(rich)), range(len(poor))), key=gap)
    if gap(best) > _share(rich) - _share(poor) - 1e-9:
        return False
    rich[best[0]], poor[best[1]] = poor[best[1]], rich[best[0]]
    return True


def _totals(blocks: list[_Block]) -> tuple[int, int]:
    return sum(block.num_pos for block in blocks), sum(len(block.row_R) for block in blocks)


def _share(blocks: list[_Block]) -> float:
    num_pos, num_rows = _totals(blocks)
    return num_pos / num_rows


def _per_query(
    rows_P: list[Tensor], is_positive_N: Tensor, num_updates: int, generator: torch.Generator | None
) -> list[Tensor]:
    kept = []
    for row_R in rows_P:
        sides = row_R[is_positive_N[row_R]], row_R[~is_positive_N[row_R]]
        count = min(map(len, sides))
        if count:
            kept.append(torch.cat([_drawn(side, count, generator) for side in sides]))
    return deal(kept, num_updates) if len(kept) >= num_updates else []


def _buffer(
    is_positive_N: Tensor,
    num_updates: int,
    update_size: int | None,
    low: float,
    high: float,
    generator: torch.Generator | None,
) -> list[Tensor]:
    check_updates("reward_balanced", num_updates, len(is_positive_N), "rollouts")
    sides = is_positive_N.nonzero().flatten(), (~is_positive_N).nonzero().flatten()
    num_pos, num_neg = map(len, sides)
    size = update_size * num_updates if update_size else _largest(num_pos, num_neg, low)
    counts = quota(num_pos, num_neg, size if size >= num_updates else num_pos + num_neg, high=high)
    positives, negatives = (
        _drawn(side, count, generator).tensor_split(num_updates)
        for side, count in zip(sides, counts)
    )
    # tensor_split puts the longer parts first: turned round for one side, updates stay equal in
    # size
    return [join_blocks(pair) for pair in zip(positives, negatives[::-1])]


def _largest(num_pos: int, num_neg: int, low: float) -> int:
    """The largest batch for which the buffer is ready."""
    return min(num_pos + num_neg, math.floor(min(num_pos, num_neg) / low + 1e-9))


def _drawn(row_R: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    return row_R[shuffle(len(row_R), generator)[:count]]
