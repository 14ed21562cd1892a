"""Adapters: the hidden states are the adapted model's, and only the adapter moves."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
peft = pytest.importorskip("peft")
from helpers import trl_tiny

pytestmark = pytest.mark.hosts


@pytest.mark.parametrize("method", ["delta", "dfpo_min", "uniform"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_lora(method, beta, tmp_path):
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer = trl_tiny.ours(
        tmp_path, args={"method": method, "beta": beta, "plan": "query_preserved"}, peft_config=lora
    )
    start = trl_tiny.weights(trainer)
    trainer.train()
    end = trl_tiny.weights(trainer)
    moved = {name for name in end if not torch.equal(end[name], start[name])}
    assert moved == {name for name in end if "lora_" in name and ".ref." not in name}


def test_the_adapters_hidden_states_are_read(tmp_path, monkeypatch):
    import counterpoise.hosts.trl.trainer as host

    seen, build = [], host.token_batch

    def watched(trainer, made, output, *args):
        batch = build(trainer, made, output, *args)
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        attended = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        model, width = trainer.model, output["completion_ids"].shape[1]
        with torch.no_grad():
            on = model(
                input_ids=ids, attention_mask=attended, output_hidden_states=True
            ).hidden_states[-1]
            with model.disable_adapter():
                off = model(
                    input_ids=ids, attention_mask=attended, output_hidden_states=True
                ).hidden_states[-1]
        seen.append((batch, on[:, -width - 1 : -1], off[:, -width - 1 : -1]))
        return batch

    monkeypatch.setattr(host, "token_batch", watched)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer = trl_tiny.ours(
        tmp_path, args={"method": "delta", "beta": 0.1, "learning_rate": 0.05}, peft_config=lora
    )
    trainer.train()
    batch, on_NTD, off_NTD = seen[1]  # the second generation: the adapter has moved
    torch.testing.assert_close(
        batch.hidden_NTD[batch.mask_NT], on_NTD[batch.mask_NT], rtol=0, atol=1e-5
    )
    assert (batch.hidden_NTD - off_NTD)[batch.mask_NT].abs().max() > 1e-2
