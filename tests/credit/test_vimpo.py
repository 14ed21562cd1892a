"""VIMPO: values by hand, twins, how its two terms are reduced, a run."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given

import counterpoise as cp
from counterpoise import credit as rules
from counterpoise.rollouts import RolloutBatch
from counterpoise.trainer.config import parse_config
from counterpoise.trainer.loop import train
from counterpoise.trainer.warn import flat_batches
from helpers import reference_credit as reference
from helpers.credit_cases import as_lists, assert_rows, batch_of, credited_batches, laws, spread
from helpers.full_batch import make_batch

TWO = {
    "sampler_logp": [[-1.0, -1.0]] * 2,
    "trainer_logp": [[-1.0, -1.0]] * 2,
    "ref_logp": [[-1.2, -0.9]] * 2,
    "ref_kl": [[0.05, 0.05]] * 2,
}


def test_terms_loss_and_coefficient_by_hand():
    """Terms .015 and -.015 sum to 0; R - m = .5: loss .125, and .05 on every token."""
    batch = batch_of([[1, 2], [1, 3]], reward=[1.0, 0.0], **TWO)
    credit_NT = rules.implied_advantage(spread([1.0, 1.0], batch), batch, beta=0.1)
    assert_rows(credit_NT, [[0, -0.015]] * 2)
    half_NT = rules.implied_advantage(credit_NT, batch, beta=0.1, decay=0.5)
    assert_rows(half_NT, [[0.0075, -0.015]] * 2)
    method = cp.method("vimpo", loss={"name": "implied_value", "beta": 0.1})
    rows = method.rows(batch, method.assign(batch), torch.tensor([0, 1]))
    out = method.loss(batch.trainer_logp_NT, rows)
    assert_rows(out.loss_NT * rows.scale_NT * 2, [[0.0625, 0.0625]] * 2)
    assert_rows(out.coef_NT * rows.scale_NT * 2, [[0.05, 0.05], [-0.05, -0.05]])


def with_columns(batch):
    trainer_NT, ref_NT = 0.9 * batch.sampler_logp_NT, 1.3 * batch.sampler_logp_NT
    kl_NT = batch.sampler_logp_NT.square() / 7
    return batch.replace(trainer_logp_NT=trainer_NT, ref_logp_NT=ref_NT, ref_kl_NT=kl_NT)


@laws
@given(data=credited_batches())
def test_the_rule_equals_its_twin(data):
    batch, credit_NT = with_columns(data[0]), data[1]
    for params in ({"beta": 0.3, "decay": 1.0}, {"beta": 5e-4, "decay": 0.7}):
        twin = reference.implied_advantage(
            as_lists(credit_NT, batch), reference.Rollouts(batch), **params
        )
        assert_rows(rules.implied_advantage(credit_NT, batch, **params), twin)


def total_and_gradient(method, batch, rows, logp_NT, cut):
    leaf_NT = logp_NT.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for pick in torch.arange(len(rows.row_R)).split(cut):
        micro = rows.select(pick)
        total = total + (method.loss(leaf_NT[pick], micro).loss_NT * micro.scale_NT).sum()
    return total.detach(), torch.autograd.grad(total, leaf_NT)[0]


@pytest.mark.parametrize("reduction", ["per_token", "per_sequence", "constant_length"])
@pytest.mark.parametrize("cut", [16, 3])
def test_the_value_loss_is_the_mean_over_rollouts_under_any_reduction_and_cut(reduction, cut):
    """Total and gradient are those of 1/N sum 1/2 (sum of terms - A)^2, differentiated as one."""
    batch = make_batch(turns=True)
    loss = {"name": "implied_value", "beta": 0.3}
    method = cp.method("vimpo", loss=loss, reduction=reduction)
    rows = method.rows(batch, method.assign(batch), torch.arange(16))
    got = total_and_gradient(method, batch, rows, batch.trainer_logp_NT, cut)
    leaf_NT = batch.trainer_logp_NT.clone().requires_grad_()
    gap_NT = torch.where(batch.mask_NT, leaf_NT - batch.ref_logp_NT - batch.ref_kl_NT, 0)
    advantage_N = cp.advantages.group_mean(batch.reward_N, batch.group_N)
    total = ((0.3 * gap_NT.sum(1) - advantage_N) ** 2 / 2).mean()
    torch.testing.assert_close(got[0], total.detach(), rtol=1e-12, atol=0)
    expected_NT = torch.autograd.grad(total, leaf_NT)[0]
    torch.testing.assert_close(got[1], expected_NT, rtol=1e-12, atol=1e-15)


def test_the_two_terms_reduce_by_themselves():
    """The gradient is 5e-3 of the clip's token mean plus the value's mean over rollouts."""
    batch = make_batch(turns=True)
    method = cp.method("vimpo")
    rows = method.rows(batch, method.assign(batch), torch.arange(16))
    whole = total_and_gradient(method, batch, rows, batch.trainer_logp_NT, 5)[1]
    value = cp.method("vimpo", loss="implied_value")
    value_rows = value.rows(batch, value.assign(batch), torch.arange(16))
    value_NT = total_and_gradient(value, batch, value_rows, batch.trainer_logp_NT, 16)[1]
    actor = cp.method(
        "dapo", advantage="group_mean", credit=[{"name": "implied_advantage"}, {"name": "whiten"}]
    )
    actor_rows = actor.rows(batch, actor.assign(batch), torch.arange(16))
    actor_NT = total_and_gradient(actor, batch, actor_rows, batch.trainer_logp_NT, 16)[1]
    torch.testing.assert_close(whole, 5e-3 * actor_NT + value_NT, rtol=1e-10, atol=1e-16)
    assert float(actor_NT.abs().sum()) > 0 < float(value_NT.abs().sum())


def test_while_the_policy_is_the_reference_only_the_value_loss_learns():
    batch = make_batch(turns=True)
    same = batch.replace(
        ref_logp_NT=batch.trainer_logp_NT, ref_kl_NT=torch.zeros_like(batch.trainer_logp_NT)
    )
    method = cp.method("vimpo")
    credit = method.assign(same)
    assert not credit.credit_NT.any()
    rows = method.rows(same, credit, torch.arange(16))
    coef_NT = method.loss(same.trainer_logp_NT, rows).coef_NT * rows.scale_NT
    expected_NT = 5e-4 * credit.advantage_N[:, None] * same.mask_NT / 16
    torch.testing.assert_close(coef_NT, expected_NT, rtol=1e-12, atol=0)
    collected = RolloutBatch([], [], [], [], same, 0, [])
    assert flat_batches(0, method, collected, credit) == 0
    assert flat_batches(0, cp.method("dapo"), collected, credit) == 1


def test_rows_without_what_it_reads_say_so():
    batch = make_batch(turns=True)
    method = cp.method("vimpo")
    rows = method.rows(batch, method.assign(batch), torch.arange(16))
    with pytest.raises(
        ValueError, match="implied_value: the rows have no ref_logp_NT or no ref_kl"
    ):
        method.loss(batch.trainer_logp_NT, rows._replace(ref_kl_NT=None))
    with pytest.raises(ValueError, match="no rollout_scale_N.*method.rows"):
        method.loss(batch.trainer_logp_NT, rows._replace(rollout_scale_N=None))
    with pytest.raises(ValueError, match="implied_advantage reads ref_kl_NT.*over the vocabulary"):
        method.assign(batch.replace(ref_kl_NT=None))
    with pytest.raises(ValueError, match="whiten: size must be a number > 0, got 0"):
        rules.whiten(torch.ones(16, 7), batch, size=0)


def test_a_run_starts_at_the_reference_and_leaves_it(tmp_path):
    recipe = {
        "model": "bundled",
        "task": {"name": "arithmetic"},
        "method": {"name": "vimpo"},
        "num_batches": 3,
        "rollouts": {"prompts": 3, "group_size": 4, "max_new_tokens": 80},
        "optimizer": {"lr": 1e-4, "updates_per_batch": 2, "warmup": 0},
        "eval": {"every": 0},
        "ledger": {"every": 0},
        "trackers": [],
        "run_dir": str(tmp_path / "run"),
    }
    train(parse_config(recipe))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    kl = [json.loads(line)["credit/implied_advantage/ref_kl"] for line in lines]
    assert kl[0] == 0
    assert 0 < kl[1] < kl[2] < 1
