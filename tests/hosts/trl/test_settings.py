"""Settings and metrics of TRL mean under a method what they mean in TRL."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
from counterpoise.hosts.trl.scoring import record_calls
from helpers import trl_tiny

pytestmark = pytest.mark.hosts
SEVERAL = {"learning_rate": 0.02, "optim": "sgd", "max_steps": 4}


def test_the_off_policy_mask_is_one_of_rollouts(tmp_path):
    """Token credit or not: a rollout is dropped as a whole, by its own advantage."""
    args = {"method": "ktae", "off_policy_mask_threshold": 1e-3, **SEVERAL}
    trainer = trl_tiny.ours(tmp_path, args=args)
    seen, compute = [], trainer._compute_loss

    def watched(model, inputs):
        with record_calls(trainer, "get_off_policy_mask") as masks:
            loss = compute(model, inputs)
        seen.append((masks[-1], inputs["cp_advantage"], inputs["advantages"]))
        return loss

    trainer._compute_loss = watched
    trainer.train()
    assert any((mask == 0).any() for mask, _, _ in seen)
    assert any(credit_NT.shape[1] > 1 for _, _, credit_NT in seen)
    for mask, advantage_N, _ in seen:
        assert mask.shape == (len(advantage_N), 1)
        assert (mask[advantage_N >= 0] == 1).all()


@pytest.mark.parametrize("method", ["ctpo", "crf_ntf", "dfpo_min"])
def test_clip_ratio_is_that_of_our_loss(method, tmp_path):
    """TRL's own numbers are those of a loss without credit: 0."""
    trainer = trl_tiny.ours(tmp_path, args={"method": method, **SEVERAL, "learning_rate": 0.1})
    trainer.train()
    rows = [row for row in trainer.state.log_history if "clip_ratio/region_mean" in row]
    ours = [row["credit/clipped_frac"] for row in rows]
    assert len(rows) == 4
    assert method == "dfpo_min" or max(ours) > 0.01
    for row in rows:
        low, high = row["clip_ratio/low_mean"], row["clip_ratio/high_mean"]
        assert row["clip_ratio/region_mean"] == pytest.approx(low + high)
        assert row["clip_ratio/low_min"] <= low
        assert row["clip_ratio/high_max"] >= high
    shares = [row["clip_ratio/region_mean"] for row in rows]
    assert shares == pytest.approx(ours, abs=0.02)


def test_clip_ratio_is_trls_where_both_have_the_loss(tmp_path):
    """DAPO's clip by TRL's arithmetic and by ours (a reduction that TRL has not)."""
    ours = {"method_axes": {"reduction": {"name": "per_token", "count": "credited"}}}
    logs = []
    for folder, more in (("trl", {}), ("ours", ours)):
        torch.manual_seed(0)
        args = {"method": "dapo", "plan": "round_robin", **SEVERAL, "max_grad_norm": 0.0} | more
        trainer = trl_tiny.ours(tmp_path / folder, args=args, rollout_func=trl_tiny.told)
        assert trainer.credit_setup.has_own_loss == bool(more)
        trainer.train()
        logs.append([row for row in trainer.state.log_history if "clip_ratio/low_mean" in row])
    for key in ("low_mean", "low_min", "high_mean", "high_max", "region_mean"):
        trl_s, our_s = ([row[f"clip_ratio/{key}"] for row in rows] for rows in logs)
        assert trl_s[:2] == pytest.approx(our_s[:2], abs=0.05), key
