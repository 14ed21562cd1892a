"""A method's memory lives in TRL's checkpoints: stopped and resumed equals trained in one go."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
from counterpoise.hosts.trl.state import credit_state
from helpers import trl_tiny

pytestmark = pytest.mark.hosts
SAVED = {"save_strategy": "steps", "save_steps": 4, "max_steps": 12}


@pytest.mark.parametrize("restore", [False, True])
def test_resume_keeps_the_controller(restore, tmp_path):
    """FADE's running means and the number of batches; also where TRL is told not to restore
    callbacks.
    """
    args = {
        "method": "fade",
        "plan": "query_preserved",
        "restore_callback_states_from_checkpoint": restore,
    } | SAVED
    whole = trl_tiny.ours(tmp_path, args=args, rollout_func=trl_tiny.told)
    whole.train()
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())[
        "stateful_callbacks"
    ]["CreditState"]
    assert saved["attributes"]["num_batches"] == 1
    resumed = trl_tiny.ours(tmp_path, args=args, rollout_func=trl_tiny.told, seed=9)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    first, last = (
        saved["attributes"]["method_state"]["controller"],
        credit_state(whole).method_state["controller"],
    )
    assert first["p_hat"] != last["p_hat"]
    assert credit_state(resumed).method_state["controller"] == last
    assert credit_state(resumed).num_batches == 3
    trl_tiny.assert_identical(trl_tiny.weights(resumed), trl_tiny.weights(whole))


def test_resume_keeps_the_sums_of_a_rule(tmp_path):
    """value_baseline's regression: what it has seen, and the training that follows."""
    args = {"method": "dapo", "method_axes": {"credit": ["value_baseline", "soften_negatives"]}}
    whole, resumed = (
        trl_tiny.ours(tmp_path, args=args | SAVED, rollout_func=trl_tiny.told, seed=seed)
        for seed in (0, 9)
    )
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    expected = credit_state(whole).method_state["rules"]
    assert expected[0]["unseen"]["r2"] < 1
    assert credit_state(resumed).method_state["rules"] == expected
    trl_tiny.assert_identical(trl_tiny.weights(resumed), trl_tiny.weights(whole))


def test_a_fresh_run_starts_anew(tmp_path):
    for _ in range(2):
        trainer = trl_tiny.ours(tmp_path, args={"method": "fade", "max_steps": 1})
        trainer.train()
        assert credit_state(trainer).num_batches == 1
