"""Our losses, reductions and advantages against verl's ``core_algos`` on the same tensors, float64:
value and gradient.

verl's transformers pin conflicts with ours, so it has an environment of its own:
``scripts/make_verl_env.sh``.

policy loss               ours
vanilla                   clipped (dual_clip)
gspo                      sequence_ratio
sapo                      soft_gate, per_sequence
gpg                       reinforce
cispo                     detached_ratio
geo_mean                  geometric, per_sequence
clip_cov, kl_cov          clip_cov, kl_cov
dppo_*, dro               none

``loss_agg_mode``         ours
token-mean                per_token
seq-mean-token-mean       per_sequence
seq-mean-token-sum        constant_length(length=1)
seq-mean-token-sum-norm   constant_length
token-sum                 none: a sum that grows with the batch

advantage                 ours
grpo                      group_zscore or group_mean
rloo                      leave_one_out
reinforce_plus_plus       with and without _baseline: see the tests
gae, remax, opo, otb, gdpo, passk: none

verl adds 1e-8 to counts of tokens where it takes means and to the variance where it whitens: hence
the wider tolerances in those places."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from counterpoise.advantages import (
    batch_whitened,
    group_mean,
    group_mean_batch_std,
    group_zscore,
    leave_one_out,
)
from counterpoise.losses import (
    clip_cov,
    clipped,
    covariance,
    detached_ratio,
    geometric,
    kl,
    kl_cov,
    reinforce,
    sequence_ratio,
    soft_gate,
)
from counterpoise.reductions import constant_length, per_sequence, per_token
from helpers.loss_cases import assert_close, random_rows, value_and_gradient

core_algos = pytest.importorskip(
    "verl.trainer.ppo.core_algos",
    reason="verl has its own environment: scripts/make_verl_env.sh .venv/bin/python .venv-verl",
)
pytestmark = [pytest.mark.hosts, pytest.mark.verl]

MEAN, WHITEN = {"rtol": 1e-7, "atol": 1e-9}, {"rtol": 1e-6, "atol": 1e-6}
MODES = {
    "token-mean": (per_token, {}),
    "seq-mean-token-mean": (per_sequence, MEAN),
    "seq-mean-token-sum": (constant_length(length=1), {}),
    "seq-mean-token-sum-norm": (constant_length(length=9), {}),
}


def verl_loss(name, logp_NT, rows, mode="token-mean", policy_loss=None, **settings):
    """verl's policy loss and its gradient by the log-probs."""
    from verl.workers.config import ActorConfig, PolicyLossConfig

    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(**(policy_loss or {})),
        global_batch_info={"loss_scale_factor": 9},
        **settings,
    )
    leaf_NT = logp_NT.clone().requires_grad_()
    total, _ = core_algos.get_policy_loss_fn(name)(
        rows.sampler_logp_NT, leaf_NT, rows.credit_NT, rows.mask_NT.double(), mode, config
    )
    return value_and_gradient(total, leaf_NT)


def our_loss(loss, logp_NT, rows, reduction=per_token):
    leaf_NT = logp_NT.clone().requires_grad_()
    total = (
        loss(leaf_NT, rows).loss_NT * reduction(rows.mask_NT, rows.credit_NT, rows.advantage_N)
    ).sum()
    return value_and_gradient(total, leaf_NT)


def assert_equal_losses(got, expected, **tolerance):
    assert_close(got[0], expected[0], **tolerance)
    assert_close(got[1], expected[1], **tolerance)


@pytest.mark.parametrize("mode", MODES)
def test_vanilla_with_dual_clip(mode):
    logp_NT, rows = random_rows(seed=0, spread=1.5)
    loss, (reduction, tolerance) = clipped(clip_low=0.2, clip_high=0.28, dual_clip=3.0), MODES[mode]
    assert ((loss(logp_NT, rows).ratio_NT > 3) & (rows.credit_NT < 0)).any()
    expected = verl_loss(
        "vanilla", logp_NT, rows, mode, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0
    )
    assert_equal_losses(our_loss(loss, logp_NT, rows, reduction), expected, **tolerance)


@pytest.mark.parametrize("mode", MODES)
def test_gspo_also_with_credit_by_token(mode):
    logp_NT, rows = random_rows(seed=1, spread=0.1)
    loss, (reduction, tolerance) = sequence_ratio(clip_low=0.03, clip_high=0.04), MODES[mode]
    assert 0 < loss(logp_NT, rows).clipped_NT.any(1).sum() < 6
    expected = verl_loss("gspo", logp_NT, rows, mode, clip_ratio_low=0.03, clip_ratio_high=0.04)
    assert_equal_losses(our_loss(loss, logp_NT, rows, reduction), expected, **tolerance)


@pytest.mark.parametrize("mode", MODES)
def test_cispo(mode):
    logp_NT, rows = random_rows(seed=2, spread=1.0)
    expected = verl_loss("cispo", logp_NT, rows, mode, clip_ratio_low=0.3, clip_ratio_high=0.5)
    reduction, tolerance = MODES[mode]
    assert_equal_losses(
        our_loss(detached_ratio(clip_low=0.3, clip_high=0.5), logp_NT, rows, reduction),
        expected,
        **tolerance,
    )


def test_sapo_gpg_and_geo_mean():
    logp_NT, rows = random_rows(seed=3, spread=0.6)
    sapo = verl_loss("sapo", logp_NT, rows, tau_pos=1.0, tau_neg=1.05)
    assert_equal_losses(our_loss(soft_gate, logp_NT, rows, per_sequence), sapo, **MEAN)
    assert_equal_losses(our_loss(reinforce, logp_NT, rows), verl_loss("gpg", logp_NT, rows))
    logp_NT, rows = random_rows(
        seed=3, spread=0.6, uniform=True
    )  # geo_mean takes one advantage a rollout
    assert geometric(logp_NT, rows).clipped_NT.any()
    geo_mean = verl_loss("geo_mean", logp_NT, rows, clip_ratio_low=0.4, clip_ratio_high=0.4)
    assert_equal_losses(our_loss(geometric, logp_NT, rows, per_sequence), geo_mean, **MEAN)


@pytest.mark.parametrize("fraction", [1.0, 0.02])
def test_clip_cov_with_the_same_draw(fraction, monkeypatch):
    logp_NT, rows = random_rows(seed=4, n=40, width=20)
    monkeypatch.setattr(
        covariance, "seeded_generator", lambda *args: torch.Generator().manual_seed(7)
    )
    loss = clip_cov(clip_low=0.2, clip_high=0.28, fraction=fraction, low=0.1, high=2.0)
    is_dropped_NT = (
        loss(logp_NT, rows).clipped_NT & ~clipped(logp_NT, rows, clip_high=0.28).clipped_NT
    )
    assert is_dropped_NT.sum() > 5
    torch.manual_seed(7)
    selection = {"clip_cov_ratio": fraction, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0}
    expected = verl_loss(
        "clip_cov", logp_NT, rows, policy_loss=selection, clip_ratio_low=0.2, clip_ratio_high=0.28
    )
    assert_equal_losses(our_loss(loss, logp_NT, rows), expected)


def test_kl_cov():
    logp_NT, rows = random_rows(seed=5, n=40, width=20)
    expected = verl_loss(
        "kl_cov", logp_NT, rows, policy_loss={"kl_cov_ratio": 0.05, "ppo_kl_coef": 0.7}
    )
    assert_equal_losses(our_loss(kl_cov(fraction=0.05, coef=0.7), logp_NT, rows), expected)
    assert (our_loss(kl_cov(fraction=0.05, coef=0.0), logp_NT, rows)[0] - expected[0]).abs() > 1e-3


def test_kl_cov_of_a_cut_step_differs_on_purpose():
    """verl chooses in each micro-batch, so that another cut chooses other tokens; here the choice
    is the batch's.
    """
    logp_NT, rows = random_rows(seed=5, n=40, width=20)
    loss = kl_cov(fraction=0.05, coef=0.7)
    ready = rows._replace(update_NT=kl_cov.prepare(logp_NT, rows, fraction=0.05))
    whole, cuts = loss(logp_NT, ready).coef_NT, torch.arange(40).split(8)
    assert torch.equal(
        torch.cat([loss(logp_NT[cut], ready.select(cut)).coef_NT for cut in cuts]), whole
    )
    selection = {"kl_cov_ratio": 0.05, "ppo_kl_coef": 0.7}
    parts = []
    for cut in cuts:
        grad_NT = verl_loss("kl_cov", logp_NT[cut], rows.select(cut), policy_loss=selection)[1]
        parts.append(-grad_NT * rows.mask_NT[cut].sum())
    is_other_NT = (torch.cat(parts) - whole).abs() > 1e-9
    assert 0 < is_other_NT.sum() <= 2 * int(0.05 * int(rows.mask_NT.sum()))
    assert_close(
        (torch.cat(parts) - whole)[is_other_NT].abs(),
        torch.full((int(is_other_NT.sum()),), 0.7, dtype=torch.float64),
        rtol=1e-9,
    )


def test_log_ratios_beyond_20_are_cut_as_verl_cuts_them():
    """log r stops at 20, so that no ratio overflows; beyond it a token has no gradient."""
    logp_NT, rows = random_rows(seed=6)
    rows = rows._replace(credit_NT=-rows.mask_NT.double(), sampler_logp_NT=logp_NT - 21)
    verl_total, verl_grad = verl_loss("vanilla", logp_NT, rows, clip_ratio_c=1e12)
    our_total, our_grad = our_loss(clipped(dual_clip=1e12), logp_NT, rows)
    assert (verl_grad == 0).all() and (our_grad == 0).all()
    assert_close(our_total, verl_total)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_term(estimator):
    logp_NT, rows = random_rows(seed=7)
    leaf_NT = logp_NT.clone().requires_grad_()
    expected_NT = core_algos.kl_penalty(leaf_NT, rows.ref_logp_NT, estimator)
    expected_NT[rows.mask_NT].sum().backward()
    out = kl(logp_NT, rows, estimator=estimator, coef=1.0)
    assert_close(out.loss_NT[rows.mask_NT], expected_NT.detach()[rows.mask_NT])
    assert_close(-out.coef_NT, leaf_NT.grad)


def test_k3_of_a_wide_gap_differs_on_purpose():
    """verl cuts k3 at 10, and with it the pull of the token; here it has both: exp(5) - 6 and
    exp(5) - 1.
    """
    logp_NT, rows = random_rows(seed=7)
    rows, leaf_NT = rows._replace(ref_logp_NT=logp_NT + 5), logp_NT.clone().requires_grad_()
    core_algos.kl_penalty(leaf_NT, rows.ref_logp_NT, "k3").sum().backward()
    assert (leaf_NT.grad == 0).all()
    out = kl(logp_NT, rows, coef=1.0)
    assert_close(
        out.loss_NT[rows.mask_NT], torch.full_like(out.loss_NT[rows.mask_NT], math.exp(5) - 6)
    )
    assert_close(
        out.coef_NT[rows.mask_NT], torch.full_like(out.coef_NT[rows.mask_NT], math.exp(5) - 1)
    )


def rewarded(seed=0, n=12, width=5, equal_lengths=False):
    """Rewards of three groups of four, none constant, and a mask."""
    gen = torch.Generator().manual_seed(seed)
    group_N = torch.arange(n) % 3
    reward_N = torch.rand(n, generator=gen, dtype=torch.float64)
    mask_NT = torch.arange(width) < (
        torch.full((n, 1), 4)
        if equal_lengths
        else torch.randint(1, width + 1, (n, 1), generator=gen)
    )
    return reward_N, group_N, mask_NT


def verl_advantage(name, reward_N, group_N, mask_NT, **settings):
    """verl's advantage of each rollout, read at its first token (all its tokens have the same)."""
    last_N = mask_NT.sum(1) - 1
    reward_NT = torch.zeros(mask_NT.shape, dtype=reward_N.dtype).index_put(
        (torch.arange(len(last_N)), last_N), reward_N
    )
    if name != "reinforce_plus_plus":
        settings["index"] = np.array([f"prompt {int(g)}" for g in group_N])
    advantage_NT, _ = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=reward_NT, response_mask=mask_NT.to(reward_N.dtype), **settings
    )
    assert torch.equal(advantage_NT, torch.where(mask_NT, advantage_NT[:, :1], 0))
    return advantage_NT[:, 0]


def test_group_advantages():
    reward_N, group_N, mask_NT = rewarded()
    grpo = [
        verl_advantage("grpo", reward_N, group_N, mask_NT, norm_adv_by_std_in_grpo=by_std)
        for by_std in (True, False)
    ]
    assert_close(group_zscore(reward_N, group_N, eps=1e-6), grpo[0])
    assert_close(group_mean(reward_N, group_N), grpo[1])
    assert_close(
        leave_one_out(reward_N, group_N), verl_advantage("rloo", reward_N, group_N, mask_NT)
    )


def test_constant_groups_and_groups_of_one_differ_on_purpose():
    """Seven rewards of 0.7 in float32: verl divides rounding by eps.

    Alone in its group, a rollout's advantage is its reward there.
    """
    reward_N, group_N, mask_NT = (
        torch.full((7,), 0.7),
        torch.zeros(7, dtype=torch.long),
        torch.ones(7, 2, dtype=torch.bool),
    )
    noise = verl_advantage("grpo", reward_N, group_N, mask_NT)
    assert 0.01 < noise.abs().max() < 0.1
    assert (group_zscore(reward_N, group_N, eps=1e-6) == 0).all()
    alone_N = torch.arange(7)
    assert_close(verl_advantage("grpo", reward_N, alone_N, mask_NT), reward_N, rtol=1e-5)
    with pytest.raises(ValueError, match="only one rollout"):
        group_zscore(reward_N, alone_N)


def test_reinforce_plus_plus_whitens_tokens_there_and_rollouts_here():
    config = SimpleNamespace(gamma=1.0)
    reward_N, group_N, mask_NT = rewarded(seed=1)
    expected = verl_advantage("reinforce_plus_plus", reward_N, group_N, mask_NT, config=config)
    length_N = mask_NT.sum(1)
    by_token = batch_whitened(
        reward_N.repeat_interleave(length_N), group_N.repeat_interleave(length_N)
    )
    assert_close(by_token, expected.repeat_interleave(length_N), **WHITEN)
    assert (batch_whitened(reward_N, group_N) - expected).abs().max() > 0.05
    # with equal lengths only the unbiased std remains: n T - 1 tokens there, n - 1 rollouts here
    reward_N, group_N, mask_NT = rewarded(seed=1, equal_lengths=True)
    factor = math.sqrt((12 * 4 - 1) / (4 * (12 - 1)))
    expected = verl_advantage("reinforce_plus_plus", reward_N, group_N, mask_NT, config=config)
    assert_close(batch_whitened(reward_N, group_N) * factor, expected, **WHITEN)
    expected = verl_advantage("reinforce_plus_plus_baseline", reward_N, group_N, mask_NT)
    assert_close(group_mean_batch_std(reward_N, group_N) * factor, expected, **WHITEN)


def test_reinforce_plus_plus_baseline_of_ragged_rollouts_differs_on_purpose():
    """Whitened over tokens the group means no longer sum to 0 over rollouts; here they do, so that
    shared tokens can cancel.
    """
    reward_N, group_N, mask_NT = rewarded(seed=2)
    expected = verl_advantage("reinforce_plus_plus_baseline", reward_N, group_N, mask_NT)
    ours = group_mean_batch_std(reward_N, group_N)
    by_group_there = torch.zeros(3, dtype=torch.float64).index_add(0, group_N, expected)
    by_group_here = torch.zeros(3, dtype=torch.float64).index_add(0, group_N, ours)
    assert by_group_here.abs().max() < 1e-14
    assert by_group_there.abs().min() > 0.01
