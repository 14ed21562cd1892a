"""Fused layers in C against the model's own: log-probs, gradients, threads, what they refuse."""

from __future__ import annotations

import ctypes
import math
import shutil
from contextlib import nullcontext

import pytest
import torch

from counterpoise.policy import add_lora, token_logp
from counterpoise.policy.fused import fused_layers, why_not_fused
from counterpoise.policy.kernels import build, check, cpu, cpu_attention
from counterpoise.policy.logp import logp_function
from counterpoise.policy.pack import pack_rows
from counterpoise.policy.prefix import Prefixes, can_share, same_attention
from counterpoise.trainer.config import parse_config
from counterpoise.trainer.update import chosen_kernels, prepare_update
from helpers.tiny_models import tiny

# with a compiler the kernels have to build: a source that does not must not pass as skipped
native = pytest.mark.skipif(
    not any(map(shutil.which, build.COMPILERS)), reason="there is no C compiler"
)
NAMES = ("llama", "qwen2", "qwen3")
SIZES = {
    "a row of vectors": {},  # heads of 4: half a vector
    "shared keys": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "odd": {"hidden_size": 36, "intermediate_size": 43, "num_attention_heads": 6, "head_dim": 10}
    | {"initializer_range": 0.2},
    "long": {"hidden_size": 96, "head_dim": 24, "initializer_range": 0.1},
}
SHARED = [[3, 4, 5], [6, 7], [3, 4, 5], [6, 7], [3, 4, 5], [8]]
OWN = [[3, 4], [5], [6, 7, 8], [9], [10, 11], [12]]


def texts(prompt_ids, longest):
    """Ragged responses, the shortest of one token."""
    generator = torch.Generator().manual_seed(0)
    length_N = torch.tensor([longest, 5, longest - 1, 7, 2, 1])
    ids_NT = torch.randint(3, 29, (6, longest), generator=generator)
    return prompt_ids, ids_NT, torch.arange(longest) < length_N[:, None]


def gradient(model, *, fused, prompt_ids=SHARED, longest=9):
    """Log-probs, and the gradient of a weighted sum of them, by parameter."""
    columns = texts(prompt_ids, longest)
    weight_NT = torch.randn(6, longest, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    with fused_layers(model) if fused else nullcontext():
        logp_NT = token_logp(model, *columns)
        (logp_NT * weight_NT.to(logp_NT.dtype)).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logp_NT.detach(), grads


def assert_close(fused, plain, tolerance=1e-5):
    """Log-probs to 1e-6, each gradient to a share of its largest number, all to 1 - 1e-9."""
    torch.testing.assert_close(fused[0], plain[0], rtol=1e-6, atol=2e-6)
    assert fused[1].keys() == plain[1].keys()
    for name, grad in plain[1].items():
        assert (fused[1][name] - grad).abs().max() <= tolerance * grad.abs().max(), name
    one, other = (
        torch.cat([g.double().flatten() for g in grads.values()]) for _, grads in (fused, plain)
    )
    assert 1 - torch.cosine_similarity(one, other, 0) < 1e-9


@native
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("prompt_ids", [SHARED, OWN], ids=["shared", "own"])
def test_log_probs_and_gradients_are_those_of_the_plain_layers(name, sizes, prompt_ids):
    # of 120 tokens more than one block of queries goes back
    longest = 120 if sizes == "long" else 9
    model = tiny(name, **SIZES[sizes], max_position_embeddings=256)
    rows = {"prompt_ids": prompt_ids, "longest": longest}
    assert_close(gradient(model, fused=True, **rows), gradient(model, fused=False, **rows))


@pytest.mark.parametrize(("prompt_ids", "is_shared"), [(SHARED, True), (OWN, False)])
def test_both_layouts_are_there(prompt_ids, is_shared):
    rows = pack_rows(*texts(prompt_ids, 9), torch.device("cpu"), share=True)
    assert isinstance(rows.layout, Prefixes) == is_shared


@native
@pytest.mark.parametrize("name", NAMES)
def test_no_further_from_double_precision_than_the_plain_layers(name):
    """The mean error of log-probs, up to a factor of two."""
    sizes = SIZES["long"]
    exact = gradient(tiny(name, dtype=torch.float64, **sizes), fused=False)[0]
    error = {
        fused: float((gradient(tiny(name, **sizes), fused=fused)[0] - exact).abs().mean())
        for fused in (True, False)
    }
    assert error[True] < 2 * error[False]


@native
@pytest.mark.parametrize("is_shared", [True, False])
def test_activations_computed_again(is_shared):
    model = tiny()
    plain = gradient(model, fused=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.training = True
    with same_attention(model) if is_shared else nullcontext():
        assert can_share(model.get_decoder()) == is_shared
        assert_close(gradient(model, fused=True), plain)


@native
def test_adapters():
    pytest.importorskip("peft")
    model = add_lora(tiny(), r=2, alpha=4.0, target_modules="all-linear")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros would hide a wrong gradient of lora_A
            torch.nn.init.normal_(parameter, std=0.1)
    plain = gradient(model, fused=False)
    assert plain[1] and all("lora" in name for name in plain[1])
    assert_close(gradient(model, fused=True), plain)


@native
def test_parts_in_threads_change_only_the_sums_over_rows(monkeypatch):
    """All but the gradient of norms keeps its bits."""
    model = tiny(**SIZES["long"])
    alone = gradient(model, fused=True)
    monkeypatch.setattr(cpu, "SMALLEST", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    parts = gradient(model, fused=True)
    assert torch.equal(parts[0], alone[0])
    for name, grad in alone[1].items():
        if name.endswith("norm.weight"):
            torch.testing.assert_close(parts[1][name], grad)
        else:
            assert torch.equal(parts[1][name], grad), name


@native
def test_forward_mode_after_the_block():
    model = tiny()
    gradient(model, fused=True)
    params = {name: value.detach() for name, value in model.named_parameters()}
    _, change_NT = torch.func.jvp(logp_function(model, *texts(SHARED, 9)), (params,), (params,))
    assert change_NT.isfinite().all()


@native
def test_auto_takes_them_and_torch_does_not():
    model = tiny()
    for kernels, is_fused in (("auto", True), ("fused", True), ("torch", False)):
        settings = parse_config({"optimizer": {"kernels": kernels}}).optimizer
        with chosen_kernels(prepare_update(model, settings), settings):
            assert ("forward" in vars(model.model.layers[0])) == is_fused


@native
def test_layers_are_looked_at_once_per_model(monkeypatch):
    from counterpoise.trainer import update

    seen = []
    monkeypatch.setattr(update, "why_not_fused", lambda model: seen.append(model))
    model, settings = tiny(), parse_config({}).optimizer
    for _ in range(3):
        with chosen_kernels(model, settings):
            pass
    assert seen == [model]


@native
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.bfloat16(), "on a CPU all weights have to be float32"),
        (
            lambda model: model.set_attn_implementation("eager"),
            "on a CPU attention has to be sdpa, not eager",
        ),
        (
            lambda model: setattr(model.config, "use_sliding_window", True),
            "on a CPU attention may have no sliding window",
        ),
        (
            lambda model: setattr(model.config, "attention_dropout", 0.1),
            "on a CPU attention may have no dropout",
        ),
        (
            lambda model: model.model.layers[0].mlp.register_forward_hook(lambda *_: None),
            "a hook on LlamaMLP",
        ),
        (
            lambda model: setattr(model.model, "norm", torch.nn.LayerNorm(16)),
            "LayerNorm in place of a norm, an attention or an MLP",
        ),
    ],
)
def test_what_they_cannot_replace_has_a_reason(change, reason):
    model = tiny()
    assert why_not_fused(model) is None
    change(model)
    assert why_not_fused(model) == reason


@pytest.fixture
def fresh():
    """What was built, loaded and checked is forgotten before and after."""
    caches = cpu.library, check.agrees
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_without_a_compiler_torch_does_the_work(fresh, monkeypatch):
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    model = tiny()
    assert why_not_fused(model) == "there is no C compiler, or it could not build the kernels"
    with chosen_kernels(model, parse_config({}).optimizer):
        assert "forward" not in vars(model.model.layers[0])


@native
@pytest.mark.parametrize("name", ["add_norm_back", "open_gate", "attention_back"])
def test_wrong_numbers_are_noticed(name, fresh, monkeypatch):
    leave_out(name, lambda *_: None, monkeypatch)
    assert not check.agrees(4, 2, 4, 16, 24)
    assert torch.get_deterministic_debug_mode() == 0


@native
def test_a_checked_kernel_writes_where_no_number_is(fresh, monkeypatch):
    """Memory used before may hold the right numbers: one left out would go unnoticed."""
    seen = []

    def look(gate, up, out, *_):
        seen.append(ctypes.c_float.from_address(out).value)

    leave_out("open_gate", look, monkeypatch)
    assert not check.agrees(4, 2, 4, 16, 24)
    assert seen and all(map(math.isnan, seen))


def leave_out(name, instead, monkeypatch):
    """Another function in the place of a kernel."""
    right = cpu.library()

    class Wrong:
        def __getattr__(self, other):
            return instead if other == name else getattr(right, other)

    for module in (cpu, cpu_attention):
        monkeypatch.setattr(module, "library", Wrong)
