"""A sampler apart (vLLM): TRL's correction for it acts on our losses as on TRL's own, and log-probs
that it did not tell are scored.

vLLM itself needs a GPU; what it hands to TRL (tokens and their log-probs) is handed over by
``rollout_func`` here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
import counterpoise.hosts.trl.method as trl_method
import counterpoise.hosts.trl.trainer as host
from helpers import trl_tiny

pytestmark = pytest.mark.hosts
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
SGD = {"optim": "sgd", "learning_rate": 0.02, "max_grad_norm": 0.0, "max_steps": 4}


def sampled_apart(prompts, trainer):
    """Log-probs of a sampler that is not the model being trained; near ln(1/14), where the tiny
    model's are too.
    """
    out = trl_tiny.told(prompts, trainer)
    gen = torch.Generator().manual_seed(7)
    return out | {
        "logprobs": [
            (-2.5 + torch.rand(len(ids), generator=gen)).tolist() for ids in out["completion_ids"]
        ]
    }


def trained(tmp_path, *, apart=True, **args):
    """How far each weight moved."""
    trainer = trl_tiny.ours(
        tmp_path, args=SGD | {"plan": "query_preserved"} | args, rollout_func=sampled_apart
    )
    trainer.use_vllm, trainer._last_loaded_step = apart, 0
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    start = trl_tiny.weights(trainer)
    trainer.train()
    return {name: value - start[name] for name, value in trl_tiny.weights(trainer).items()}


@pytest.mark.parametrize("mode", MODES)
def test_the_correction_is_trls(mode, tmp_path, monkeypatch):
    args = {
        "method": "grpo",
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": 1.5,
    }
    by_trl = trained(tmp_path / "trl", **args)
    without = trained(tmp_path / "without", apart=False, **args)
    monkeypatch.setattr(trl_method, "trl_fields", lambda method: None)
    ours = trained(tmp_path / "ours", **args)
    size = max(float(value.abs().max()) for value in by_trl.values())
    assert size > 1e-4
    assert trl_tiny.largest_gap(ours, by_trl) < 1e-4 * size
    assert trl_tiny.largest_gap(without, by_trl) > 1e-2 * size


@pytest.mark.parametrize("method", ["dapo", "crf_ntf"])
def test_log_probs_that_the_sampler_did_not_tell(method, tmp_path, monkeypatch):
    """vLLM may leave some out (NaN). Rules read the trainer's own scores then."""

    def untold(prompts, trainer):
        out = sampled_apart(prompts, trainer)
        return out | {"logprobs": [[float("nan"), *row[1:]] for row in out["logprobs"]]}

    seen, build = [], host.token_batch
    monkeypatch.setattr(host, "token_batch", lambda *args: seen.append(build(*args)) or seen[-1])
    args = {"method": method, "steps_per_generation": 2, "max_steps": 1}
    trainer = trl_tiny.ours(tmp_path, args=args, rollout_func=untold)
    trainer.train()
    (batch,) = seen
    assert torch.isfinite(batch.sampler_logp_NT).all()
    assert (batch.sampler_logp_NT[batch.mask_NT] < 0).all() == (
        method == "crf_ntf"
    )  # dapo reads none: nothing is scored
