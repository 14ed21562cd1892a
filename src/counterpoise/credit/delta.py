"""DelTA: a token weighs more the closer its gradient is to its own side's centroid than to the
other's.

Axes as in ``delta_score``.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoise.credit.delta_score import (
    Scoring,
    Sides,
    first_round,
    margin,
    sides_of,
    temperature,
)
from counterpoise.credit.draws import token_keys
from counterpoise.credit.proxies import PROXY_COLUMNS, Proxy, check_proxy, token_proxy
from counterpoise.errors import check_choice, check_number, check_whole
from counterpoise.maths.reduce import LOCAL, Reduce
from counterpoise.stage import declare
from counterpoise.types import TokenBatch


class Settings(NamedTuple):
    """The parameters of ``delta``."""

    proxy: str
    low: float
    high: float
    refinements: int
    count_zero: bool
    score: str
    hard: bool
    gamma: float | None
    normalise: bool
    select: str | None
    select_frac: float
    topk: int | None
    temperature: float

    @property
    def is_random(self) -> bool:
        """Whether tokens are told apart by draws, and no proxy is read."""
        return "random" in (self.score, self.select)

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.score, self.hard, self.gamma)


def _columns(*, proxy: str, score: str, select: str | None, **_: Any) -> frozenset[str]:
    return frozenset() if "random" in (score, select) else PROXY_COLUMNS.get(proxy, frozenset())


@torch.no_grad()
def _report(
    before_NT: Tensor,
    after_NT: Tensor,
    batch: TokenBatch,
    *,
    proxy: str = "row",
    score: str = "contrast",
    hard: bool = False,
    gamma: float | None = None,
    select: str | None = None,
    topk: int | None = None,
    temperature: float = 1.0,
    reduce: Reduce = LOCAL,
) -> dict[str, Tensor]:
    """Logged numbers (docs/methods/delta.md).

    Weights are read off the credit; of the rounds only the first is computed again.
    """
    given = {
        "proxy": proxy,
        "score": score,
        "hard": hard,
        "gamma": gamma,
        "select": select,
        "topk": topk,
        "temperature": temperature,
    }
    settings, sides = Settings(**{**delta.parameters, **given}), sides_of(before_NT, batch, reduce)
    out = _weight_numbers(after_NT.flatten()[sides.index_M].abs() / sides.mass_M, sides, batch)
    if settings.is_random or sides.is_one_sided:
        return out
    return out | _first_round_numbers(
        _proxy(before_NT, batch, sides, settings), sides, settings.scoring
    )


def _weight_numbers(weight_M: Tensor, sides: Sides, batch: TokenBatch) -> dict[str, Tensor]:
    positive, negative = sides.mean(weight_M)
    num_credited = sides.count[0] + sides.count[1]
    every = sides.reduce.cat(
        torch.stack([weight_M.min(), weight_M.max()]) if len(weight_M) else weight_M
    )
    return {
        "weight_positive": positive,
        "weight_negative": negative,
        "weight_min": every.min() if len(every) else torch.ones(()),
        "weight_max": every.max() if len(every) else torch.ones(()),
        "inflation": (
            (positive * sides.count[0] + negative * sides.count[1]) / num_credited
            if num_credited > 0
            else torch.ones(())
        ),
        "zero_frac": 1 - num_credited.double() / sides.reduce.sum(batch.mask_NT.sum()),
    }


def _first_round_numbers(proxy: Proxy, sides: Sides, scoring: Scoring) -> dict[str, Tensor]:
    (mu_positive, mu_negative), delta_M = first_round(proxy, sides, scoring)
    gamma = temperature(delta_M, sides, scoring)
    alpha = sides.mean(scoring.alpha(delta_M / sides.spread(gamma)))
    return {
        "centroid_distance": torch.linalg.vector_norm(mu_positive - mu_negative),
        "gamma_positive": gamma[0],
        "gamma_negative": gamma[1],
        "alpha_positive": alpha[0],
        "alpha_negative": alpha[1],
    }


@declare(needs=_columns, report=_report)
def delta(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    proxy: str = "row",
    low: float = 0.8,
    high: float = 1.2,
    refinements: int = 1,
    count_zero: bool = True,
    score: str = "contrast",
    hard: bool = False,
    gamma: float | None = None,
    normalise: bool = True,
    select: str | None = None,
    select_frac: float = 0.5,
    topk: int | None = None,
    temperature: float = 1.0,
    reduce: Reduce = LOCAL,
    generator: torch.Generator | None = None,
) -> Tensor:
    """credit' = weight * credit, weight = (low + (high - low) alpha) * (number of tokens) / (sum of
    weights).

    With v a token's gradient proxy and a = |credit|, over the whole batch of all ranks::

        mu_side = sum a v / sum a                        over the tokens of that side
        Delta   = 2 v . (mu+ - mu-) + |mu-|^2 - |mu+|^2  positive side; its negative on the other
        gamma   = sqrt(max(var Delta, 1e-8))             population variance of each side
        alpha   = sigmoid(Delta / gamma)

    then ``refinements`` times: mu_side = sum a alpha v / sum a alpha, Delta and alpha again, gamma
    from the Delta before. Tokens with credit 0 weigh ``low``. If one side is empty every weight is
    1. Keeps the sign, not the mass sum|credit|: the mean weight over counted tokens is 1. No
       gradient flows through the weights.

    Args:
        credit_NT: incoming credit, [N, T]; its sign is the side.
        proxy: v; ``row`` (1 - p) h, ``topk`` W_y - sum p~_j W_j over the batch's candidates,
            ``head`` the LM head's exact gradient.
        low, high: the range of weights before they are scaled to mean 1; (0, 1) is the raw alpha.
        refinements: K.
        count_zero: whether tokens with credit 0 count in the mean of 1. True (the paper) inflates
            the other tokens.
        score: ``contrast``; ``within_side`` puts -|v - mu_own|^2 in place of Delta; ``random``
            draws alpha uniformly.
        hard: alpha = 1 where Delta > 0, else 0.
        gamma: one temperature for both sides instead of the adaptive ones.
        normalise: scale the weights to mean 1.
        select: keep the ``top``, ``bottom`` or a ``random`` ``select_frac`` of the tokens with
            credit, by alpha, at equal weight.
        topk: use the first so many candidates of the batch (None: all of them).
        temperature: of the sampling distribution; only ``head`` computes probabilities itself.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2], [3, 2]],
    ...     group=[0, 0],
    ...     reward=[1.0, 0.0],
    ...     sampler_logp=[[-0.7, -0.7], [-0.7, -0.7]],
    ...     hidden_NTD=torch.tensor([[[2.0], [0.0]], [[-2.0], [0.0]]]),
    ... )
    >>> delta(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), batch)  # token 2 is on both sides
    tensor([[ 1.0788,  0.9212],
            [-1.0788, -0.9212]])

    Reference: arXiv 2605.21467. Reads the paper as: a token whose credit another rule set to 0 is a
        token with advantage 0;
    ``within_side`` drops the other side's distance and changes nothing else; a selection is among
    tokens with credit, both sides together; a side whose alpha are all 0 keeps its centroid.
    ``head`` and ``count_zero=False`` are ours."""
    values = (
        proxy,
        low,
        high,
        refinements,
        count_zero,
        score,
        hard,
        gamma,
        normalise,
        select,
        select_frac,
        topk,
        temperature,
    )
    return credit_NT * _weight(credit_NT, batch, Settings(*values), reduce, generator)


def delta_weight(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    reduce: Reduce = LOCAL,
    generator: torch.Generator | None = None,
    **params: Any,
) -> Tensor:
    """The weight of every response token under ``delta``, tokens with credit 0 included; 0 on
    padding.

    Args:
        params: those of ``delta``.

    >>> batch = TokenBatch.from_lists(
    ...     [[1], [2]], group=[0, 0], reward=[1.0, 0.0], sampler_logp=[[-1.0], [-1.0]]
    ... )
    >>> delta_weight(torch.tensor([[1.0], [0.0]]), batch).flatten().tolist()  # one side only
    [1.0, 1.0]
    """
    return _weight(credit_NT, batch, Settings(**delta(**params).settings), reduce, generator)


@torch.no_grad()
def _weight(
    credit_NT: Tensor,
    batch: TokenBatch,
    settings: Settings,
    reduce: Reduce,
    generator: torch.Generator | None,
) -> Tensor:
    _check(settings)
    sides = sides_of(credit_NT, batch, reduce)
    if settings.is_random:
        value_M = (token_keys(batch, generator).flatten()[sides.index_M].double() / 2**63).to(
            sides.mass_M.dtype
        )
    elif sides.is_one_sided:
        return batch.mask_NT.to(credit_NT.dtype)
    else:
        value_M = margin(
            _proxy(credit_NT, batch, sides, settings), sides, settings.scoring, settings.refinements
        )
    if settings.select:
        weight_M, zero_weight = _selected(value_M, settings, reduce)
    else:
        alpha_M = value_M if settings.is_random else settings.scoring.alpha(value_M)
        weight_M, zero_weight = (
            settings.low + (settings.high - settings.low) * alpha_M,
            settings.low,
        )
    weight_NT = torch.zeros(
        credit_NT.shape, dtype=weight_M.dtype, device=credit_NT.device
    ).masked_fill(batch.mask_NT, zero_weight)
    weight_NT = weight_NT.flatten().index_copy(0, sides.index_M, weight_M).view(credit_NT.shape)
    if settings.normalise:
        is_counted_NT = batch.mask_NT if settings.count_zero else batch.mask_NT & (credit_NT != 0)
        weight_NT = _mean_one(weight_NT, is_counted_NT, batch.mask_NT, reduce)
    return weight_NT.to(credit_NT.dtype)


def _proxy(credit_NT: Tensor, batch: TokenBatch, sides: Sides, settings: Settings) -> Proxy:
    columns = [batch.column(name) for name in PROXY_COLUMNS[settings.proxy]]
    floats = [column.dtype for column in columns if column.is_floating_point()]
    dtype = functools.reduce(
        torch.promote_types, floats, torch.promote_types(credit_NT.dtype, torch.float32)
    )
    return token_proxy(
        settings.proxy, batch, sides.index_M, dtype, settings.topk, settings.temperature
    )


def _selected(value_M: Tensor, settings: Settings, reduce: Reduce) -> tuple[Tensor, float]:
    """1 for the chosen tokens (and for ties with the last of them), 0 for the others; and what a
    token with credit 0 weighs.
    """
    sign = 1 if settings.select == "bottom" else -1
    every = sign * reduce.cat(value_M)
    if not len(every):
        return value_M, 1.0
    num_chosen = math.ceil(
        settings.select_frac * len(every) - 1e-9
    )  # 0.1 * 30 rounds to a little over 3
    last = torch.kthvalue(every, max(num_chosen, 1)).values
    # a token with credit 0 weighs as the mean of the others, so that it changes no mean
    return (sign * value_M <= last).to(value_M.dtype), float((every <= last).double().mean())


def _mean_one(weight_NT: Tensor, is_counted_NT: Tensor, mask_NT: Tensor, reduce: Reduce) -> Tensor:
    """Scaled so that the mean over counted tokens of all ranks is 1; all 1 if those weights are all
    0.
    """
    total = reduce.sum(torch.where(is_counted_NT, weight_NT, 0).sum(dtype=torch.float64))
    if not bool(total > 0):
        return mask_NT.to(weight_NT.dtype)
    return (weight_NT * (reduce.sum(is_counted_NT.sum()) / total)).to(weight_NT.dtype)


def _check(settings: Settings) -> None:
    s = settings
    check_proxy(s.proxy, s.topk, s.temperature)
    check_choice("delta", ("contrast", "within_side", "random"), score=s.score)
    if s.select is not None:
        check_choice("delta", ("top", "bottom", "random"), select=s.select)
    check_number("delta", least=0, low=s.low)
    check_number("delta", above=0, least=s.low, high=s.high)
    check_whole("delta", least=0, refinements=s.refinements)
    check_number("delta", above=0, most=1, select_frac=s.select_frac)
    check_number("delta", above=0, or_none=True, gamma=s.gamma)
    for is_wrong, why in _contradictions(s):
        if is_wrong:
            raise ValueError(f"delta: {why}")


def _contradictions(s: Settings) -> list[tuple[bool, str]]:
    changed = {name for name, default in delta.parameters.items() if getattr(s, name) != default}
    unread = ", ".join(
        sorted(changed & {"proxy", "refinements", "hard", "gamma", "topk", "temperature"})
    )
    return [
        (
            s.score == "random" and s.select is not None,
            "score='random' ranks nothing; use select='random' alone.",
        ),
        (
            s.select == "random" and s.score != "contrast",
            "select='random' reads no score; leave score at its default.",
        ),
        (
            s.is_random and bool(unread),
            f"a random choice reads no proxy; leave at the default: {unread}.",
        ),
        (s.hard and s.gamma is not None, "hard=True has no temperature; leave gamma at None."),
        (
            s.hard and s.select is not None,
            "hard=True gives alpha two values, which rank nothing; leave select at None.",
        ),
        (
            s.select is not None and bool(changed & {"low", "high"}),
            "a selection gives equal weights; leave low and high at the default.",
        ),
        (
            s.select is not None and not s.count_zero,
            "a selection weighs tokens with credit 0 as the mean; leave count_zero at True.",
        ),
        (
            s.select is None and "select_frac" in changed,
            "select_frac is read only with select='top', 'bottom' or 'random'.",
        ),
        (
            not s.normalise and not s.count_zero,
            "without normalise there is no mean to count tokens for; leave count_zero at True.",
        ),
    ]
