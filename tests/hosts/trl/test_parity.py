"""Presets that TRL has too equal TRL's own, both ways: by TRL's arithmetic (its settings say the
same) and by ours on TRL's forward.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
import counterpoise as cp
import counterpoise.hosts.trl.method as trl_method
from counterpoise.catalogue.method import FAMILIES
from helpers import trl_tiny

pytestmark = pytest.mark.hosts
SGD = {"optim": "sgd", "learning_rate": 0.02, "max_grad_norm": 0.0}
# preset -> the same method in TRL's own words
TWINS = {
    "grpo": {"loss_type": "grpo", "epsilon": 0.2},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon": 0.2, "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
}
# TRL divides dapo and cispo by the mean tokens of a generation's updates, our reduction by those of
# the update: equal where there is one
ONE_UPDATE = {"steps_per_generation": 2, "num_iterations": 2}


@pytest.fixture
def our_loss(monkeypatch):
    """Every loss takes the path of those that TRL lacks."""
    monkeypatch.setattr(trl_method, "trl_fields", lambda method: None)


@pytest.fixture
def saved_model(tmp_path):
    """On disk: TRL loads its reference from there."""
    folder = tmp_path / "model"
    trl_tiny.tiny_model(0).save_pretrained(folder)
    trl_tiny.tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def graded(completions, **kwargs):
    """Rewards of many values, so that advantages are no round numbers."""
    return [0.1 * (sum(map(ord, text)) % 7) for text in completions]


def trained(make, tmp_path, args, **kwargs):
    """How far each weight moved."""
    trainer = make(tmp_path, args=SGD | {"max_steps": 4} | args, reward_funcs=graded, **kwargs)
    start = trl_tiny.weights(trainer)
    trainer.train()
    end = trl_tiny.weights(trainer)
    return {name: end[name] - start[name] for name in start}


def relative_gap(got, expected):
    """The largest difference, as a share of the largest move."""
    moved = max(float(value.abs().max()) for value in expected.values())
    assert moved > 1e-3
    return trl_tiny.largest_gap(got, expected) / moved


@pytest.mark.parametrize("name", TWINS)
def test_preset_equals_trl(name, tmp_path):
    """Two generations of four updates."""
    expected = trained(trl_tiny.plain, tmp_path / "plain", TWINS[name] | {"max_steps": 8})
    got = trained(trl_tiny.ours, tmp_path / "ours", {"method": name, "max_steps": 8})
    assert relative_gap(got, expected) < 1e-4


@pytest.mark.parametrize("name", TWINS)
def test_our_loss_equals_trl(name, tmp_path, our_loss):
    """The path of the losses that TRL lacks, taken by losses that it has."""
    expected = trained(trl_tiny.plain, tmp_path / "plain", TWINS[name] | ONE_UPDATE)
    got = trained(trl_tiny.ours, tmp_path / "ours", {"method": name} | ONE_UPDATE)
    assert relative_gap(got, expected) < 1e-4


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "sapo"])
def test_our_loss_equals_trls_over_several_updates(name, tmp_path, monkeypatch):
    """Four updates a generation: our plan deals the rows, TRL's loss and ours train on them."""
    args = {"method": name, "plan": "query_preserved"}
    expected = trained(trl_tiny.ours, tmp_path / "trl", args, rollout_func=trl_tiny.told)
    monkeypatch.setattr(trl_method, "trl_fields", lambda method: None)
    got = trained(trl_tiny.ours, tmp_path / "ours", args, rollout_func=trl_tiny.told)
    assert relative_gap(got, expected) < 1e-4


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_terms_beside_the_policy_loss(name, tmp_path, saved_model, our_loss):
    """KL to the reference and entropy bonus are TRL's own in both paths.

    One micro-batch an update: TRL's bonus is a mean over each.
    """
    one = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "num_iterations": 2,
    }
    args = one | {"beta": 0.1, "entropy_coef": 0.05}
    expected = trained(trl_tiny.plain, tmp_path / "plain", TWINS[name] | args, model=saved_model)
    got = trained(trl_tiny.ours, tmp_path / "ours", {"method": name} | args, model=saved_model)
    without = trained(trl_tiny.ours, tmp_path / "without", {"method": name} | one)
    assert relative_gap(got, expected) < 1e-4
    assert relative_gap(got, without) > 1e-2


def test_a_kl_term_of_the_method_is_trls_beta(tmp_path, saved_model):
    loss = [{"name": "clipped", "clip_low": 0.2, "clip_high": 0.2}, {"name": "kl", "coef": 0.1}]
    expected = trained(
        trl_tiny.plain, tmp_path / "plain", TWINS["grpo"] | {"beta": 0.1}, model=saved_model
    )
    got = trained(
        trl_tiny.ours,
        tmp_path / "ours",
        {"method": "grpo", "method_axes": {"loss": loss}},
        model=saved_model,
    )
    assert relative_gap(got, expected) < 1e-4


def test_a_loss_that_trl_does_not_know(tmp_path, saved_model, monkeypatch):
    """A KL term from outside, which no table names: computed by us from TRL's reference."""

    @cp.token_loss(needs="ref_logp_NT")
    def pull(trainer_logp_NT, rows, *, coef):
        gap_NT = rows.ref_logp_NT - trainer_logp_NT
        loss_NT = coef * (gap_NT.exp() - 1 - gap_NT)
        return loss_NT, torch.ones_like(loss_NT), torch.zeros_like(rows.mask_NT)

    monkeypatch.setitem(FAMILIES["loss"], "pull", pull)
    loss = [{"name": "clipped", "clip_low": 0.2, "clip_high": 0.2}, {"name": "pull", "coef": 0.1}]
    # TRL loads a reference only with beta > 0
    args = {"method": "grpo", "method_axes": {"loss": loss}, "beta": 1e-12} | ONE_UPDATE
    expected = trained(
        trl_tiny.plain,
        tmp_path / "plain",
        TWINS["grpo"] | {"beta": 0.1, "use_bias_correction_kl": False} | ONE_UPDATE,
        model=saved_model,
    )
    got = trained(trl_tiny.ours, tmp_path / "ours", args, model=saved_model)
    assert relative_gap(got, expected) < 1e-4
