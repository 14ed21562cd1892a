"""How much the tokens of a failed rollout are punished, and which of them."""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.errors import check_number
from counterpoise.maths.reduce import LOCAL, Reduce, masked_mean
from counterpoise.maths.select import lowest_of_rows
from counterpoise.stage import declare
from counterpoise.types import TokenBatch


def _negative_side(
    before_NT: Tensor, after_NT: Tensor, batch: TokenBatch, *, reduce: Reduce = LOCAL
) -> dict[str, Tensor]:
    was_NT, is_kept_NT = before_NT < 0, (before_NT < 0) & (after_NT != 0)
    return {
        "negative_kept_frac": masked_mean(is_kept_NT.to(before_NT.dtype), was_NT, reduce),
        "negative_kept_logp": masked_mean(batch.sampler_logp_NT, is_kept_NT, reduce),
        "negative_dropped_logp": masked_mean(batch.sampler_logp_NT, was_NT & ~is_kept_NT, reduce),
    }


@declare(report=_negative_side)
def negative_token_filter(credit_NT: Tensor, batch: TokenBatch, *, fraction: float = 0.1) -> Tensor:
    """Punish only the rarest tokens of a failed rollout.

    credit' = credit * 1[credit >= 0 or the token is one of the k = max(1, ceil(fraction * n)) of
    lowest sampler log-prob]

    ``n`` counts the rollout's tokens with negative credit (all of them, for the first rule of a
    chain); ties go to the earlier token. The dropped tokens still count in the denominator of any
    reduction. Keeps the sign, not the mass. Works with one rollout a prompt.

    Args:
        credit_NT: [N, T].
        fraction: kappa, in (0, 1]; 1 keeps every token.

    Reference: negative token filtering, arXiv 2606.17250. Departs from a bare ceil in that rounding
        noise of ``fraction * n`` adds no token.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2, 3]], group=[0], reward=[0.0], sampler_logp=[[-0.1, -4.0, -0.2]]
    ... )
    >>> negative_token_filter(torch.full((1, 3), -0.5), batch, fraction=0.1).tolist()
    [[0.0, -0.5, 0.0]]
    """
    check_number("negative_token_filter", above=0, most=1, fraction=fraction)
    is_negative_NT = credit_NT < 0
    is_kept_NT = lowest_of_rows(batch.sampler_logp_NT, is_negative_NT, fraction)
    return torch.where(is_negative_NT & ~is_kept_NT, 0, credit_NT)


def _negative_mass(
    before_NT: Tensor, after_NT: Tensor, batch: TokenBatch, *, reduce: Reduce = LOCAL
) -> dict[str, Tensor]:
    """Share of the negative mass that is left, and the log-prob at which it lies, mass-weighted."""
    was, is_left = (
        reduce.sum(-credit_NT.clamp(max=0).sum()) for credit_NT in (before_NT, after_NT)
    )
    weighted_NT = torch.where(after_NT < 0, -after_NT * batch.sampler_logp_NT, 0)
    return {
        "negative_mass": torch.where(was == 0, 1, is_left / torch.where(was == 0, 1, was)),
        "negative_logp": reduce.sum(weighted_NT.sum()) / torch.where(is_left == 0, 1, is_left),
    }


@declare(report=_negative_mass)
def soften_negatives(credit_NT: Tensor, batch: TokenBatch, *, kappa: float = 1.0) -> Tensor:
    """Punish a token the less, the surer the sampler was of it.

    credit' = credit (1 - p)^kappa where credit < 0, p the sampler's probability of the token

    Most tokens of a wrong answer are certain and not to blame; 1 - p is large where the rollout
    chose. Keeps the sign, not the mass: its control is ``even_mass(rule=soften_negatives())``.

    Args:
        credit_NT: [N, T].
        kappa: >= 0; 0 changes nothing.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2]], group=[0], reward=[0.0], sampler_logp=[[0.0, -20.0]]
    ... )
    >>> soften_negatives(torch.full((1, 2), -1.0), batch).tolist()
    [[0.0, -1.0]]
    """
    check_number("soften_negatives", least=0, kappa=kappa)
    doubt_NT = _doubt(batch).to(credit_NT.dtype)
    return torch.where(credit_NT < 0, credit_NT * doubt_NT**kappa + 0.0, credit_NT)


@declare(needs="entropy_NT", report=_negative_mass)
def surprise_negatives(credit_NT: Tensor, batch: TokenBatch, *, cap: float = 1.0) -> Tensor:
    """Punish a token by how much rarer it was than the sampler's own choices there are on average.

    credit' = credit min(cap, max(0, -log p - H)) where credit < 0, p the sampler's probability of
    the token, H the entropy of its position

    A slip is a rare token where the sampler was nearly sure; a rare token where it was not is a
    choice. Keeps the sign, not the mass: its control is ``even_mass(rule=surprise_negatives())``.

    Args:
        credit_NT: [N, T].
        batch: reads entropy_NT.
        cap: > 0, the largest factor.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2, 3]],
    ...     group=[0],
    ...     reward=[0.0],
    ...     sampler_logp=[[-0.1, -3.0, -3.0]],
    ...     entropy_NT=torch.tensor([[0.2, 0.3, 2.75]]),
    ... )
    >>> surprise_negatives(torch.full((1, 3), -1.0), batch).tolist()
    [[0.0, -1.0, -0.25]]
    """
    check_number("surprise_negatives", above=0, cap=cap)
    excess_NT = (-batch.sampler_logp_NT - batch.column("entropy_NT")).clamp(0, cap)
    factor_NT = torch.where(batch.mask_NT, excess_NT, 0).to(credit_NT.dtype)
    return torch.where(credit_NT < 0, credit_NT * factor_NT + 0.0, credit_NT)


@declare(report=_negative_mass, reads_rewards_only=True)
def negative_mass(credit_NT: Tensor, batch: TokenBatch, *, factor: float = 0.15) -> Tensor:
    """Punish every token of a failed rollout less, by the same factor.

    credit' = factor * credit where credit < 0

    Keeps the sign, not the mass. The control for rules that take mass off negative credit.

    Args:
        credit_NT: [N, T].
        factor: >= 0; 1 changes nothing, 0 leaves successes alone.

    >>> batch = TokenBatch.from_lists(
    ...     [[1], [2]], group=[0, 0], reward=[1.0, 0.0], sampler_logp=[[-1.0], [-1.0]]
    ... )
    >>> negative_mass(torch.tensor([[1.0], [-1.0]]), batch, factor=0.5).tolist()
    [[1.0], [-0.5]]
    """
    check_number("negative_mass", least=0, factor=factor)
    return torch.where(credit_NT < 0, factor * credit_NT + 0.0, credit_NT)


@declare(report=_negative_mass)
def negatives(
    credit_NT: Tensor, batch: TokenBatch, *, mass: float = 1.0, location: float = 0.0
) -> Tensor:
    """Set how much a failed rollout is punished apart from where.

    credit' = mass * credit ((1 - location) + location (1 - p) / mean(1 - p)) where credit < 0, the
    mean over the rollout's negative credit, weighted by |credit|

    Each rollout keeps ``mass`` times its own negative mass, whatever the location. Keeps the sign.
    ``entropy_target`` moves either of them by its path, ``credit.mass`` or ``credit.location``.

    Args:
        credit_NT: [N, T].
        mass: >= 0; 1 keeps the mass.
        location: in [0, 1]: 0 leaves the credit where it is, 1 spreads it by 1 - p. A rollout
            whose tokens were all certain stays as it is.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2]], group=[0], reward=[0.0], sampler_logp=[[0.0, -30.0]]
    ... )
    >>> negatives(torch.full((1, 2), -1.0), batch, mass=0.5, location=0.5).tolist()
    [[-0.25, -0.75]]
    """
    check_number("negatives", least=0, mass=mass)
    check_number("negatives", least=0, most=1, location=location)
    mass_NT, doubt_NT = -credit_NT.clamp(max=0), _doubt(batch).to(credit_NT.dtype)
    total_N1, doubt_N1 = (x.sum(1, keepdim=True) for x in (mass_NT, mass_NT * doubt_NT))
    is_sure_N1 = doubt_N1 == 0
    share_NT = torch.where(
        is_sure_N1, 1, doubt_NT * total_N1 / torch.where(is_sure_N1, 1, doubt_N1)
    )
    place_NT = (1 - location) + location * share_NT
    return torch.where(credit_NT < 0, mass * place_NT * credit_NT + 0.0, credit_NT)


def _doubt(batch: TokenBatch) -> Tensor:
    """1 - p of each model token under the sampler, 0 elsewhere."""
    return torch.where(batch.mask_NT, -torch.expm1(batch.sampler_logp_NT.clamp(max=0)), 0)
