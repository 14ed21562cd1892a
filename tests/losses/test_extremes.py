"""No log-ratio up to 200 makes a loss, a coefficient or a gradient that is not finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import counterpoise as cp
from counterpoise.losses import LOSSES
from counterpoise.losses.token_loss import MAX_LOG_RATIO
from helpers.full_batch import make_batch

METHODS = sorted(cp.methods())


def far_batch(gap: float, seed: int, dtype: torch.dtype = torch.float32) -> tuple:
    """Rollouts whose trainer log-probs lie ``gap`` above the sampler's on some tokens, below on
    others, and the log-probs.
    """
    batch = make_batch(seed=seed, turns=True)
    gen = torch.Generator().manual_seed(seed)
    sign_NT = torch.randint(-1, 2, batch.mask_NT.shape, generator=gen)
    near_NT = -torch.rand(batch.mask_NT.shape, generator=gen)
    sampler_NT = near_NT - gap * (sign_NT > 0)
    trainer_NT = near_NT - gap * (sign_NT < 0)
    floats = {
        name: getattr(batch, name).to(dtype)
        for name in ("reward_N", "entropy_NT", "hidden_NTD", "topk_logp_NTK", "head_VD")
    }
    columns = {
        "sampler_logp_NT": sampler_NT.to(dtype),
        "trainer_logp_NT": trainer_NT.to(dtype),
        "ref_logp_NT": sampler_NT.to(dtype),
        "ref_kl_NT": batch.ref_kl_NT.to(dtype),
    }
    return batch.replace(**floats, **columns), trainer_NT.to(dtype)


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=10, deadline=None)
@given(gap=st.floats(0, 200), seed=st.integers(0, 50))
def test_every_method_stays_finite(name, gap, seed):
    batch, trainer_NT = far_batch(gap, seed)
    method = cp.method(name)
    rows = method.rows(batch, method.assign(batch), method.plan(batch, 1).updates[0])
    logp_NT = trainer_NT[rows.row_R].requires_grad_()
    rows = method.prepare(logp_NT, rows)
    loss = method.loss(logp_NT, rows)
    (loss.loss_NT * rows.scale_NT).sum().backward()
    for value in (*loss, logp_NT.grad):
        assert torch.isfinite(value).all()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_stays_finite_at_200(name):
    batch, trainer_NT = far_batch(200.0, 1)
    method = cp.method("grpo", loss=name, plan="query_preserved")
    rows = method.rows(batch, method.assign(batch), method.plan(batch, 1).updates[0])
    logp_NT = trainer_NT[rows.row_R]
    loss = method.loss(logp_NT, method.prepare(logp_NT, rows))
    for value in loss:
        assert torch.isfinite(value).all()


def one_token(log_ratio: float, credit: float) -> tuple[torch.Tensor, cp.Rows]:
    one = torch.ones(1, 1, dtype=torch.float64)
    zero_N = torch.tensor([0])
    rows = cp.Rows(zero_N, one.bool(), zero_N, one[0], one[0], credit * one, -300 * one, one)
    return (log_ratio - 300) * one, rows


@pytest.mark.parametrize("log_ratio", [-40.0, -1.0, 0.0, 1.0, MAX_LOG_RATIO - 1])
def test_below_the_bound_nothing_changes(log_ratio):
    """Value and gradient of -r c, to the last bit."""
    loss = LOSSES["clipped"](clip_low=torch.inf)(*one_token(log_ratio, -1.0))
    expected = torch.tensor(log_ratio, dtype=torch.float64).exp()
    assert loss.loss_NT.item() == expected.item()
    assert loss.coef_NT.item() == -expected.item()
    assert not loss.clipped_NT.item()


def test_beyond_the_bound_the_token_counts_as_clipped():
    loss = LOSSES["clipped"](*one_token(MAX_LOG_RATIO + 1, -1.0))
    assert loss.coef_NT.item() == 0
    assert loss.clipped_NT.item()
    free = LOSSES["reinforce"](*one_token(MAX_LOG_RATIO + 1, -1.0))
    assert free.coef_NT.item() == -1
    assert not free.clipped_NT.item()


def test_one_token_far_off_keeps_the_gradient_of_a_sequence_ratio():
    """The ratio of the rollout is near 1: its token with log r = 30 still learns."""
    ids = torch.ones(1, 60, dtype=torch.float64)
    rows = one_token(0.0, 1.0)[1]._replace(
        mask_NT=ids.bool(), credit_NT=ids, sampler_logp_NT=-40 * ids, scale_NT=ids
    )
    logp_NT = -40 * ids
    logp_NT[0, 0] += 30
    loss = LOSSES["sequence_ratio"](clip_high=1.0)(logp_NT, rows)
    torch.testing.assert_close(loss.coef_NT, torch.full_like(ids, 0.5).exp())
