"""verl's own trainers at their start: what of counterpoise they do not read is said in one line."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip(
    "verl.trainer.ppo.v1",
    reason="verl has its own environment: scripts/make_verl_env.sh .venv/bin/python .venv-verl",
)

from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSync

from counterpoise.hosts.verl import register
from counterpoise.hosts.verl.trainer import CreditSync
from helpers.verl.cases import config

pytestmark = [pytest.mark.hosts, pytest.mark.verl]
register()
PLAN = {"plan": "query_preserved"}


class Started(Exception):
    pass


@pytest.fixture
def start(monkeypatch):
    """verl's constructor up to the first thing that it does."""

    def stop(config):
        raise Started

    monkeypatch.setattr("verl.trainer.ppo.v1.trainer_base.build_checkpoint_callback", stop)

    def run(cls, made, mode="sync"):
        made.trainer.v1.trainer_mode = mode
        with pytest.raises(Started):
            cls(made)

    return run


@pytest.mark.parametrize(
    ("cls", "mode"), [(PPOTrainerSync, "sync"), (PPOTrainerColocateAsync, "colocate_async")]
)
@pytest.mark.parametrize("name", ["grpo", "counterpoise/dapo"])
def test_a_plan_that_nobody_reads_is_said(start, cls, mode, name):
    line = (
        rf"trainer_mode={mode} is verl's own and does not read algorithm.counterpoise.plan. Set"
        rf" trainer.v1.trainer_mode=counterpoise/{mode}."
    )
    with pytest.warns(UserWarning, match=line):
        start(cls, config(name, PLAN), mode)


def test_credit_beside_an_estimator_of_verl_is_said(start):
    with pytest.warns(
        UserWarning, match="algorithm.counterpoise.credit, algorithm.counterpoise.se"
    ):
        start(PPOTrainerSync, config("grpo", {"credit": ["uniform"], "seed": 3}))


@pytest.mark.parametrize(
    ("cls", "mode", "name", "settings"),
    [
        (CreditSync, "counterpoise/sync", "counterpoise/dapo", PLAN),
        (PPOTrainerSync, "sync", "counterpoise/dapo", {"advantage": "group_mean"}),
        (PPOTrainerSync, "sync", "grpo", None),
    ],
)
def test_what_is_read_is_not_warned_about(start, cls, mode, name, settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(cls, config(name, settings), mode)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"adv_estimator": "counterpoise/ktae"}, "ktae: its credit reads the tokens"),
        ({"adv_estimator": "counterpoise/delta"}, "reads hidden_NTD"),
        ({"adv_estimator": "counterpoise/dappo"}, "Did you mean 'dapo'"),
        ({"adv_estimator": "counterpoise/grpo", "n": 1}, "rollout.n=1"),
        ({"actor_rollout_ref__actor__policy_loss__loss_mode": "counterpoise/tpo"}, "whole update"),
    ],
)
def test_what_verls_trainer_cannot_run_is_refused_at_the_start(changed, line):
    made = config(**changed)
    made.trainer.v1.trainer_mode = "sync"
    with pytest.raises(ValueError, match=line):
        PPOTrainerSync(made)
