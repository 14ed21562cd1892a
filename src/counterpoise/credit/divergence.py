"""Where a rollout's next-token distribution leaves that of its group: group_divergence."""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.errors import check_number, check_whole
from counterpoise.maths.reduce import LOCAL, Reduce, groups, masked_mean
from counterpoise.maths.select import lowest_of_rows
from counterpoise.maths.trie import pair_index
from counterpoise.stage import declare
from counterpoise.types import TokenBatch

NOISE = 1e-12  # divergences below it are rounding and count as 0


def divergence_from_group(batch: TokenBatch, *, topk: int | None = None) -> Tensor:
    """Jensen-Shannon divergence of each token's distribution from the mean of those that the
    group's rollouts have at the same position, in nats, float64 [N, T].

    The mean is over the rollouts that are still writing there, the rollout itself included;
    positions count model tokens. Distributions are the rollout's own K candidates and one bucket
    for the rest; a candidate that another rollout lacks counts 0 there.

    >>> batch = TokenBatch.from_lists(
    ...     [[1], [2]], group=[0, 0], reward=[1.0, 0.0], sampler_logp=[[-1.0], [-1.0]]
    ... ).replace(topk_ids_NTK=torch.tensor([[[1]], [[2]]]), topk_logp_NTK=torch.zeros(2, 1, 1))
    >>> [round(float(value), 5) for value in divergence_from_group(batch)]
    [0.21576, 0.21576]
    """
    mask_NT, index_N = batch.mask_NT, groups(batch.group_N).index_N
    ids_MK = batch.column("topk_ids_NTK")[mask_NT][:, :topk]
    own_MK = batch.column("topk_logp_NTK")[mask_NT][:, :topk].double().exp()
    place_M, num_places = pair_index(
        index_N[:, None].expand_as(mask_NT)[mask_NT], mask_NT.cumsum(1)[mask_NT]
    )
    alive_M = torch.bincount(place_M, minlength=num_places)[place_M]
    slot_L, num_slots = pair_index(
        place_M[:, None].expand_as(ids_MK).flatten(), ids_MK.long().flatten()
    )
    total_S = own_MK.new_zeros(num_slots).index_add(0, slot_L, own_MK.flatten())
    mean_MK = total_S[slot_L].reshape(own_MK.shape) / alive_M[:, None]
    out_NT = own_MK.new_zeros(mask_NT.shape)
    out_NT[mask_NT] = _jensen_shannon(_with_rest(own_MK), _with_rest(mean_MK))
    return torch.where(out_NT < NOISE, 0, out_NT)


def _with_rest(prob_MK: Tensor) -> Tensor:
    """Probabilities with one more bucket, for what they leave of 1."""
    return torch.cat([prob_MK, (1 - prob_MK.sum(1, keepdim=True)).clamp(min=0)], dim=1)


def _jensen_shannon(one_MK: Tensor, other_MK: Tensor) -> Tensor:
    middle_MK = (one_MK + other_MK) / 2
    parts = (torch.xlogy(p, p) - torch.xlogy(p, middle_MK) for p in (one_MK, other_MK))
    return sum(parts, torch.zeros_like(middle_MK)).sum(1) / 2


def _divergences(
    before_NT: Tensor,
    after_NT: Tensor,
    batch: TokenBatch,
    *,
    topk: int | None = None,
    reduce: Reduce = LOCAL,
) -> dict[str, Tensor]:
    divergence_NT = divergence_from_group(batch, topk=topk)
    return {
        "divergence": masked_mean(divergence_NT, batch.mask_NT, reduce),
        "kept_divergence": masked_mean(divergence_NT, after_NT != 0, reduce),
    }


@declare(needs=("topk_ids_NTK", "topk_logp_NTK"), report=_divergences)
def group_divergence(
    credit_NT: Tensor, batch: TokenBatch, *, fraction: float = 0.1, topk: int | None = None
) -> Tensor:
    """Credit only where a rollout's distribution leaves that of its group.

    credit' = credit on the max(1, ceil(fraction * n)) of the rollout's n tokens with the largest
    Jensen-Shannon divergence from the group's mean distribution at that position, else 0

    At the first token, and where one rollout is left, the divergence is 0. Ties go to the earlier
    token. Keeps the sign, not the mass: ``per_sequence(count="credited")`` divides by what is kept.

    Args:
        credit_NT: [N, T].
        fraction: in (0, 1]; 1 keeps every token.
        topk: candidates to compare; None takes all that were measured.

    Reference: ICT, arXiv 2606.19771, read second hand; no code was found. Reads the paper as: the
        mean is over the rollouts still alive at a position, distributions are the K largest
        probabilities and one bucket for the rest. Departs in leaving out the warm-up on all tokens,
        whose length was not found. Experimental.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 1], [1, 2]], group=[0, 0], reward=[1.0, 0.0], sampler_logp=[[-1.0] * 2] * 2
    ... ).replace(
    ...     topk_ids_NTK=torch.tensor([[[1], [1]], [[1], [2]]]), topk_logp_NTK=torch.zeros(2, 2, 1)
    ... )
    >>> group_divergence(torch.ones(2, 2), batch).tolist()
    [[0.0, 1.0], [0.0, 1.0]]
    """
    check_number("group_divergence", above=0, most=1, fraction=fraction)
    check_whole("group_divergence", least=1, or_none=True, topk=topk)
    divergence_NT = divergence_from_group(batch, topk=topk)
    is_kept_NT = lowest_of_rows(-divergence_NT, batch.mask_NT, fraction)
    return torch.where(is_kept_NT, credit_NT, 0)
