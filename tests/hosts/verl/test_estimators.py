"""Estimators, called by verl's own ``compute_advantage`` on a real DataProto."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip(
    "verl.trainer.ppo.core_algos", reason="verl has its own environment: scripts/make_verl_env.sh"
)
pytest.importorskip("torchdata", reason="verl's trainer module imports torchdata")

from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, AdvantageEstimator
from verl.trainer.ppo.ray_trainer import compute_advantage

import counterpoise as cp
from counterpoise.hosts.verl import register
from counterpoise.hosts.verl.estimators import estimator
from counterpoise.hosts.verl.method import settings_of, setup
from helpers.verl.cases import Rollout, data_proto, rollouts, token_batch

pytestmark = [pytest.mark.hosts, pytest.mark.verl]
register()

NEED_A_STEP = ("tpo", "dfpo_min", "dfpo_orth", "clip_cov")
SAMPLE_MORE = ("vine_ppo", "spo_chain")
REWARD_ONLY = [
    name
    for name in cp.methods()
    if name not in (*NEED_A_STEP, *SAMPLE_MORE) and setup(name).method.reads_rewards_only
]


@pytest.mark.parametrize("name", SAMPLE_MORE)
def test_a_method_that_samples_more_is_refused(name):
    with pytest.raises(ValueError, match="prefix_value samples more .* verl samples by itself"):
        setup(name)


def advantages(name, rows, counterpoise=None, **settings):
    from omegaconf import OmegaConf

    config = OmegaConf.create(
        {"gamma": 1.0} | ({} if counterpoise is None else {"counterpoise": counterpoise})
    )
    out = compute_advantage(data_proto(rows), adv_estimator=name, config=config, **settings)
    assert not str(name).startswith("counterpoise/") or torch.equal(
        out.batch["advantages"], out.batch["returns"]
    )
    return out.batch["advantages"]


def assert_close(got, expected, rtol=1e-12, atol=1e-12):
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


def filler(number=0) -> Rollout:
    """A row as verl appends it: one token that is not in the mask, and a prompt id that starts with
    pad.
    """
    like = rollouts(1, 1, dtype=torch.float64)[0].fields
    fields = {
        name: torch.zeros(1, dtype=value.dtype) for name, value in like.items() if name != "uid"
    }
    return Rollout(key=f"pad0f_{number}_0", fields={"uid": "pad0f", **fields})


def test_grpo_dr_grpo_and_rloo_are_verls_own():
    rows = rollouts(dtype=torch.float64)
    assert_close(
        advantages("counterpoise/grpo", rows, {"advantage": {"eps": 1e-6}}),
        advantages(AdvantageEstimator.GRPO, rows),
    )
    assert_close(
        advantages("counterpoise/dr_grpo", rows),
        advantages(AdvantageEstimator.GRPO, rows, norm_adv_by_std_in_grpo=False),
    )
    assert_close(advantages("counterpoise/rloo", rows), advantages("rloo", rows))
    assert advantages("counterpoise/rloo", rows).abs().sum() > 1


def test_reinforce_pp_whitens_rollouts_where_verl_whitens_tokens():
    """Of equal lengths n T - 1 tokens there, n - 1 rollouts here: one factor.

    Of unequal lengths long rollouts count more there.
    """
    rows = rollouts(dtype=torch.float64, longest=2)
    factor = math.sqrt((16 * 2 - 1) / (2 * (16 - 1)))
    theirs = advantages("reinforce_plus_plus", rows)
    assert_close(
        advantages("counterpoise/reinforce_pp", rows) * factor, theirs, rtol=1e-6, atol=1e-6
    )
    ragged = rollouts(dtype=torch.float64)
    assert (
        advantages("counterpoise/reinforce_pp", ragged) - advantages("reinforce_plus_plus", ragged)
    ).abs().max() > 0.02


@pytest.mark.parametrize("name", REWARD_ONLY)
def test_every_reward_only_method_is_the_cores(name):
    rows = rollouts(dtype=torch.float64, seed=3)
    expected = cp.method(name).assign(token_batch(rows)).credit_NT
    assert_close(advantages(f"counterpoise/{name}", rows), expected)
    assert expected.abs().sum() > 0


def test_reward_only_methods_are_those_without_token_rules():
    assert {"grpo", "rloo", "reinforce_pp", "f_grpo", "psr", "max_rl"} <= set(REWARD_ONLY)
    assert not {"ktae", "delta", "fade", "top_entropy", "ibpo"} & set(REWARD_ONLY)


def test_verls_fillers_get_nothing_and_change_nothing():
    rows = rollouts(dtype=torch.float64)
    for name in ("counterpoise/grpo", "counterpoise/reinforce_pp"):
        alone, with_fillers = advantages(name, rows), advantages(name, [filler(0), *rows])
        assert torch.equal(with_fillers[1:], alone)
        assert (with_fillers[0] == 0).all()


def test_a_rejected_rollout_keeps_its_place_in_the_statistics():
    """Rejection by rollout correction empties a mask; the rollout's reward still counts for its
    prompt, as in verl's own estimators.
    """
    rows = rollouts(dtype=torch.float64)
    rows[1].fields["response_mask"] = torch.zeros_like(rows[1].fields["response_mask"])
    ours, theirs = advantages("counterpoise/rloo", rows), advantages("rloo", rows)
    assert_close(ours, theirs)
    assert (ours[1] == 0).all() and (ours[0] != 0).any()


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        SimpleNamespace(get=lambda key, default: default),
        AlgoConfig(),
        {"counterpoise": {"seed": 3}},
    ],
)
def test_settings_come_from_any_kind_of_configuration(config):
    assert settings_of(config) == ({"seed": 3} if isinstance(config, dict) and config else {})


def test_axes_can_be_changed_from_the_configuration():
    rows = rollouts(dtype=torch.float64)
    changed = advantages("counterpoise/grpo", rows, {"advantage": "group_mean"})
    assert_close(changed, advantages("counterpoise/dr_grpo", rows))
    assert (changed - advantages("counterpoise/grpo", rows)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("name", "settings", "line"),
    [
        ("ktae", None, "reads the tokens of each rollout.*trainer_mode=counterpoise/sync"),
        ("fade", None, "reads the tokens"),
        ("delta", None, "reads hidden_NTD.*hosts.trl"),
        ("tpo", None, "log-probs of a whole update.*hosts.trl"),
        ("dfpo_min", None, r"its loss \(dfpo\) must see"),
        ("clip_cov", None, "loss_mode=clip_cov of its own"),
        ("grpo", {"advantge": "signs"}, "no setting 'advantge'. Did you mean 'advantage'"),
        ("grpo", {"loss": "reinforce"}, "actor.policy_loss.loss_mode"),
        ("grpo", {"seed": "one"}, "seed must be an integer"),
        ("grpo", {"advantage": "group_zscor"}, "Did you mean 'group_zscore'"),
    ],
)
def test_what_an_estimator_cannot_do_is_said(name, settings, line):
    with pytest.raises(ValueError, match=line):
        advantages(f"counterpoise/{name}", rollouts(), settings)


def test_one_rollout_a_prompt_and_missing_prompt_ids():
    with pytest.raises(ValueError, match="only one rollout.*batch_whitened"):
        advantages("counterpoise/grpo", rollouts(size=1))
    assert advantages("counterpoise/psr", rollouts(size=1)).sum() > 0
    data = data_proto(rollouts()).batch
    with pytest.raises(ValueError, match="no prompt ids"):
        estimator("grpo")(data["token_level_rewards"], data["response_mask"])


def test_a_plan_without_our_trainer_is_warned_about():
    with pytest.warns(
        UserWarning, match="followed by trainer.v1.trainer_mode=counterpoise/sync alone"
    ):
        advantages("counterpoise/grpo", rollouts(), {"plan": "query_preserved"})


def test_registering_twice_changes_nothing():
    before = dict(ADV_ESTIMATOR_REGISTRY)
    register()
    assert before == ADV_ESTIMATOR_REGISTRY
    assert {f"counterpoise/{name}" for name in cp.methods()} <= set(before)
