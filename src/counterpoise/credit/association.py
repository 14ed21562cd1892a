"""KTAE: token ids whose presence goes with success.

Axes as in ``types``; ``K`` counts (group, token id) types, ``U`` distinct 2x2 tables.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.errors import check_number
from counterpoise.maths.reduce import LOCAL, Groups, Reduce, groups, masked_mean
from counterpoise.maths.trie import pair_index
from counterpoise.stage import declare
from counterpoise.types import TokenBatch

# the frequency term's saturation, length correction and guard against an absent token, as in the
# authors' code
SATURATION, LENGTH_WEIGHT, ABSENT = 2.0, 0.5, 1e-5


class Tables(NamedTuple):
    """2x2 tables presence x correctness of rollouts: ``hit`` rollouts of a side contain the token,
    ``all`` are there.
    """

    hit_right: Tensor
    hit_wrong: Tensor
    all_right: Tensor
    all_wrong: Tensor


def fisher_exact(tables: Tables) -> Tensor:
    """Two-sided p of Fisher's exact test: the probability, margins fixed, of all tables at most as
    likely as this one.

    >>> as_counts = [torch.tensor([count], dtype=torch.float64) for count in (3, 0, 3, 3)]
    >>> round(fisher_exact(Tables(*as_counts)).item(), 6)
    0.1
    """
    hit = tables.hit_right + tables.hit_wrong
    k_C = torch.arange(int(tables.all_right.max()) + 1, dtype=hit.dtype, device=hit.device)
    whole = _log_choose(tables.all_right + tables.all_wrong, hit)
    is_legal = (
        (k_C <= tables.all_right[:, None])
        & (k_C <= hit[:, None])
        & (hit[:, None] - k_C <= tables.all_wrong[:, None])
    )
    k = torch.where(is_legal, k_C, tables.hit_right[:, None])
    logp = (
        _log_choose(tables.all_right[:, None], k)
        + _log_choose(tables.all_wrong[:, None], hit[:, None] - k)
        - whole[:, None]
    )
    own = (
        _log_choose(tables.all_right, tables.hit_right)
        + _log_choose(tables.all_wrong, tables.hit_wrong)
        - whole
    )
    # equally likely tables differ by rounding
    is_counted = is_legal & (logp <= own[:, None] + 1e-7)
    return torch.where(is_counted, logp.exp(), 0).sum(1).clamp(max=1)


def information_gain(tables: Tables) -> Tensor:
    """H(correct) - H(correct | present), in bits.

    >>> as_counts = [torch.tensor([count], dtype=torch.float64) for count in (3, 0, 3, 3)]
    >>> information_gain(Tables(*as_counts)).item()
    1.0
    """
    hit, total = tables.hit_right + tables.hit_wrong, tables.all_right + tables.all_wrong
    given_hit = _binary_entropy(tables.hit_right, hit)
    given_miss = _binary_entropy(tables.all_right - tables.hit_right, total - hit)
    return (
        _binary_entropy(tables.all_right, total)
        - (hit * given_hit + (total - hit) * given_miss) / total
    )


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)


def _binary_entropy(part: Tensor, whole: Tensor) -> Tensor:
    """Entropy in bits of a coin with probability part/whole; 0 where whole is 0."""
    p = part / whole.clamp(min=1)
    return -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)) / math.log(2)


def _deduplicated(tables: Tables) -> tuple[Tables, Tensor]:
    """The distinct tables and the number of each table among them: a group has few distinct ones, a
    batch many token types.
    """
    hit, _ = pair_index(tables.hit_right, tables.hit_wrong)
    size, _ = pair_index(tables.all_right, tables.all_wrong)
    index_K, count = pair_index(hit, size)
    first_U = torch.zeros(count, dtype=torch.long, device=index_K.device)
    first_U[index_K] = torch.arange(len(index_K), device=index_K.device)
    return Tables(*(column[first_U] for column in tables)), index_K


class _Types(NamedTuple):
    """Every (group, token id) of the batch: ``type_M`` of each token, its group, its tables, its
    occurrences on both sides.
    """

    type_M: Tensor
    group_K: Tensor
    tables: Tables
    count_right_K: Tensor
    count_wrong_K: Tensor


def _types(batch: TokenBatch, is_right_N: Tensor, by: Groups) -> _Types:
    row_M, _ = batch.mask_NT.nonzero(as_tuple=True)
    group_M, is_right_M = by.index_N[row_M], is_right_N[row_M]
    type_M, num_types = pair_index(group_M, batch.token_ids_NT[batch.mask_NT])
    group_K = torch.zeros(num_types, dtype=torch.long, device=type_M.device).index_put(
        (type_M,), group_M
    )
    pair_M, num_pairs = pair_index(type_M, row_M)
    type_F, is_right_F = type_M.new_zeros(num_pairs), is_right_N.new_zeros(num_pairs)
    type_F[pair_M], is_right_F[pair_M] = type_M, is_right_M

    def count(index: Tensor) -> Tensor:
        return torch.bincount(index, minlength=num_types).double()

    right_P = by.sum(is_right_N.double())
    tables = Tables(
        count(type_F[is_right_F]),
        count(type_F[~is_right_F]),
        right_P[group_K],
        (by.size_P - right_P)[group_K],
    )
    return _Types(type_M, group_K, tables, count(type_M[is_right_M]), count(type_M[~is_right_M]))


def _frequency(types: _Types, length_right_P: Tensor, length_wrong_P: Tensor) -> Tensor:
    """TF+/TF- - TF-/TF+ of each type, TF the saturated share of a side's tokens (BM25's term
    frequency).
    """
    mean_P = (length_right_P + length_wrong_P) / 2

    def saturated(count_K: Tensor, length_P: Tensor) -> Tensor:
        share_K = count_K / length_P.clamp(min=1)[types.group_K]
        damping_K = SATURATION * (
            1 - LENGTH_WEIGHT + LENGTH_WEIGHT * (length_P / mean_P)[types.group_K]
        )
        return share_K * (SATURATION + 1) / (share_K + damping_K)

    right_K, wrong_K = (
        saturated(types.count_right_K, length_right_P),
        saturated(types.count_wrong_K, length_wrong_P),
    )
    return right_K / (wrong_K + ABSENT) - wrong_K / (right_K + ABSENT)


def _flips(
    before_NT: Tensor, after_NT: Tensor, batch: TokenBatch, *, reduce: Reduce = LOCAL
) -> dict[str, Tensor]:
    return {
        "added_mean": masked_mean(after_NT - before_NT, batch.mask_NT, reduce),
        "added_abs_mean": masked_mean((after_NT - before_NT).abs(), batch.mask_NT, reduce),
        "flipped_frac": masked_mean(
            (after_NT * before_NT < 0).to(before_NT.dtype), batch.mask_NT, reduce
        ),
    }


@declare(report=_flips, reads_success=True)
def ktae(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    fisher_weight: float = 1.0,
    gain_weight: float = 1.0,
    frequency_weight: float = 1.0,
    top: float = 1.0,
) -> Tensor:
    """Add to every token what its id says about success in its group.

    credit' = credit + 2 top (sigmoid(S D) - 1/2) with, for a token id in a group,
    S = (a F + b IG)/(a + b), F = exp(-2 p) and 0 at p = 1, p Fisher's exact test of presence
    against correctness (two-sided), IG the information gain in bits, D = asin sqrt f+ - asin sqrt
    f- + c (TF+/TF- - TF-/TF+), f the share of correct (wrong) rollouts that contain the id, TF its
    saturated frequency among their tokens.

    Groups without a correct or without a failed rollout are unchanged. Keeps neither the mass nor
    the sign: the logged ``flipped_frac`` is the share of tokens whose credit changes sign.

    Args:
        credit_NT: [N, T].
        fisher_weight, gain_weight, frequency_weight: a, b, c >= 0, a + b > 0; c = 0 leaves the
            frequencies out.
        top: the largest value that can be added; 0 changes nothing.

    Reference: KTAE, arXiv 2505.16826. The paper writes p as the probability of the table alone and
        top = 1/2; the two-sided p, top = 1 and
    the weights 1, 1, 1 are those of the authors' code. Reads "correct" as success (their
    code: reward > 0). Experimental.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 5], [1, 6]], group=[0, 0], reward=[1.0, 0.0], sampler_logp=[[-1.0] * 2] * 2
    ... )
    >>> ktae(torch.tensor([[0.5, 0.5], [-0.5, -0.5]]), batch, frequency_weight=0.0)
    tensor([[ 0.5000,  0.8737],
            [-0.5000, -0.8737]])
    """
    check_number("ktae", least=0, fisher_weight=fisher_weight, gain_weight=gain_weight)
    check_number("ktae", least=0, frequency_weight=frequency_weight, top=top)
    if fisher_weight + gain_weight == 0:
        raise ValueError(
            "ktae: fisher_weight and gain_weight are both 0, nothing is left to measure; give one"
            " of them a weight > 0"
        )
    is_right_N, by = batch.is_success_N, groups(batch.group_N)
    types = _types(batch, is_right_N, by)
    tables, table_K = _deduplicated(types.tables)
    p_U = fisher_exact(tables)
    closeness_U = torch.where(p_U > 1 - 1e-9, 0, torch.exp(-2 * p_U))
    strength_U = (fisher_weight * closeness_U + gain_weight * information_gain(tables)) / (
        fisher_weight + gain_weight
    )
    share_right_U, share_wrong_U = (
        tables.hit_right / tables.all_right.clamp(min=1),
        tables.hit_wrong / tables.all_wrong.clamp(min=1),
    )
    direction_K = (share_right_U.sqrt().asin() - share_wrong_U.sqrt().asin())[table_K]
    if frequency_weight:
        length_N = batch.length_N.double()
        direction_K = direction_K + frequency_weight * _frequency(
            types, by.sum(length_N * is_right_N), by.sum(length_N * ~is_right_N)
        )
    value_K = 2 * top * (torch.sigmoid(strength_U[table_K] * direction_K) - 0.5)
    is_mixed_K = (types.tables.all_right > 0) & (types.tables.all_wrong > 0)
    added_NT = torch.zeros_like(credit_NT)
    added_NT[batch.mask_NT] = torch.where(is_mixed_K, value_K, 0)[types.type_M].to(credit_NT.dtype)
    return credit_NT + added_NT
