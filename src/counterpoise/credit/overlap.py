"""Rules about tokens that several rollouts of a group share: conflict, shared_prefix."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.credit.combine import check_rule, nested_numbers
from counterpoise.credit.draws import scramble
from counterpoise.credit.uniform import uniform
from counterpoise.errors import check_choice, check_number
from counterpoise.maths.reduce import LOCAL, Reduce, groups, masked_mean
from counterpoise.maths.trie import pair_index, prefix_nodes, row_mask
from counterpoise.stage import Stage, call, declare
from counterpoise.types import TokenBatch


def conflict_tokens(credit_NT: Tensor, batch: TokenBatch, *, runs: str = "both") -> Tensor:
    """True on conflict tokens: same id at the same position in a rollout of positive and in one of
    negative credit of the group, and so for every token between it and the start (or,
    right-aligned, the end) of the rollout, [N, T].

    Positions count model tokens. What an environment says between them must be the same too.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2, 9], [1, 3, 9]], group=[0, 0], reward=[1.0, 0.0], sampler_logp=[[-1.0] * 3] * 2
    ... )
    >>> conflict_tokens(torch.tensor([[1.0] * 3, [-1.0] * 3]), batch, runs="start").tolist()
    [[True, False, False], [True, False, False]]
    """
    return conflict_runs(credit_NT, batch, runs=runs).any(0)


def conflict_runs(credit_NT: Tensor, batch: TokenBatch, *, runs: str = "both") -> Tensor:
    """The run of conflict tokens from the start of each rollout, and the one from its end,
    [2, N, T].
    """
    check_choice("conflict", ("start", "end", "both"), runs=runs)
    mask_NT, index_N = batch.mask_NT, groups(batch.group_N).index_N
    columns = _Columns(batch.token_ids_NT.long(), mask_NT, row_mask(mask_NT), credit_NT)
    turned = _Columns(*(column.flip(1) for column in columns))
    none_NT = torch.zeros_like(mask_NT)
    start_NT = none_NT if runs == "end" else _run(columns, index_N)
    end_NT = none_NT if runs == "start" else _run(turned, index_N).flip(1)
    return torch.stack([start_NT, end_NT]) & mask_NT


class _Columns(NamedTuple):
    ids_NT: Tensor
    mask_NT: Tensor
    is_row_NT: Tensor
    credit_NT: Tensor


def _run(columns: _Columns, group_N: Tensor) -> Tensor:
    """True on the unbroken run of contested tokens at the beginning of each row; neither padding
    nor replies break it.
    """
    return _unbroken(_contested(columns, group_N) | ~columns.mask_NT)


def _contested(columns: _Columns, group_N: Tensor) -> Tensor:
    """True where a token's (group, position, replies so far, id) has credit of both signs."""
    ids_NT, mask_NT, _, credit_NT = columns
    place_M, _ = pair_index(
        group_N[:, None].expand_as(mask_NT)[mask_NT], mask_NT.cumsum(1)[mask_NT]
    )
    _, reply_M = torch.unique(_replies(columns)[mask_NT], return_inverse=True)
    context_M, _ = pair_index(place_M, reply_M)
    slot_M, num_slots = pair_index(context_M, ids_NT[mask_NT])
    credit_M = credit_NT[mask_NT]
    is_rewarded_S, is_punished_S = torch.zeros(
        2, num_slots, dtype=torch.bool, device=mask_NT.device
    )
    is_rewarded_S[slot_M[credit_M > 0]] = True
    is_punished_S[slot_M[credit_M < 0]] = True
    out_NT = torch.zeros_like(mask_NT)
    out_NT[mask_NT] = (is_rewarded_S & is_punished_S)[slot_M]
    return out_NT


def _replies(columns: _Columns) -> Tensor:
    """A hash of what an environment has said up to each token, and where, [N, T]; 0 before its
    first word.
    """
    ids_NT, mask_NT, is_row_NT, _ = columns
    said_NT = scramble(scramble(ids_NT) + is_row_NT.cumsum(1))
    return torch.where(is_row_NT & ~mask_NT, said_NT, 0).cumsum(1)


def _unbroken(flag_NT: Tensor) -> Tensor:
    """True on the run of True at the beginning of each row."""
    return flag_NT.to(torch.uint8).cummin(dim=1).values.bool()


def _conflicts(
    before_NT: Tensor,
    after_NT: Tensor,
    batch: TokenBatch,
    *,
    runs: str = "both",
    rule: Stage = uniform,
    reduce: Reduce = LOCAL,
) -> dict[str, Tensor]:
    is_conflict_NT = conflict_tokens(before_NT, batch, runs=runs).to(before_NT.dtype)
    return nested_numbers(before_NT, after_NT, batch, rule=rule, reduce=reduce) | {
        "conflict_frac_positive": masked_mean(is_conflict_NT, before_NT > 0, reduce),
        "conflict_frac_negative": masked_mean(is_conflict_NT, before_NT < 0, reduce),
    }


@declare(report=_conflicts)
def conflict(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    positive: float = 2.0,
    negative: float = 0.0,
    runs: str = "both",
    multiply: bool = False,
    divide: bool = False,
    rule: Stage = uniform,
    reduce: Reduce = LOCAL,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Do not punish what correct answers share with failed ones.

    On conflict tokens credit' = positive * rule(credit) where credit > 0, negative * rule(credit)
    where credit < 0; elsewhere credit' = rule(credit).

    A conflict token stands at the same position with the same id in a rewarded and in a punished
    rollout of its group, within the unbroken run of such tokens from the start, or (right-aligned)
    from the end of its rollout. Keeps the sign (with factors >= 0), not the mass. ``positive =
    negative = 1`` changes nothing.

    Args:
        credit_NT: [N, T]; its signs are the sides.
        positive, negative: the two factors, >= 0.
        runs: ``start``, ``end`` or ``both``.
        multiply: a token in the runs of both ends gets its factor twice; else once.
        divide: all of a rollout's credit is divided by the number of its conflict tokens.
        rule: what becomes of the credit first; the sides stay those before it.

    Reference: GTPO, arXiv 2508.03772. The authors' code has ``multiply``, ``divide`` and the rule
        ``entropy_filter``; the paper's equations have none of them. Departs from that code where
        both runs of a rollout have conflict tokens: all of them are counted, the code counts the
        longer run.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2], [1, 3]], group=[0, 0], reward=[1.0, 0.0], sampler_logp=[[-1.0] * 2] * 2
    ... )
    >>> conflict(torch.tensor([[0.5, 0.5], [-0.5, -0.5]]), batch).tolist()
    [[1.0, 0.5], [0.0, -0.5]]
    """
    check_number("conflict", least=0, positive=positive, negative=negative)
    check_rule("conflict", rule)
    shaped_NT = call(rule, credit_NT, batch, reduce=reduce, generator=generator)
    run_2NT = conflict_runs(credit_NT, batch, runs=runs)
    factor_NT = torch.where(credit_NT > 0, positive, negative).to(credit_NT.dtype)
    if multiply:
        factor_NT = torch.where(run_2NT.all(0), factor_NT.square(), factor_NT)
    # adding 0 turns -0.0 into 0.0
    after_NT = torch.where(run_2NT.any(0), shaped_NT * factor_NT + 0, shaped_NT)
    num_N1 = run_2NT.any(0).sum(1, keepdim=True).clamp(min=1)
    return after_NT / num_N1.to(after_NT.dtype) if divide else after_NT


def _sharing(
    before_NT: Tensor, after_NT: Tensor, batch: TokenBatch, *, reduce: Reduce = LOCAL
) -> dict[str, Tensor]:
    size_NT = prefix_nodes(batch.token_ids_NT, batch.mask_NT, batch.group_N).size_NT.to(
        before_NT.dtype
    )
    return {
        "shared_frac": masked_mean((size_NT > 1).to(before_NT.dtype), batch.mask_NT, reduce),
        "sharing_rollouts": masked_mean(size_NT, batch.mask_NT, reduce),
    }


@declare(report=_sharing)
def shared_prefix(credit_NT: Tensor, batch: TokenBatch) -> Tensor:
    """Count a shared prefix once.

    credit'_it = credit_it / |{j in the group of i : y_j agrees with y_i up to and including token
    t}|

    The tokens that many rollouts of a group have in common enter a group's objective once for each
    rollout; this undoes it. Keeps the sign, not the mass (it can only fall).

    Reference: lambda-GRPO, arXiv 2509.21154; the divisor is the size of the token's process set, as
        in the authors' code.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2], [1, 3]], group=[0, 0], reward=[1.0, 0.0], sampler_logp=[[-1.0] * 2] * 2
    ... )
    >>> shared_prefix(torch.tensor([[0.5, 0.5], [-0.5, -0.5]]), batch).tolist()
    [[0.25, 0.5], [-0.25, -0.5]]
    """
    size_NT = prefix_nodes(batch.token_ids_NT, batch.mask_NT, batch.group_N).size_NT
    return credit_NT / size_NT.clamp(min=1).to(credit_NT.dtype)
