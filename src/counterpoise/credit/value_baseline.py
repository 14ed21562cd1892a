"""A value baseline without a critic: the reward that the hidden state of a token lets expect. Ours.

Axes as in ``types``; M model tokens laid end to end, F features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from counterpoise.errors import check_choice, check_number, check_whole
from counterpoise.maths.reduce import LOCAL, Reduce, groups, seeded_generator
from counterpoise.maths.ridge import gram, ridge_fit
from counterpoise.stage import declare
from counterpoise.types import TokenBatch

SCALES = ("credit", "unit")


def no_fit() -> dict[str, Any]:
    """Nothing seen yet: no sums of past batches, no numbers of the last one."""
    return {"gram_QQ": None, "unseen": {}}


def _reads_siblings(*, siblings: bool = False) -> bool:
    return siblings


def _unseen(
    before_NT: Tensor, after_NT: Tensor, batch: TokenBatch, *, state: dict[str, Any]
) -> dict[str, float]:
    """How well the fit of past batches predicted the rewards of this one; empty before the first
    fit and where all rewards are equal.
    """
    return state["unseen"]


@declare(needs="hidden_NTD", init=no_fit, report=_unseen, needs_groups=_reads_siblings)
def value_baseline(
    state: dict[str, Any],
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    decay: float = 0.8,
    ridge: float = 0.1,
    features: int = 64,
    siblings: bool = False,
    lam: float = 1.0,
    scale: str = "credit",
    reduce: Reduce = LOCAL,
) -> tuple[Tensor, dict[str, Any]]:
    """Measure every token against the reward that its context let expect.

    credit' = z (reward - V(h_t)), V a ridge regression of the reward on hidden states of past
    batches, whose sums count ``decay`` times less with every batch

    h_t feeds the head that draws token t, so it knows the context and not the token: with slopes
    from other rollouts V adds no bias. The batch is judged first and then joins the sums. Before
    the first fit credit' = credit, bit for bit. Groups that are all right or all wrong get credit
    too. Keeps sum credit^2 (``scale="credit"``), neither the sign nor the mass.

    Args:
        state: {"gram_QQ": sums of past batches or None, "unseen": R2 of the last batch}.
        credit_NT: [N, T]; only its size is read, once there is a fit.
        batch: reads hidden_NTD and reward_N.
        decay: in [0, 1]; 0 fits on the last batch alone.
        ridge: > 0, the penalty on slopes of features of unit variance.
        features: a hidden size above it is brought down to it by a fixed random projection.
        siblings: one more feature, the mean reward of the prompt's other rollouts.
        lam: in [0, 1]: credit' = z sum_k lam^k (V_t+k+1 - V_t+k), V after the last token = reward;
            1 telescopes to reward - V_t.
        scale: ``credit``: z keeps the mean square of the credit that arrives; ``unit``: the mean
            square over the batch's tokens is 1. Over all ranks.

    >>> batch = TokenBatch.from_lists(
    ...     [[1], [2]],
    ...     group=[0, 0],
    ...     reward=[1.0, 0.0],
    ...     sampler_logp=[[-1.0], [-1.0]],
    ...     hidden_NTD=torch.tensor([[[1.0]], [[0.0]]]),
    ... )
    >>> credit_NT = torch.tensor([[1.0], [-1.0]])
    >>> same_NT, state = value_baseline(no_fit(), credit_NT, batch)
    >>> new_NT, state = value_baseline(state, credit_NT, batch.replace(reward_N=torch.ones(2)))
    >>> new_NT  # the second one was not expected to succeed
    tensor([[0.0673],
            [1.4126]])
    """
    _check(decay, ridge, features, lam, scale)
    feature_MF, reward_M = _features(batch, features, siblings), _spread(batch.reward_N, batch)
    gram_QQ = _check_sums(reduce.sum(gram(feature_MF, reward_M)))
    if state["gram_QQ"] is None:
        return credit_NT, {"gram_QQ": gram_QQ.tolist(), "unseen": {}}
    past_QQ = torch.tensor(state["gram_QQ"], dtype=torch.float64, device=gram_QQ.device)
    value_NT = torch.zeros_like(batch.mask_NT, dtype=torch.float64)
    value_NT[batch.mask_NT] = ridge_fit(past_QQ, ridge).predict(feature_MF)
    surprise_NT = surprise(batch.reward_N, value_NT, batch.mask_NT, lam)
    z = _factor(credit_NT if scale == "credit" else batch.mask_NT, surprise_NT, reduce)
    new = {
        "gram_QQ": (decay * past_QQ + gram_QQ).tolist(),
        "unseen": unseen(value_NT, batch, reduce),
    }
    return (z * surprise_NT).to(credit_NT.dtype), new


def surprise(reward_N: Tensor, value_NT: Tensor, mask_NT: Tensor, lam: float) -> Tensor:
    """sum_k lam^k (V_t+k+1 - V_t+k) over the model tokens of a rollout, V after the last one its
    reward; float64, 0 outside the mask.
    """
    if lam == 1:
        return torch.where(mask_NT, reward_N[:, None].double() - value_NT, 0)
    out_NT, next_N = torch.zeros_like(value_NT), reward_N.double()
    later_N = torch.zeros_like(next_N)
    for t in reversed(range(value_NT.shape[1])):
        is_model_N, value_N = mask_NT[:, t], value_NT[:, t]
        later_N = torch.where(is_model_N, next_N - value_N + lam * later_N, later_N)
        next_N = torch.where(is_model_N, value_N, next_N)
        out_NT[:, t] = torch.where(is_model_N, later_N, 0)
    return out_NT


def unseen(value_NT: Tensor, batch: TokenBatch, reduce: Reduce = LOCAL) -> dict[str, float]:
    """R2 of the values on rollouts that they were not fitted on: over all tokens, at the first,
    middle and last token of a rollout, and for comparison that of the mean reward of the prompt's
    other rollouts. 1 is perfect, 0 as good as the batch's mean reward.
    """
    reward_N, length_N = batch.reward_N.double(), batch.length_N
    error_NT = torch.where(batch.mask_NT, reward_N[:, None] - value_NT, 0)
    rank_NT = torch.where(batch.mask_NT, batch.mask_NT.cumsum(1) - 1, -1)
    places = {"first": 0 * length_N, "middle": length_N // 2, "last": length_N - 1}
    errors = {
        f"r2_{name}": torch.where(rank_NT == at_N[:, None], error_NT, 0).square().sum(1)
        for name, at_N in places.items()
    }
    whole = {
        "r2": error_NT.square().sum(1),
        "r2_siblings": length_N * (reward_N - sibling_mean(batch)).square(),
    }
    one_N = torch.ones_like(reward_N)
    scores = {name: _r2(reward_N, length_N, error_N, reduce) for name, error_N in whole.items()}
    scores |= {name: _r2(reward_N, one_N, error_N, reduce) for name, error_N in errors.items()}
    return {name: score for name, score in scores.items() if score is not None}


def sibling_mean(batch: TokenBatch) -> Tensor:
    """Mean reward of the other rollouts of the same prompt, float64, [N]; 0 for a rollout alone."""
    reward_N, prompts = batch.reward_N.double(), groups(batch.group_N)
    others_N = prompts.sum(reward_N)[prompts.index_N] - reward_N
    return others_N / (prompts.size_P[prompts.index_N] - 1).clamp(min=1)


def _features(batch: TokenBatch, features: int, siblings: bool) -> Tensor:
    """Hidden states of the model tokens, projected where they are wider than ``features``."""
    hidden_MD = batch.column("hidden_NTD")[batch.mask_NT]
    size = hidden_MD.shape[1]
    if size > features:
        draws = seeded_generator(0, 0, f"value_baseline/{size}/{features}")
        projection_DF = torch.randn(size, features, generator=draws) / size**0.5
        hidden_MD = hidden_MD @ projection_DF.to(hidden_MD)
    if not siblings:
        return hidden_MD
    return torch.cat([hidden_MD, _spread(sibling_mean(batch), batch)[:, None].to(hidden_MD)], dim=1)


def _spread(value_N: Tensor, batch: TokenBatch) -> Tensor:
    """One number per rollout at each of its model tokens, [M]."""
    return value_N.repeat_interleave(batch.length_N)


def _factor(size_NT: Tensor, surprise_NT: Tensor, reduce: Reduce) -> Tensor:
    """The number that brings the mean square to that of ``size_NT``; 0 where there is none."""
    wanted, there = (reduce.sum(x.double().square().sum()) for x in (size_NT, surprise_NT))
    return torch.where(there == 0, 0, wanted / torch.where(there == 0, 1, there)).sqrt()


def _r2(reward_N: Tensor, weight_N: Tensor, error_N: Tensor, reduce: Reduce) -> float | None:
    """1 - sum error / sum weight (reward - mean)^2 over all ranks; None if rewards are equal."""
    columns = (error_N, weight_N.double(), weight_N * reward_N, weight_N * reward_N.square())
    error, count, total, squares = reduce.sum(torch.stack([c.sum() for c in columns])).tolist()
    spread = squares - total**2 / count
    return 1 - error / spread if spread > 1e-12 * squares else None


def _check_sums(gram_QQ: Tensor) -> Tensor:
    """Sums that are not finite are an error, so that they never join those of past batches."""
    if not bool(torch.isfinite(gram_QQ).all()):
        raise ValueError("value_baseline: hidden_NTD is not finite on some response token.")
    return gram_QQ


def _check(decay: float, ridge: float, features: int, lam: float, scale: str) -> None:
    where = "value_baseline"
    check_number(where, least=0, most=1, decay=decay, lam=lam)
    check_number(where, above=0, ridge=ridge)
    check_whole(where, least=1, features=features)
    check_choice(where, SCALES, scale=scale)
