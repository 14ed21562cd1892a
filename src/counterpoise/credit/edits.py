"""IBPO: credit on the tokens where a failed rollout and a correct one part."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.credit.align import edit_credit, nearest_correct
from counterpoise.credit.corrections import TEMPLATE, add_corrections, asks_for_corrections
from counterpoise.errors import check_choice, check_number, check_whole
from counterpoise.maths.reduce import LOCAL, Reduce, groups
from counterpoise.stage import declare
from counterpoise.types import TokenBatch


class _Answer(NamedTuple):
    ids: list[int]
    reward: float
    is_right: bool
    row: int


def _group_credit(
    answers: list[_Answer], first_edits: int | None, serving: str
) -> dict[int, Tensor]:
    """Row -> credit of its tokens, for the rollouts of one group that have any."""
    failed = [answer for answer in answers if not answer.is_right]
    rows_of: dict[tuple[tuple[int, ...], float], list[int]] = defaultdict(list)
    for answer in answers:
        if answer.is_right:
            rows_of[tuple(answer.ids), answer.reward].append(answer.row)
    correct, out, served = list(rows_of), {}, defaultdict(list)
    if not correct:
        return {}
    for answer in failed:
        reference = correct[nearest_correct(answer.ids, correct)]
        own, other = edit_credit(
            answer.ids, reference[0], reference[1] - answer.reward, first_edits
        )
        out[answer.row] = torch.tensor(own, dtype=torch.float64)
        served[reference].append(torch.tensor(other, dtype=torch.float64))
    for reference, parts in served.items():
        total = torch.stack(parts).sum(0) / (len(parts) if serving == "mean" else 1)
        out |= {row: total / len(rows_of[reference]) for row in rows_of[reference]}
    return out


def _pairs(
    before_NT: Tensor, after_NT: Tensor, batch: TokenBatch, *, reduce: Reduce = LOCAL
) -> dict[str, Tensor]:
    by, is_right_N = groups(batch.group_N), batch.is_success_N
    right_P = by.sum(is_right_N.long())
    is_mixed_P = (right_P > 0) & (right_P < by.size_P)
    num_pairs = reduce.sum((by.size_P - right_P)[is_mixed_P].sum())
    return {
        "pairs": num_pairs,
        "skipped_groups": reduce.sum((~is_mixed_P).sum()),
        "skipped_group_frac": (
            reduce.sum((~is_mixed_P).sum())
            / reduce.sum(torch.tensor(len(is_mixed_P), device=is_mixed_P.device))
        ),
        "credit_sum": reduce.sum(after_NT.sum()),
        "credit_sum_per_pair": reduce.sum(after_NT.sum()) / num_pairs.clamp(min=1),
    }


@declare(
    report=_pairs, collect=add_corrections, samples_more=asks_for_corrections, reads_success=True
)
def edits(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    first_edits: int | None = None,
    serving: str = "sum",
    corrections: int = 0,
    edit_cost: float = 0.1,
    template: str = TEMPLATE,
) -> Tensor:
    """Credit only where a failed answer and its nearest correct sibling part.

    REPLACES the incoming credit.

    With y a failed rollout, c the correct rollout of its group at the smallest normalised token
    edit distance, g = r(c) - r(y): credit' = -g on tokens of y that are deleted or substituted on
    the way to c, +g on tokens of c that are inserted or substituted, else 0.

    A correct rollout that serves several failed ones gets the sum of what they bring. Identical
    correct rollouts share it evenly. Groups
    with no correct or no failed rollout are skipped: all their credit is 0. Keeps neither the mass
    nor, as a whole, a balance of signs: the logged ``credit_sum`` is g * (inserted - deleted)
    summed over pairs.

    Args:
        credit_NT: [N, T]; only its shape and dtype are read.
        first_edits: keep only the first so many edits of each pair; None keeps all.
        serving: ``sum``, or ``mean`` over the failed rollouts that a correct one serves.
        corrections: answers that the policy samples to correct each failed rollout (generate mode);
            0 is the implicit mode.
        edit_cost: price of a correction's edit distance when the best one is chosen.
        template: prompt for a correction; {prompt}, {failed} and {reference} are filled in.

    Reference: IBPO, arXiv 2605.16302 (also 2604.13088 v2). Reads the paper as
        written above; experimental.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2, 3], [1, 9, 3, 4]],
    ...     group=[0, 0],
    ...     reward=[0.0, 1.0],
    ...     sampler_logp=[[-1.0] * 3, [-1.0] * 4],
    ... )
    >>> edits(torch.zeros(2, 4), batch).tolist()
    [[0.0, -1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0]]
    """
    check_choice("edits", ("sum", "mean"), serving=serving)
    check_whole("edits", least=0, corrections=corrections)
    check_whole("edits", least=1, or_none=True, first_edits=first_edits)
    check_number("edits", least=0, edit_cost=edit_cost)
    ids_NT, mask_NT = batch.token_ids_NT.cpu(), batch.mask_NT.cpu()
    by_group: dict[int, list[_Answer]] = defaultdict(list)
    columns = batch.group_N.tolist(), batch.reward_N.tolist(), batch.is_success_N.tolist()
    for row, (group, reward, is_right) in enumerate(zip(*columns)):
        answer = _Answer(ids_NT[row][mask_NT[row]].tolist(), reward, is_right, row)
        by_group[group].append(answer)
    out_NT = torch.zeros(mask_NT.shape, dtype=credit_NT.dtype)
    for answers in by_group.values():
        for row, credit in _group_credit(answers, first_edits, serving).items():
            out_NT[row, mask_NT[row]] = credit.to(out_NT.dtype)
    return out_NT.to(credit_NT.device)
