"""What a plan does: the manifest (which rows and prompts each update holds) and the audit (what of
each prompt meets in one update).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoise.maths.reduce import groups
from counterpoise.types import Plan, TokenBatch


def manifest(updates: Sequence[Tensor], group_N: Tensor) -> dict[str, Any]:
    """Rows and prompts of each update, and the rows that no update holds; JSON.

    >>> manifest([torch.tensor([0, 1])], torch.tensor([7, 7, 8]))
    {'num_rows': 3, 'rows': [[0, 1]], 'groups': [[7]], 'left_out': [2]}
    """
    held = {row for update in updates for row in update.tolist()}
    return {
        "num_rows": len(group_N),
        "rows": [update.tolist() for update in updates],
        "groups": [group_N[update].unique().tolist() for update in updates],
        "left_out": [row for row in range(len(group_N)) if row not in held],
    }


class Audit(NamedTuple):
    """Numbers of a plan.

    Fields per update are lists in the order of the plan; positives are successes.

    Attributes:
        num_updates, num_rows, num_prompts: of the plan and the batch.
        num_pairs: same-prompt (positive, negative) pairs in the whole batch.
        pairs_kept: share of them whose two rollouts meet in one update; a pair with a row left out
            is not kept. 1 if there are no pairs.
        prompts_split: prompts whose rows lie in more than one update.
        prompts_split_frac: share of all prompts.
        num_left_out: rows that no update holds.
        rows, tokens: rows and response tokens of each update.
        positive_frac: share of positives in each update.
        advantage_sum: sum of the advantage in each update; None if no advantage was given.
    """

    num_updates: int
    num_rows: int
    num_prompts: int
    num_pairs: int
    pairs_kept: float
    prompts_split: int
    prompts_split_frac: float
    num_left_out: int
    rows: list[int]
    tokens: list[int]
    positive_frac: list[float]
    advantage_sum: list[float] | None

    def as_dict(self) -> dict[str, Any]:
        """JSON."""
        return self._asdict()


def audit(
    plan: Plan | Sequence[Tensor], batch: TokenBatch, advantage_N: Tensor | None = None
) -> Audit:
    """What of each prompt meets in one update.

    Args:
        plan: a ``Plan`` or the rows of each update.
        batch: the rollouts that were planned.
        advantage_N: [N] to sum by update.

    >>> batch = TokenBatch.from_lists(
    ...     [[1], [2], [3], [4]], group=[0, 0, 1, 1], reward=[1, 0, 1, 0], sampler_logp=[[-1.0]] * 4
    ... )
    >>> audit([torch.tensor([0, 1, 2]), torch.tensor([3])], batch).pairs_kept
    0.5
    """
    updates = [update.cpu() for update in plan]
    is_positive_N, length_N = batch.is_success_N.cpu(), batch.length_N.cpu()
    by_prompt = groups(batch.group_N.cpu())
    count_2P = torch.stack(
        [by_prompt.sum(side_N.long()) for side_N in (is_positive_N, ~is_positive_N)]
    )
    count_S2P = torch.stack(
        [
            _by_sign(update, is_positive_N, by_prompt.index_N, count_2P.shape[1])
            for update in updates
        ]
    )
    num_pairs, num_met = int(count_2P.prod(0).sum()), int(count_S2P.prod(1).sum())
    num_split = int(((count_S2P.sum(1) > 0).sum(0) > 1).sum())
    return Audit(
        num_updates=len(updates),
        num_rows=len(length_N),
        num_prompts=len(by_prompt.size_P),
        num_pairs=num_pairs,
        pairs_kept=num_met / num_pairs if num_pairs else 1.0,
        prompts_split=num_split,
        prompts_split_frac=num_split / len(by_prompt.size_P),
        num_left_out=len(length_N) - len(torch.cat(updates).unique()),
        rows=[len(update) for update in updates],
        tokens=[int(length_N[update].sum()) for update in updates],
        positive_frac=[float(is_positive_N[update].double().mean()) for update in updates],
        advantage_sum=(
            None
            if advantage_N is None
            else [float(advantage_N.cpu()[update].sum()) for update in updates]
        ),
    )


def plan_metrics(
    plan: Plan | Sequence[Tensor], batch: TokenBatch, advantage_N: Tensor | None = None
) -> dict[str, float]:
    """The audit's numbers that every trainer logs, keys ``plan/...`` as in
    docs/reference/metrics.md.

    >>> batch = TokenBatch.from_lists(
    ...     [[1], [2], [3]], group=[0, 0, 1], reward=[1, 0, 1], sampler_logp=[[-1.0]] * 3
    ... )
    >>> plan_metrics([torch.tensor([0, 1])], batch)["plan/rows_left_out"]
    1
    """
    numbers = audit(plan, batch, advantage_N)
    return {
        "plan/pairs_kept": numbers.pairs_kept,
        "plan/prompts_split_frac": numbers.prompts_split_frac,
        "plan/positive_frac_min": min(numbers.positive_frac),
        "plan/positive_frac_max": max(numbers.positive_frac),
        "plan/rows_left_out": numbers.num_left_out,
    }


def _by_sign(update: Tensor, is_positive_N: Tensor, index_N: Tensor, num_prompts: int) -> Tensor:
    """Positives and negatives of each prompt in one update, [2, P]."""
    return torch.stack(
        [
            torch.bincount(index_N[update[side]], minlength=num_prompts)
            for side in (is_positive_N[update], ~is_positive_N[update])
        ]
    )
