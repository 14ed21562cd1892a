"""What a TokenBatch accepts, and what it makes of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import counterpoise as cp
from helpers.full_batch import make_batch


def gradient(method: cp.Method, batch: cp.TokenBatch) -> torch.Tensor:
    logp_NT = batch.sampler_logp_NT.detach().clone().requires_grad_()
    rows = method.rows(batch, method.assign(batch), torch.arange(batch.num_rollouts))
    (method.loss(logp_NT, rows).loss_NT * rows.scale_NT).sum().backward()
    assert logp_NT.grad is not None
    return logp_NT.grad


def test_columns_bring_no_gradient():
    batch = make_batch()
    floats = {
        field.name: getattr(batch, field.name)
        for field in dataclasses.fields(batch)
        if field.name.rpartition("_")[2].startswith("N") or field.name == "head_VD"
    }
    tracked = {
        name: value.clone().requires_grad_()
        for name, value in floats.items()
        if value is not None and value.is_floating_point()
    }
    extra = {"mine_N": torch.ones(batch.num_rollouts, requires_grad=True)}
    copy = batch.replace(**tracked, extra=extra)
    assert not any(getattr(copy, name).requires_grad for name in tracked)
    assert not copy.extra["mine_N"].requires_grad


def test_a_sampler_logp_with_gradient_does_not_change_the_gradient_of_ar():
    batch, method = make_batch(), cp.method("ar")
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    tracked = batch.replace(sampler_logp_NT=batch.sampler_logp_NT * weight)
    torch.testing.assert_close(gradient(method, tracked), gradient(method, batch))
    rows = method.rows(tracked, method.assign(tracked), torch.arange(batch.num_rollouts))
    assert not rows.credit_NT.requires_grad
    assert not rows.sampler_logp_NT.requires_grad


@pytest.mark.parametrize("name", ["sampler_logp_NT", "trainer_logp_NT", "ref_logp_NT"])
def test_a_positive_log_prob_is_an_error(name):
    batch = make_batch()
    row = 3
    value_NT = getattr(batch, name).clone()
    value_NT[row, 1] = 0.7
    message = rf"TokenBatch: {name} is 0\.7 at token 1 of rollout 3, .*<= 0"
    with pytest.raises(ValueError, match=message):
        batch.replace(**{name: value_NT})
    value_NT[row, 1] = 5e-4  # rounding
    batch.replace(**{name: value_NT})


def test_padding_may_hold_anything():
    batch, method = make_batch(), cp.method("grpo")
    padded = batch.replace(sampler_logp_NT=torch.where(batch.mask_NT, batch.sampler_logp_NT, 3.0))
    assert not torch.equal(padded.sampler_logp_NT, batch.sampler_logp_NT)
    assert torch.equal(method.assign(padded).credit_NT, method.assign(batch).credit_NT)


@pytest.mark.parametrize(
    ("plan", "sizes", "message"),
    [
        ("random_rows", (1, 3, 4), "random_rows: 4 updates need at least 4 rollouts, got 3"),
        ("query_preserved", (3, 8, 4), "query_preserved: 4 updates need at least 4 prompts, got 3"),
        ("reward_balanced", (3, 8, 4), "reward_balanced: 4 updates need at least 4 prompts, got 3"),
        (
            {"name": "reward_balanced", "mode": "buffer", "update_size": 9},
            (4, 8, 4),
            "reward_balanced: 4 updates of update_size 9 need 36 rollouts, got 32",
        ),
    ],
)
def test_an_impossible_plan_is_known_before_sampling(plan, sizes, message):
    num_prompts, group_size, num_updates = sizes
    method = cp.method("grpo", plan=plan)
    with pytest.raises(ValueError, match=message):
        method.check_plan(num_prompts, group_size, num_updates)
    method.check_plan(num_prompts * 4, group_size, num_updates)
