"""The rollout engine on a CPU: columns taken along, refilled slots, options of the update."""

from __future__ import annotations

import logging

import pytest
import torch

import counterpoise as cp
from counterpoise.policy import load_model, measure, prefix
from counterpoise.policy.backbone import backbone
from counterpoise.sampling import engine, sample
from counterpoise.tasks import task
from counterpoise.trainer import update
from counterpoise.trainer.collect import RolloutSampler, collect
from counterpoise.trainer.config import parse_config
from counterpoise.trainer.update import apply_update, prepare_update
from helpers.tiny_models import tiny

PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10], [11, 12, 13]]
STOPS = [2, 3, 4, 5]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_columns_taken_along_equal_measured_ones(name):
    model, needs = tiny(name), frozenset({"hidden_NTD", "topk_ids_NTK", "topk_logp_NTK"})
    rollouts = sample(
        model,
        PROMPTS,
        group_size=4,
        max_new_tokens=12,
        temperature=0.8,
        top_p=0.9,
        stop_ids=STOPS,
        seed=1,
        needs=needs,
        topk=5,
        max_rows=6,
    )
    prompt_ids = [PROMPTS[p] for p in rollouts.prompt_index_N.tolist()]
    found = measure(
        model, prompt_ids, rollouts.token_ids_NT, rollouts.mask_NT, needs, temperature=0.8, topk=5
    )
    torch.testing.assert_close(rollouts.hidden_NTD, found["hidden_NTD"], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rollouts.topk_logp_NTK, found["topk_logp_NTK"], atol=1e-4, rtol=0)
    assert torch.equal(rollouts.topk_ids_NTK, found["topk_ids_NTK"])


def test_columns_not_asked_for_are_none_and_change_no_token():
    model, settings = tiny(), {"group_size": 3, "max_new_tokens": 9, "stop_ids": STOPS, "seed": 4}
    plain = sample(model, PROMPTS, **settings)
    taken = sample(model, PROMPTS, **settings, needs={"hidden_NTD"})
    assert plain.hidden_NTD is None and taken.topk_ids_NTK is None
    assert torch.equal(plain.token_ids_NT, taken.token_ids_NT)
    assert sample(model, PROMPTS, **settings, engine=False, needs={"hidden_NTD"}).hidden_NTD is None


@pytest.mark.parametrize("max_rows", [1, 3, 7])
def test_refilled_slots_decode_greedily_as_generate_does(max_rows):
    model = tiny()
    rollouts = sample(
        model,
        PROMPTS,
        group_size=2,
        max_new_tokens=12,
        stop_ids=STOPS,
        seed=0,
        temperature=0,
        max_rows=max_rows,
    )
    for row, prompt in enumerate([p for p in PROMPTS for _ in range(2)]):
        whole = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=STOPS,
            pad_token_id=0,
        )
        assert (
            rollouts.token_ids_NT[row][rollouts.mask_NT[row]].tolist()
            == whole[0, len(prompt) :].tolist()
        )


def test_new_weights_are_seen_by_the_next_call():
    model = tiny()
    settings = {"max_new_tokens": 6, "stop_ids": [], "seed": 0, "temperature": 0}
    before = sample(model, PROMPTS, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    after = sample(model, PROMPTS, **settings)
    assert not torch.equal(before.token_ids_NT, after.token_ids_NT)
    assert torch.equal(
        after.token_ids_NT, sample(model, PROMPTS, **settings, engine=False).token_ids_NT
    )


def test_an_architecture_the_engine_does_not_know_falls_back_with_one_warning(caplog):
    model = tiny("gpt2")
    with caplog.at_level(logging.WARNING, logger="counterpoise.sampling"):
        rollouts = [
            sample(model, PROMPTS, max_new_tokens=4, stop_ids=[], seed=0, engine=engine)
            for engine in (True, True, False)
        ]
    assert [record.message for record in caplog.records if "engine" in record.message] == [
        "sample: the fast engine does not know this model (GPT2LMHeadModel is none of"
        " LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM); the generic path is used."
    ]
    assert torch.equal(rollouts[0].token_ids_NT, rollouts[2].token_ids_NT)


def test_rotations_that_depend_on_the_longest_row_are_left_to_the_generic_path():
    """The cache is longer than any row, 64 positions instead of 34, beyond the 40 from which such a
    model rotates differently.
    """
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model, prompts = (
        tiny(max_position_embeddings=40, rope_parameters=rope),
        [[*range(3, 17)], [3, 4]],
    )
    found = sample(model, prompts, max_new_tokens=20, stop_ids=[], seed=0)
    expected = measure(model, prompts, found.token_ids_NT, found.mask_NT, {"trainer_logp_NT"})[
        "trainer_logp_NT"
    ]
    torch.testing.assert_close(found.sampler_logp_NT, expected, rtol=0, atol=1e-5)


def test_a_cache_that_does_not_fit_is_halved_with_advice(monkeypatch, caplog):
    taken, real, settings = (
        [],
        torch.zeros,
        {"group_size": 16, "max_new_tokens": 8, "stop_ids": STOPS, "seed": 0},
    )
    whole = sample(tiny(), PROMPTS, **settings)

    def zeros(*size, **options):
        if (
            isinstance(size[0], tuple) and len(size[0]) == 5
        ):  # the cache: layers, rows, heads, positions, head size
            taken.append(size[0][1])
            if size[0][1] > 16:
                raise torch.OutOfMemoryError("no memory")
        return real(*size, **options)

    monkeypatch.setattr(engine.torch, "zeros", zeros)
    rollouts = sample(tiny(), PROMPTS, **settings)
    assert taken[:3] == [64, 32, 16]
    assert torch.equal(rollouts.token_ids_NT, whole.token_ids_NT)
    assert (
        "no memory for the cache of 64 rows in flight; set rollouts.max_rows to 32." in caplog.text
    )


def test_delta_takes_its_columns_from_the_sampler():
    policy, method = load_model("bundled"), cp.method("delta")
    config = parse_config({"rollouts": {"prompts": 3, "group_size": 4, "max_new_tokens": 24}})
    batch = collect(
        method, RolloutSampler(policy, task(name="arithmetic"), config, 0, needs=method.needs)
    ).batch
    assert batch.hidden_NTD is not None and batch.hidden_NTD.shape == (*batch.mask_NT.shape, 96)
    assert {name for name in method.needs if getattr(batch, name, None) is None} == set()


def test_recomputed_activations_change_no_gradient(monkeypatch):
    """One plain gradient step with and without activation checkpointing: equal bits, prompts read
    once in both, and the layers did run twice.
    """
    method, weights, calls, shared = cp.method("dapo"), [], [], []
    split = prefix._split
    monkeypatch.setattr(prefix, "_split", lambda *args: shared.append(1) or split(*args))
    for is_on in (False, True):
        config = parse_config(
            {
                "rollouts": {"prompts": 4, "group_size": 4, "max_new_tokens": 40},
                "optimizer": {"activation_checkpointing": is_on},
            }
        )
        policy = load_model("bundled")
        model = prepare_update(policy.model, config.optimizer)
        collected = collect(
            method, RolloutSampler(policy, task(name="arithmetic"), config, 0, needs=method.needs)
        )
        backbone(model)  # looks at a model once, with forwards of its own
        counted: list[int] = []
        model.model.layers[0].input_layernorm.register_forward_hook(
            lambda *_, counted=counted: counted.append(1)
        )
        rows = method.rows(collected.batch, method.assign(collected.batch), torch.arange(16))
        apply_update(
            model, torch.optim.SGD(model.parameters(), lr=0.1), method, rows, collected, config
        )
        assert not any(layer.training for layer in model.model.layers)
        assert model.config._attn_implementation == "sdpa"
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        calls.append((len(counted), len(shared)))
        shared.clear()
    assert torch.equal(*weights)
    assert calls[0][1] > 0
    assert calls[1] == (2 * calls[0][0], 2 * calls[0][1])


@pytest.mark.parametrize("setting", ["activation_checkpointing", "compile"])
def test_a_model_without_decoder_layers_is_refused_in_one_line(setting):
    settings = parse_config({"optimizer": {setting: True}}).optimizer
    with pytest.raises(
        ValueError,
        match=(
            f"optimizer.{setting}: GPT2LMHeadModel has no list of decoder layers. Set it to false."
        ),
    ):
        prepare_update(tiny("gpt2"), settings)


def test_out_of_memory_halves_the_micro_batches_and_names_the_setting(monkeypatch, caplog):
    """The gradient is that of the whole step; what did not fit is remembered; a single rollout that
    does not fit is the user's to solve.
    """
    method, weights, most = cp.method("dapo"), [], [1000]
    plain = update.token_logp

    def token_logp(model, prompt_ids, *args, **options):
        if len(prompt_ids) > most[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(model, prompt_ids, *args, **options)

    monkeypatch.setattr(update, "token_logp", token_logp)
    config = parse_config(
        {
            "rollouts": {"prompts": 4, "group_size": 4, "max_new_tokens": 40},
            "optimizer": {"token_budget": 1024},
        }
    )
    for most[0] in (1000, 6):
        policy = load_model("bundled")
        collected = collect(
            method, RolloutSampler(policy, task(name="arithmetic"), config, 0, needs=method.needs)
        )
        rows = method.rows(collected.batch, method.assign(collected.batch), torch.arange(16))
        apply_update(
            policy.model,
            torch.optim.SGD(policy.model.parameters(), lr=0.1),
            method,
            rows,
            collected,
            config,
        )
        weights.append(torch.cat([p.detach().flatten() for p in policy.model.parameters()]))
    torch.testing.assert_close(*weights, atol=1e-7, rtol=0)
    advice = [record.message for record in caplog.records if "token_budget" in record.message]
    assert advice[-1].startswith("update: no memory for micro-batches of ") and len(advice) <= 3
    apply_update(
        policy.model,
        torch.optim.SGD(policy.model.parameters(), lr=0.1),
        method,
        rows,
        collected,
        config,
    )
    assert len([record for record in caplog.records if "token_budget" in record.message]) == len(
        advice
    )
    most[0] = 0
    with pytest.raises(
        ValueError,
        match="no memory for a single rollout. Set optimizer.activation_checkpointing to true",
    ):
        apply_update(
            policy.model,
            torch.optim.SGD(policy.model.parameters(), lr=0.1),
            method,
            rows,
            collected,
            config,
        )
