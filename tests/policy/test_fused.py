"""Fused layers compute what the model's own do, forward and backward, and leave nothing behind.

The kernels run on a CUDA device, or on a CPU that has Triton (slowly):
TRITON_INTERPRET=1 pytest tests/policy/test_fused.py
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import nullcontext, suppress

import pytest
import torch

from counterpoise.policy import add_lora, token_logp
from counterpoise.policy.fused import fused_layers, why_not_fused
from counterpoise.policy.joined import can_join, join_projections
from counterpoise.policy.logp import logp_function
from counterpoise.policy.mix import triton_kernels
from counterpoise.policy.pack import pack_rows
from counterpoise.policy.prefix import Prefixes, can_share, same_attention
from counterpoise.trainer.config import ConfigError, parse_config
from counterpoise.trainer.update import prepare_update
from helpers.tiny_models import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter cuts bfloat16 instead of rounding it
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
CAN_RUN = importlib.util.find_spec("triton") is not None and (
    DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
)
needs_triton = pytest.mark.skipif(not CAN_RUN, reason="no Triton that could run here")

NAMES = ("llama", "qwen2", "qwen3")
PROMPTS = [[3, 4, 5], [6, 7], [3, 4, 5], [6, 7], [3, 4, 5]]
LENGTHS = [7, 5, 6, 7, 2]


@pytest.fixture(autouse=True)
def exact_matmuls():
    torch.backends.cuda.matmul.allow_tf32 = False


def texts(prompt_ids=PROMPTS):
    generator = torch.Generator().manual_seed(0)
    mask_NT = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    ids_NT = torch.randint(3, 29, (5, 7), generator=generator)
    return prompt_ids, ids_NT.to(DEVICE), mask_NT.to(DEVICE)


def gradient(model, *, fused, half=False, prompt_ids=PROMPTS):
    """Log-probs, and the gradient of a weighted sum of them, by parameter."""
    columns = texts(prompt_ids)
    weight_NT = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    model.zero_grad()
    with fused_layers(model, triton_kernels()) if fused else nullcontext():
        with torch.autocast(DEVICE, HALF) if half else nullcontext():
            logp_NT = token_logp(model, *columns)
        (logp_NT * weight_NT).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logp_NT.detach(), grads


def assert_close(fused, plain, tolerance):
    """Each tensor up to a share of its own largest number."""
    torch.testing.assert_close(fused[0], plain[0], rtol=0, atol=tolerance * 10)
    assert fused[1].keys() == plain[1].keys()
    for name, grad in plain[1].items():
        worst = (fused[1][name] - grad).abs().max() / grad.abs().max()
        assert worst < tolerance, name


@needs_triton
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [{}, {"tie_word_embeddings": True, "num_key_value_heads": 1}])
def test_log_probs_and_gradients_are_those_of_the_plain_layers(name, sizes):
    model = tiny(name, **sizes).to(DEVICE)
    assert_close(gradient(model, fused=True), gradient(model, fused=False), 1e-5)


def test_prompts_are_read_once_here():
    assert isinstance(pack_rows(*texts(), torch.device(DEVICE), share=True).layout, Prefixes)


@needs_triton
def test_whole_rows_too():
    model, prompts = tiny().to(DEVICE), [[3, 4], [5], [6, 7, 8], [9], [10, 11]]
    plain = gradient(model, fused=False, prompt_ids=prompts)
    assert_close(gradient(model, fused=True, prompt_ids=prompts), plain, 1e-5)


@needs_triton
@pytest.mark.parametrize("name", NAMES)
def test_autocast_rounds_where_the_plain_layers_round(name):
    model = tiny(name).to(DEVICE)
    fused, plain = (gradient(model, fused=fused, half=True) for fused in (True, False))
    if DEVICE == "cpu":  # same products, same sums
        assert torch.equal(fused[0], plain[0])
    assert_close(fused, plain, 8 * torch.finfo(HALF).eps)


@needs_triton
def test_half_precision_weights():
    """Against float32: no further from it than the plain layers, up to a factor of two."""
    model = tiny(dtype=HALF).to(DEVICE)
    exact = gradient(tiny(dtype=HALF).float().to(DEVICE), fused=False)[1]
    error = {}
    for fused in (True, False):
        grads = gradient(model, fused=fused)[1]
        error[fused] = max(
            float((grads[n] - g).abs().max() / g.abs().max()) for n, g in exact.items()
        )
    assert error[True] < 2 * error[False]


@needs_triton
@pytest.mark.parametrize("is_shared", [True, False])
def test_activations_computed_again(is_shared):
    model = tiny().to(DEVICE)
    plain = gradient(model, fused=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.training = True
    with same_attention(model) if is_shared else nullcontext():
        assert can_share(model.get_decoder()) == is_shared
        assert_close(gradient(model, fused=True), plain, 1e-5)


@needs_triton
def test_adapters():
    pytest.importorskip("peft")
    model = add_lora(tiny().to(DEVICE), r=2, alpha=4.0, target_modules="all-linear")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros would hide a wrong gradient of lora_A
            torch.nn.init.normal_(parameter, std=0.1)
    plain = gradient(model, fused=False)
    assert plain[1] and all("lora" in name for name in plain[1])
    assert_close(gradient(model, fused=True), plain, 1e-5)


@needs_triton
def test_forward_mode_after_the_block():
    model = tiny().to(DEVICE)
    gradient(model, fused=True)
    params = {name: value.detach() for name, value in model.named_parameters()}
    _, change_NT = torch.func.jvp(logp_function(model, *texts()), (params,), (params,))
    assert change_NT.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_joined_projections_are_casts_of_the_weights_and_so_are_their_gradients(name):
    model = tiny(name)
    layers = model.model.layers
    joined = join_projections(layers, torch.bfloat16)
    assert can_join(layers)
    assert len(joined) == len(layers)
    attention, mlp = layers[1].self_attn, layers[1].mlp
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert torch.equal(joined[1].qkv.weight, torch.cat([p.weight for p in qkv]).bfloat16())
    assert torch.equal(joined[1].down.weight, mlp.down_proj.weight.bfloat16())
    if name == "qwen2":
        assert torch.equal(joined[1].qkv.bias, torch.cat([p.bias for p in qkv]).bfloat16())
    grad = torch.randn_like(joined[1].gate_up.weight)
    joined[1].gate_up.weight.backward(grad)
    both = torch.cat([mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad])
    assert torch.equal(both, grad.float())


def test_nothing_is_left_behind_and_other_models_are_untouched():
    model, other = tiny(), tiny()
    with suppress(RuntimeError), fused_layers(model):
        assert all("forward" in vars(layer) for layer in model.model.layers)
        assert not any("forward" in vars(module) for module in other.modules())
        raise RuntimeError
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("gpt2", {}, "GPT2Model is none of LlamaModel, Qwen2Model, Qwen3Model"),
        ("llama", {"compile": True}, "optimizer.compile fuses them already"),
    ],
)
def test_fused_where_it_cannot_be_is_refused_in_one_line(name, settings, reason):
    optimizer = parse_config({"optimizer": {"kernels": "fused", **settings}}).optimizer
    with pytest.raises(ConfigError, match=f"{reason}. Set it to auto or torch."):
        prepare_update(tiny(name), optimizer)


@needs_triton
@pytest.mark.skipif(DEVICE == "cpu", reason="refused before")
def test_hooks_and_other_modules_are_refused():
    model = tiny().to(DEVICE)
    assert why_not_fused(model) is None
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert why_not_fused(model) == "a hook on LlamaMLP"
    handle.remove()
    model.model.norm = torch.nn.LayerNorm(16, device=DEVICE)
    assert why_not_fused(model) == "LayerNorm in place of a norm, an attention or an MLP"
