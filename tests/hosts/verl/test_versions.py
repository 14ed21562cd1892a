"""Other versions of verl: what counterpoise calls and overrides is looked at, and said."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip(
    "verl.trainer.ppo.v1",
    reason="verl has its own environment: scripts/make_verl_env.sh .venv/bin/python .venv-verl",
)

from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1 import trainer_base

from counterpoise.hosts.verl import hooks, register
from counterpoise.hosts.verl import registry as host

pytestmark = [pytest.mark.hosts, pytest.mark.verl]


@pytest.fixture
def other(monkeypatch):
    """verl as a version that nobody has tested, with registries that are empty."""
    register()
    monkeypatch.setattr("verl.__version__", "0.10.0")
    for registry in ("ADV_ESTIMATOR_REGISTRY", "POLICY_LOSS_REGISTRY"):
        monkeypatch.setattr(core_algos, registry, {})
    return monkeypatch


def test_the_tested_version_is_as_tested():
    assert hooks.look_at(host.ALL_HOOKS) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register()


def test_another_version_with_the_same_functions_registers_and_says_what_was_looked_at(other):
    line = (
        r"verl 0.10.0 \(0.9.1 is tested\): 23 functions that counterpoise calls or overrides take"
        " the arguments it expects, with the tested code. `counterpoise doctor verl` tries it."
    )
    with pytest.warns(UserWarning, match=line):
        register()
    assert "counterpoise/dapo" in core_algos.ADV_ESTIMATOR_REGISTRY
    assert "counterpoise/dapo" in core_algos.POLICY_LOSS_REGISTRY


def test_other_code_under_the_same_arguments_is_named(other):
    def agg_loss(loss_mat, loss_mask, loss_agg_mode, more=None):
        return loss_mat.sum()

    other.setattr(core_algos, "agg_loss", agg_loss)
    with pytest.warns(UserWarning, match="expects, not with the tested code: agg_loss. "):
        register()
    assert "counterpoise/dapo" in core_algos.POLICY_LOSS_REGISTRY


@pytest.mark.parametrize(
    ("name", "function", "line"),
    [
        (
            "agg_loss",
            lambda loss_mat, loss_mask, mode: 0,
            r"agg_loss takes \(loss_mat, loss_mask, mode\), expected \(loss_mat, loss_mask,"
            r" loss_agg_mode, ...\)",
        ),
        (
            "compute_policy_loss_vanilla",
            lambda old_log_prob, log_prob, advantages, entropy=None: 0,
            r"compute_policy_loss_vanilla takes \(old_log_prob, log_prob, advantages, entropy\)",
        ),
        ("agg_loss", None, "core_algos has no agg_loss, which counterpoise needs"),
    ],
)
def test_other_arguments_of_a_loss_register_nothing(other, name, function, line):
    if function is None:
        other.delattr(core_algos, name)
    else:
        other.setattr(core_algos, name, function)
    with pytest.raises(ValueError, match=line):
        register()
    assert core_algos.ADV_ESTIMATOR_REGISTRY == {}


def test_other_arguments_of_the_trainer_leave_estimators_and_losses(other):
    def balance(self, batch, metrics, logging_prefix="", keep_minibatch=False, by="tokens"):
        return batch

    other.setattr(trainer_base.PPOTrainer, "_balance_batch", balance)
    with (
        pytest.warns(UserWarning, match="trainers .*PPOTrainer._balance_batch takes"),
        pytest.warns(UserWarning, match=r"verl 0.10.0 \(0.9.1 is tested\): 4 functions"),
    ):
        register()
    assert "counterpoise/dapo" in core_algos.ADV_ESTIMATOR_REGISTRY
