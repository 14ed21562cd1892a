"""Forward mode written out: equal to ``torch.func.jvp`` and to finite differences, in any layout,
for what moves and what stays.
"""

from __future__ import annotations

import pytest
import torch

from counterpoise.ledger.calculus.decompose import change_along
from counterpoise.ledger.calculus.logprobs import Texts, of_model, trainable
from counterpoise.ledger.calculus.tangents import can_walk, logp_change
from counterpoise.policy import add_lora, logp_function, pack, token_logp
from counterpoise.policy.backbone import backbone
from helpers.tiny_models import tiny

PROMPTS = [[3, 4, 5, 6, 7]] * 4 + [[8, 9, 10]] * 3 + [[3, 4, 5, 6]]
MASK_NT = torch.arange(9) < torch.tensor([9, 5, 3, 1, 7, 9, 2, 4])[:, None]
MASK_NT[0, 3:5] = False  # read and not scored
IDS_NT = torch.randint(3, 29, (8, 9), generator=torch.Generator().manual_seed(0))
MODELS = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "one key-value head": ("llama", {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}


def directions(params, num=3, size=1.0):
    generator = torch.Generator().manual_seed(1)
    return {
        name: size
        * torch.randn(num, *value.shape, generator=generator, dtype=torch.float64).to(value.dtype)
        for name, value in params.items()
    }


def written_out(model, params, direction_C, *, share, temperature=0.7):
    rows = pack.pack_rows(PROMPTS, IDS_NT, MASK_NT, torch.device("cpu"), share=share)
    assert isinstance(rows.layout, pack.Whole) != share
    head = backbone(model).head
    assert head is not None
    return logp_change(model, params, direction_C, rows, head, temperature=temperature)


def differentiated(model, params, direction_C, *, temperature=0.7):
    logp_of = logp_function(model, PROMPTS, IDS_NT, MASK_NT, temperature=temperature)
    with torch.no_grad():
        return torch.vmap(lambda one: torch.func.jvp(logp_of, (params,), (one,))[1])(direction_C)[
            :, MASK_NT
        ]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_it_equals_forward_mode(name, share, wide_norms):
    kind, changes = MODELS[name]
    model = tiny(kind, dtype=torch.float64, **changes)
    params = trainable(model)
    direction_C = directions(params)
    expected_CM = differentiated(model, params, direction_C)
    assert expected_CM.abs().min() > 1e-3
    torch.testing.assert_close(
        written_out(model, params, direction_C, share=share), expected_CM, rtol=1e-9, atol=1e-9
    )


def test_it_equals_finite_differences(wide_norms):
    model = tiny("qwen3", dtype=torch.float64)
    params = trainable(model)
    direction_C = directions(params, num=1)
    step = 1e-5

    def moved(size):
        other = tiny("qwen3", dtype=torch.float64)
        with torch.no_grad():
            for name, p in other.named_parameters():
                p += size * direction_C[name][0]
            return token_logp(other, PROMPTS, IDS_NT, MASK_NT, temperature=0.7)[MASK_NT]

    slope_M = (moved(step) - moved(-step)) / (2 * step)
    torch.testing.assert_close(
        written_out(model, params, direction_C, share=True)[0], slope_M, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "part", ["self_attn.k_proj", "embed_tokens", "layernorm", "lm_head", "layers.1"]
)
def test_what_is_not_trained_stays(part, wide_norms):
    """Only the parameters of one part move; the part of a joined product that stays is not mixed up
    with the one that moves.
    """
    model = tiny(dtype=torch.float64)
    for name, p in model.named_parameters():
        p.requires_grad_(part in name)
    params = trainable(model)
    direction_C = directions(params)
    expected_CM = differentiated(model, params, direction_C)
    assert len(params) < 20 and expected_CM.abs().max() > 1e-2
    torch.testing.assert_close(
        written_out(model, params, direction_C, share=True), expected_CM, rtol=1e-9, atol=1e-9
    )


def test_values_come_from_the_parameters_given(wide_norms):
    """The derivative is taken where ``params`` says, not where the model is."""
    model, there = tiny(dtype=torch.float64), tiny(seed=1, dtype=torch.float64)
    params = trainable(there)
    direction_C = directions(params)
    got_CM = written_out(model, params, direction_C, share=True)
    torch.testing.assert_close(
        got_CM, written_out(there, params, direction_C, share=True), rtol=0, atol=0
    )
    assert (
        got_CM - written_out(model, trainable(model), direction_C, share=True)
    ).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_that_of_forward_mode(dtype, wide_norms):
    """In float32 and under bfloat16 autocast the error against float64, over six models, is not
    above that of ``torch.func.jvp``.
    """
    errors = []
    for seed in range(6):
        exact, model = tiny(seed=seed, dtype=torch.float64), tiny(seed=seed)
        expected_CM = differentiated(exact, trainable(exact), directions(trainable(exact)))
        params, direction_C = trainable(model), directions(trainable(model))
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            both = (
                differentiated(model, params, direction_C),
                written_out(model, params, direction_C, share=True),
            )
        errors.append(
            [float((found.double() - expected_CM).norm() / expected_CM.norm()) for found in both]
        )
    by_jvp, by_hand = torch.tensor(errors).mean(0).tolist()
    print(f"{dtype}: error {by_jvp:.2e} differentiated, {by_hand:.2e} written out")
    assert by_hand < 1.1 * by_jvp


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_half_precision_weights_work_too(name):
    model, exact = tiny(name).to(torch.bfloat16), tiny(name)
    assert can_walk(model)
    params, direction_C = trainable(model), directions(trainable(model))
    found_CM = written_out(model, params, direction_C, share=True).float()
    expected_CM = written_out(exact, trainable(exact), directions(trainable(exact)), share=True)
    assert (found_CM - expected_CM).norm() < 0.2 * expected_CM.norm()


def test_the_engine_takes_it_and_cuts_rows_as_it_likes(wide_norms):
    model = tiny(dtype=torch.float64)
    params = trainable(model)
    direction_C = directions(params)
    logprobs = of_model(model, Texts(PROMPTS, IDS_NT, MASK_NT, temperature=0.7))
    assert logprobs.along is not None
    expected_CNT = change_along(logprobs._replace(along=None), params, direction_C)
    whole_CNT = change_along(logprobs, params, direction_C)
    small = logprobs._replace(forward_cost=100.0)
    assert len(list(small.forward_chunks(3))) > len(list(logprobs.forward_chunks(3))) == 1
    for found_CNT in (whole_CNT, change_along(small, params, direction_C)):
        torch.testing.assert_close(found_CNT, expected_CNT, rtol=1e-9, atol=1e-9)
    assert whole_CNT[:, ~MASK_NT].abs().max() == 0


def test_other_models_are_differentiated():
    adapted = add_lora(tiny(), r=2, alpha=4, target_modules=["q_proj"])
    for model in (adapted, tiny("gemma2"), tiny("gpt2"), tiny("phi")):
        assert not can_walk(model)
        assert of_model(model, Texts(PROMPTS, IDS_NT, MASK_NT)).along is None


def test_a_model_that_computes_something_else_is_differentiated(monkeypatch, caplog):
    """Somebody has put another function into the gate of a Llama: what is written out no longer
    holds, and is seen not to.
    """
    from transformers.models.llama.modeling_llama import LlamaMLP

    assert can_walk(tiny())
    monkeypatch.setattr(
        LlamaMLP,
        "forward",
        lambda self, x: self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x)),
    )
    assert not can_walk(tiny())
    assert "is differentiated, written out it is off by" in caplog.text


def test_recomputed_activations_have_predictions_too(caplog):
    """``torch.func.jvp`` fails there; what is written out does not, and it is said that nothing
    checked it.
    """
    caplog.set_level("INFO", logger="counterpoise.ledger")
    model, plain = tiny(), tiny()
    model.gradient_checkpointing_enable()
    params = trainable(plain)
    direction_C = directions(params)
    logprobs = of_model(model, Texts(PROMPTS, IDS_NT, MASK_NT))
    assert "nothing to hold it against" in caplog.text
    with pytest.raises(RuntimeError):
        change_along(logprobs._replace(along=None), params, direction_C)
    expected_CNT = change_along(
        of_model(plain, Texts(PROMPTS, IDS_NT, MASK_NT)), params, direction_C
    )
    torch.testing.assert_close(
        change_along(logprobs, params, direction_C), expected_CNT, rtol=1e-3, atol=1e-4
    )


def test_another_attention_is_read_whole_in_the_backward():
    """The budget of a backward counts rows as its own attention reads them, not as forward mode
    does.
    """
    model = tiny(attn_implementation="eager")
    logprobs = of_model(model, Texts(PROMPTS, IDS_NT, MASK_NT, token_budget=60))
    lengths = [len(prompt) + own for prompt, own in zip(PROMPTS, pack.response_lengths(MASK_NT))]
    for row_R in logprobs.chunks(range(8)):
        assert len(row_R) == 1 or len(row_R) * max(lengths[row] for row in row_R.tolist()) <= 60
