"""The rollout engine of a model with adapters: their weights added, sent anew at every call."""

from __future__ import annotations

import logging

import pytest
import torch

from counterpoise.policy import add_lora, load_model
from counterpoise.sampling import engine, sample
from helpers.tiny_models import tiny

pytest.importorskip("peft")
PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10], [11, 12, 13]]
HOW = {"group_size": 4, "max_new_tokens": 12, "stop_ids": [2, 3], "seed": 1}


def adapted(name="llama", seed=0, modules="all-linear"):
    """Adapters that change the model: peft begins with B = 0."""
    model = add_lora(tiny(name), r=2, alpha=4.0, target_modules=modules)
    return move(model, seed)


def move(model, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "lora_B" in key:
                weight.normal_(0, 0.2)
    return model


def assert_same(fast, slow, atol=1e-5):
    assert torch.equal(fast.token_ids_NT, slow.token_ids_NT)
    torch.testing.assert_close(fast.sampler_logp_NT, slow.sampler_logp_NT, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("llama", "all-linear"),
        ("qwen2", "all-linear"),
        ("qwen3", ["q_proj", "down_proj"]),
        ("llama", ["lm_head", "v_proj"]),
    ],
)
def test_engine_samples_what_the_adapted_model_says(name, modules):
    model = adapted(name, modules=modules)
    assert engine.engine_for(model) is not None
    fast = sample(model, PROMPTS, **HOW)
    assert_same(fast, sample(model, PROMPTS, **HOW, engine=False))
    with model.disable_adapter():
        bare = sample(model, PROMPTS, **HOW, engine=False)
        assert_same(sample(model, PROMPTS, **HOW), bare)
    assert not torch.equal(bare.sampler_logp_NT, fast.sampler_logp_NT)


def test_adapters_that_moved_are_seen_by_the_next_call():
    model = adapted()
    before = sample(model, PROMPTS, **HOW)
    after = sample(move(model, 1), PROMPTS, **HOW)
    assert not torch.equal(before.sampler_logp_NT[:, 0], after.sampler_logp_NT[:, 0])
    assert_same(after, sample(model, PROMPTS, **HOW, engine=False))


def test_merged_adapters_are_not_added_twice():
    model = adapted()
    expected = sample(model, PROMPTS, **HOW)
    model.merge_adapter()
    merged = sample(model, PROMPTS, **HOW)
    assert torch.equal(merged.token_ids_NT, expected.token_ids_NT)
    torch.testing.assert_close(merged.sampler_logp_NT, expected.sampler_logp_NT, atol=1e-5, rtol=0)


def test_bundled_model_with_adapters_decodes_in_c_too():
    model = move(add_lora(load_model("bundled").model, r=4), 0)
    fast = sample(model, PROMPTS, **HOW)
    assert_same(fast, sample(model, PROMPTS, **HOW, engine=False), atol=1e-4)  # large logits


def test_adapters_that_are_more_than_a_sum_take_the_generic_path(caplog):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM")
    model = get_peft_model(tiny(), config)
    with caplog.at_level(logging.WARNING):
        assert engine.engine_for(model) is None
    assert "modules put into the model (adapters, quantised layers)" in caplog.text
