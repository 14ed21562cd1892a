"""Losses against the objectives they stand for: sequence objectives, cross-entropy, C-RF, and what
cancels on shared tokens (DFPO).
"""

from __future__ import annotations

import math

import pytest
import torch

from counterpoise.losses import (
    clipped,
    contrastive,
    dfpo,
    dfpo_weight,
    geometric,
    reinforce,
    sequence_ratio,
    symmetric_clip,
    target,
)
from counterpoise.reductions import constant_length, per_sequence, side_means
from counterpoise.types import Rows
from helpers.loss_cases import INF, assert_close, gradient, random_rows, value_and_gradient


def sequence_objective(logp_NT, rows, mean_log_N) -> torch.Tensor:
    """Gradient of -(1/N) sum_i A_i exp(mean_log_i) through all tokens of a rollout."""
    leaf_NT = logp_NT.clone().requires_grad_()
    return value_and_gradient(-(rows.advantage_N * mean_log_N(leaf_NT).exp()).mean(), leaf_NT)[1]


def test_sequence_ratio_has_the_gradient_of_the_sequence_objective():
    logp_NT, rows = random_rows(seed=8, uniform=True)
    rows = rows._replace(scale_NT=per_sequence(rows.mask_NT, rows.credit_NT, rows.advantage_N))
    got = gradient(sequence_ratio(clip_low=INF, clip_high=INF), logp_NT, rows)
    length_N = rows.mask_NT.sum(1)
    assert len(set(length_N.tolist())) > 1
    expected = sequence_objective(
        logp_NT, rows, lambda x_NT: ((x_NT - rows.sampler_logp_NT) * rows.mask_NT).sum(1) / length_N
    )
    assert_close(got, expected)
    # with credit that differs along a row the two part: every token keeps its own credit here, and
    # shares the row's mean there
    uneven_NT = rows.credit_NT * torch.rand(
        rows.credit_NT.shape, generator=torch.Generator().manual_seed(0)
    )
    uneven = gradient(
        sequence_ratio(clip_low=INF, clip_high=INF), logp_NT, rows._replace(credit_NT=uneven_NT)
    )
    assert_close(uneven * rows.credit_NT, got * uneven_NT)


def test_the_whole_ratio_has_the_gradient_of_rloo_in_trl():
    """-(1/N) sum_i min(s_i A_i, clip(s_i, 0.8, 1.2) A_i), s_i = exp(sum_t log r_t); some rollouts
    are clipped.
    """
    logp_NT, rows = random_rows(seed=12, uniform=True, spread=0.2)
    scale_NT = constant_length(rows.mask_NT, rows.credit_NT, rows.advantage_N, length=1)
    rows, loss = (
        rows._replace(scale_NT=scale_NT),
        sequence_ratio(clip_low=0.2, clip_high=0.2, mean=False),
    )
    leaf_NT = logp_NT.clone().requires_grad_()
    ratio_N = ((leaf_NT - rows.sampler_logp_NT) * rows.mask_NT).sum(1).exp()
    both_2N = torch.stack([ratio_N, ratio_N.clamp(0.8, 1.2)]) * rows.advantage_N
    expected = value_and_gradient(-both_2N.amin(0).mean(), leaf_NT)[1]
    is_cut_NT = loss(logp_NT, rows).clipped_NT
    assert is_cut_NT.any() and not is_cut_NT[rows.mask_NT].all()
    assert_close(gradient(loss, logp_NT, rows), expected)


def test_geometric_has_the_gradient_of_its_sequence_objective():
    logp_NT, rows = random_rows(seed=9, uniform=True, spread=0.6)
    rows = rows._replace(scale_NT=per_sequence(rows.mask_NT, rows.credit_NT, rows.advantage_N))

    def mean_log(x_NT):
        log_NT, sign_N1 = x_NT - rows.sampler_logp_NT, rows.advantage_N.sign()[:, None]
        kept_NT = sign_N1 * torch.minimum(sign_N1 * log_NT, sign_N1 * log_NT.clamp(-0.4, 0.4))
        return (kept_NT * rows.mask_NT).sum(1) / rows.mask_NT.sum(1)

    assert geometric(logp_NT, rows).clipped_NT.any()
    assert_close(gradient(geometric, logp_NT, rows), sequence_objective(logp_NT, rows, mean_log))


def test_target_has_the_gradient_of_the_cross_entropy():
    logp_NT, rows = random_rows(seed=10)
    leaf_NT, total = logp_NT.clone().requires_grad_(), torch.zeros((), dtype=torch.float64)
    for g in rows.group_N.unique():
        at = rows.group_N == g
        reward = rows.reward_N[at]
        u = (reward - reward.mean()) / reward.std(unbiased=False)
        q = ((rows.sampler_logp_NT * rows.mask_NT).sum(1)[at] + u).softmax(0)
        total = total - (q * (leaf_NT * rows.mask_NT).sum(1)[at].log_softmax(0)).sum()
    expected = value_and_gradient(total, leaf_NT)[1] / (6 * 5)  # constant length: 6 rollouts of 5
    assert_close(gradient(target, logp_NT, rows), expected)
    constant = rows._replace(reward_N=torch.full_like(rows.reward_N, 0.7))
    assert_close(target(rows.sampler_logp_NT, constant).coef_NT, torch.zeros_like(logp_NT))


def test_contrastive_with_side_means_is_the_crf_objective():
    logp_NT, rows = random_rows(seed=11)
    sign_N = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    kept_NT = rows.mask_NT & (
        (sign_N > 0)[:, None] | (rows.sampler_logp_NT < rows.sampler_logp_NT.median())
    )
    credit_NT = sign_N[:, None] * kept_NT
    rows = rows._replace(
        advantage_N=sign_N,
        credit_NT=credit_NT,
        scale_NT=side_means(rows.mask_NT, credit_NT, sign_N),
    )
    sums = {1: [], -1: []}
    for i, row in enumerate((logp_NT - rows.sampler_logp_NT).exp().tolist()):
        n = int(rows.mask_NT[i].sum())
        bounded = [
            min(r, 11.0) if sign_N[i] > 0 else max(r, 0.8) * bool(kept_NT[i, t])
            for t, r in enumerate(row[:n])
        ]
        sums[int(sign_N[i])].append(sum(bounded) / n)
    expected = -0.5 * (sum(sums[1]) / 2 - sum(sums[-1]) / 4)
    assert (contrastive(logp_NT, rows).loss_NT * rows.scale_NT).sum().item() == pytest.approx(
        expected, abs=1e-12
    )


SUM = constant_length(length=1)


def shared_token_residual(loss, ratio: float, reduction=SUM) -> float:
    """(1/G) sum_i of the coefficient with which rollout i's copy of one shared token enters, G = 8,
    three of them correct.
    """
    gen = torch.Generator().manual_seed(0)
    reward_N = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0], dtype=torch.float64)
    mask_NT = torch.arange(7) < torch.tensor([[2], [7], [3], [4], [6], [5], [3], [7]])
    advantage_N = reward_N - reward_N.mean()
    credit_NT = advantage_N[:, None] * mask_NT
    sampler_NT = -torch.rand(8, 7, generator=gen, dtype=torch.float64) - 0.1
    logp_NT = sampler_NT + 0.3 * torch.randn(8, 7, generator=gen, dtype=torch.float64)
    logp_NT[:, 0] = sampler_NT[:, 0] + math.log(ratio)
    scale_NT = reduction(mask_NT, credit_NT, advantage_N)
    rows = Rows(
        torch.arange(8),
        mask_NT,
        torch.zeros(8),
        reward_N,
        advantage_N,
        credit_NT,
        sampler_NT,
        scale_NT,
    )
    return float((loss(logp_NT, rows).coef_NT * scale_NT)[:, 0].sum())


TOKEN_RATIO = clipped(clip_low=INF, clip_high=INF)
INSIDE = [
    dfpo(transform=transform, weight=weight, length="inside")
    for transform in ("min", "orth")
    for weight in ("geometric_mean", "product")
]


@pytest.mark.parametrize("ratio", [1.3, 1.1, 0.7])
@pytest.mark.parametrize(
    "loss",
    [
        TOKEN_RATIO,
        reinforce(),
        symmetric_clip(),
        dfpo(),
        dfpo(transform="orth"),
        dfpo(weight="product"),
        *INSIDE,
    ],
)
def test_shared_tokens_cancel(loss, ratio):
    assert abs(shared_token_residual(loss, ratio)) < 1e-15


def test_shared_tokens_do_not_cancel_under_coupling_length_and_signed_clips():
    # eps 0.2: the three good rollouts (A = 5/8) lose a token of ratio 1.3, the five bad ones (A =
    # -3/8) one of ratio 0.7
    assert shared_token_residual(clipped, 1.3) == pytest.approx(-5 * 3 / 8 * 1.3 / 8)
    assert shared_token_residual(clipped, 0.7) == pytest.approx(3 * 5 / 8 * 0.7 / 8)
    assert abs(shared_token_residual(clipped, 1.1)) < 1e-15
    for coupled in (
        dfpo(transform="none", weight="product"),
        dfpo(transform="none"),
        sequence_ratio(clip_low=INF, clip_high=INF),
    ):
        assert abs(shared_token_residual(coupled, 1.3)) > 0.01
    for after in (
        TOKEN_RATIO,
        dfpo(),
        dfpo(transform="orth"),
        dfpo(transform="min", length="inside"),
    ):
        assert abs(shared_token_residual(after, 1.3, per_sequence)) > 0.005


def test_dfpo_min_is_reinforce_times_one_scalar_a_prompt():
    logp_NT, rows = random_rows(seed=12, uniform=True)
    factor_NT = gradient(dfpo, logp_NT, rows) / gradient(reinforce, logp_NT, rows)
    for g in range(2):
        factors = factor_NT[(rows.group_N == g)[:, None] & rows.mask_NT & (rows.credit_NT != 0)]
        assert_close(factors, torch.full_like(factors, factors[0].item()))


def test_dfpo_weight_by_hand_with_a_negative_weight_and_an_empty_advantage():
    # one token each: w = (4, 1, 1), A = (2, -1, -1): A.w / |A|^2 = 6/6 = 1, so w~ = (2, 2, 2); with
    # A = (5, 1, 1): 22/27 off along A
    mask_NT, zero = torch.ones(3, 1, dtype=torch.bool), torch.zeros(3, 1, dtype=torch.float64)
    logp_NT = torch.tensor([[4.0], [1.0], [1.0]], dtype=torch.float64).log()
    rows = Rows(
        torch.arange(3),
        mask_NT,
        torch.zeros(3),
        zero[:, 0],
        torch.tensor([2.0, -1, -1]).double(),
        zero,
        zero,
        zero,
    )
    assert_close(dfpo_weight(logp_NT, rows, transform="orth"), [2.0, 2.0, 2.0])
    assert_close(dfpo_weight(logp_NT, rows, transform="min"), [1.0, 1.0, 1.0])
    tilted = rows._replace(advantage_N=torch.tensor([5.0, 1, 1]).double())
    weight_N = dfpo_weight(logp_NT, tilted, transform="orth")
    assert_close(weight_N, [4 - 5 * 22 / 27, 1 - 22 / 27, 1 - 22 / 27])
    assert (weight_N < 0).tolist() == [True, False, False]
    empty = rows._replace(advantage_N=zero[:, 0])
    assert_close(dfpo_weight(logp_NT, empty, transform="orth"), [4.0, 1.0, 1.0])
    far_N = dfpo_weight(torch.tensor([[1e4], [0], [0]]).double(), rows, weight="product")
    assert torch.isfinite(far_N).all()
