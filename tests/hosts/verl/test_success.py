"""Which rollouts are successes inside verl: a threshold, or a value of the reward function."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip(
    "verl.trainer.ppo.v1",
    reason="verl has its own environment: scripts/make_verl_env.sh .venv/bin/python .venv-verl",
)

from verl.trainer.ppo.v1 import PPOTrainerSync

import counterpoise as cp
from counterpoise.hosts.verl import register
from counterpoise.hosts.verl.checks import check_config, check_own_trainer
from counterpoise.hosts.verl.trainer import CreditSync
from helpers.verl.cases import batch_meta, config, rollouts, token_batch, trainer

pytestmark = [pytest.mark.hosts, pytest.mark.verl]
register()


def graded(rows):
    """Accuracy 0 or 2 plus 1 for the format, as a reward function of verl returns them."""
    for row in rows:
        right = float(row.fields["rm_scores"].sum())
        row.fields["rm_scores"][-1] = 2 * right + 1
        row.fields["extra_fields"] = {"reward_extra_info": {"acc": right, "format": 1.0}}
    return rows


def credit(cls, name, settings, rows, queue_of, mode="counterpoise/sync"):
    made = config(f"counterpoise/{name}", settings, trainer__v1__trainer_mode=mode)
    queue, host = queue_of(rows), trainer(cls, made)
    keys = host._compute_advantage(batch_meta(rows), metrics={}).keys
    return queue.padded(keys, "advantages")


@pytest.mark.parametrize("name", ["nsr", "psr", "w_reinforce", "f_grpo", "ktae", "ibpo"])
@pytest.mark.parametrize("success", [3.0, "acc"])
def test_a_threshold_or_a_named_value_decides(name, success, queue_of):
    rows = graded(rollouts(seed=1))
    right_N = torch.tensor([r.fields["extra_fields"]["reward_extra_info"]["acc"] for r in rows])
    got = credit(CreditSync, name, {"success": success}, rows, queue_of)
    expected = cp.method(name).assign(token_batch(rows).replace(success_N=right_N), batch_number=1)
    torch.testing.assert_close(got, expected.credit_NT, rtol=1e-5, atol=1e-6)
    assert got.abs().sum() > 0


def test_the_threshold_works_with_verls_own_trainer(queue_of):
    rows = graded(rollouts(seed=1))
    got = credit(PPOTrainerSync, "nsr", {"success": 3.0}, rows, queue_of, mode="sync")
    assert (got < 0).any() and not (got > 0).any()
    unsaid = credit(PPOTrainerSync, "nsr", None, rows, queue_of, mode="sync")
    assert (unsaid == 0).all()


def test_a_value_that_the_reward_function_does_not_give(queue_of):
    with pytest.raises(ValueError, match="success=accc: .*p0_0_0 no value.*Did you mean 'acc'"):
        credit(CreditSync, "nsr", {"success": "accc"}, graded(rollouts(seed=1)), queue_of)


def test_a_named_value_needs_our_trainer():
    with pytest.raises(ValueError, match="success=acc names a value of the reward function"):
        check_own_trainer(config("counterpoise/nsr", {"success": "acc"}))


def test_a_balanced_plan_counts_by_the_named_value(queue_of):
    rows = graded(rollouts(seed=1))
    queue_of(rows)
    settings = {"plan": {"name": "reward_balanced", "mode": "groups"}, "success": "acc"}
    made = config("grpo", settings)
    assert check_config(made, "sync")[1].success_key == "acc"
    metrics = {}
    trainer(CreditSync, made)._balance_batch(batch_meta(rows), metrics)
    assert 0 < metrics["counterpoise/plan/positive_frac_max"] < 1
