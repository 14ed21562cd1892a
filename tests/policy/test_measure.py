"""Scoring: columns of a no-grad pass, differentiable log-probs, their gradients and forward-mode
derivatives.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import LlamaForCausalLM

from counterpoise.maths.head import Head, head_logits, head_logp, head_scores
from counterpoise.policy import MEASURED, length_buckets, logp_function, measure, token_logp
from counterpoise.policy.backbone import backbone
from helpers.tiny_models import row_logits, row_logp_entropy, tiny

PROMPTS = [[3, 4, 5, 6], [8], [8], [11, 12, 13]]
RESPONSES = [[7, 9], [1, 20, 21, 22, 2], [28, 2], [14]]
TOKENS_NT = torch.tensor([row + [0] * (5 - len(row)) for row in RESPONSES])
MASK_NT = torch.tensor([[t < len(row) for t in range(5)] for row in RESPONSES])
ROWS = (PROMPTS, TOKENS_NT, MASK_NT)
CLOSE = {"atol": 1e-6, "rtol": 0}


class ScaledLlama(LlamaForCausalLM):
    """Logits that no config field explains."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 0.5
        return out


class LargestLogits(TorchDispatchMode):
    """Rows of the largest tensor seen whose last axis is the vocabulary (the head's own weight,
    [D=16, V] when transposed, aside).
    """

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_flatten(out)[0]:
            if (
                isinstance(x, torch.Tensor)
                and x.dim()
                and x.shape[-1] == self.vocabulary
                and x.shape[0] != 16
            ):
                self.rows = max(self.rows, x.numel() // self.vocabulary)
        return out


def naive(model, temperature):
    """(logp_NT, entropy_NT) by one unpadded forward a row, with a graph."""
    logp_NT, entropy_NT = (
        torch.zeros(4, 5, dtype=torch.float64),
        torch.zeros(4, 5, dtype=torch.float64),
    )
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
        logp, entropy = row_logp_entropy(model, prompt, response, temperature)
        logp_NT[row, : len(response)], entropy_NT[row, : len(response)] = logp, entropy
    return logp_NT, entropy_NT


def naive_kl(model, ref, temperature):
    """KL(model || ref) token by token and entry by entry of the vocabulary."""
    kl_NT = torch.zeros(4, 5, dtype=torch.float64)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
        pair = zip(row_logits(model, prompt, response), row_logits(ref, prompt, response))
        for t, both in enumerate(pair):
            p, q = (torch.softmax(logits_V / temperature, -1).tolist() for logits_V in both)
            kl_NT[row, t] = sum(a * math.log(a / b) for a, b in zip(p, q))
    return kl_NT


def grads(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "phi", "gpt2"])
def test_every_column_equals_a_plain_loop_on_full_logits(name):
    model, ref = tiny(name, dtype=torch.float64), tiny(name, seed=1, dtype=torch.float64)
    assert backbone(model).head is not None
    out = measure(
        model, *ROWS, MEASURED, temperature=0.7, topk=3, ref_model=ref, token_budget=12, chunk=2
    )
    assert set(out) == MEASURED
    logp_NT, entropy_NT = naive(model, 0.7)
    torch.testing.assert_close(out["trainer_logp_NT"], logp_NT, **CLOSE)
    torch.testing.assert_close(out["entropy_NT"], entropy_NT, **CLOSE)
    torch.testing.assert_close(out["ref_logp_NT"], naive(ref, 0.7)[0], **CLOSE)
    torch.testing.assert_close(out["ref_kl_NT"], naive_kl(model, ref, 0.7), **CLOSE)
    assert out["ref_kl_NT"][MASK_NT].min() > 1e-3
    assert out["head_VD"].data_ptr() == model.get_output_embeddings().weight.data_ptr()
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
        hidden = model.get_decoder()(torch.tensor([prompt + response])).last_hidden_state[
            0, len(prompt) - 1 : -1
        ]
        torch.testing.assert_close(out["hidden_NTD"][row, : len(response)], hidden, **CLOSE)
        for t, logits_V in enumerate(row_logits(model, prompt, response)):
            best = sorted(
                enumerate(torch.log_softmax(logits_V / 0.7, -1).tolist()), key=lambda pair: -pair[1]
            )[:3]
            assert out["topk_ids_NTK"][row, t].tolist() == [v for v, _ in best]
            assert out["topk_logp_NTK"][row, t].tolist() == pytest.approx(
                [x for _, x in best], abs=1e-6
            )
    assert all(out[column][~MASK_NT].eq(0).all() for column in MEASURED - {"head_VD"})


def test_chunks_budgets_and_padding_change_nothing():
    model = tiny(dtype=torch.float64)
    needs = {"trainer_logp_NT", "entropy_NT", "topk_logp_NTK"}
    whole = measure(model, *ROWS, needs)
    wider = (
        torch.nn.functional.pad(TOKENS_NT, (0, 4), value=17),
        torch.nn.functional.pad(MASK_NT, (0, 4)),
    )
    for chunk, token_budget in [(1, 16384), (3, 16384), (None, 1), (4, 13)]:
        other = measure(model, *ROWS, needs, chunk=chunk, token_budget=token_budget)
        assert all(torch.allclose(other[name], whole[name], atol=1e-12) for name in needs)
        padded = measure(model, PROMPTS, *wider, needs, chunk=chunk, token_budget=token_budget)
        assert all(torch.allclose(padded[name][:, :5], whole[name], atol=1e-12) for name in needs)
        assert all(padded[name][:, 5:].eq(0).all() for name in needs)


def test_only_what_is_needed_is_measured():
    model = tiny()
    assert set(measure(model, *ROWS, {"entropy_NT"})) == {"entropy_NT"}
    assert measure(model, *ROWS, frozenset()) == {}
    with LargestLogits(29) as seen:
        assert set(measure(model, *ROWS, {"hidden_NTD"})) == {"hidden_NTD"}
    assert seen.rows == 0, "hidden states alone need no head"


def test_measure_runs_without_dropout_and_without_a_graph():
    model = tiny(attention_dropout=0.9)
    expected = measure(model, *ROWS, {"trainer_logp_NT"})["trainer_logp_NT"]
    got = measure(model.train(), *ROWS, {"trainer_logp_NT"})["trainer_logp_NT"]
    assert model.training
    assert torch.equal(got, expected)
    assert not got.requires_grad


@pytest.mark.parametrize("name", ["llama", "tied", "gemma2", "cohere", "phi"])
@pytest.mark.parametrize("fused", [True, False])
def test_gradient_equals_the_naive_gradient(name, fused):
    changes = {"tie_word_embeddings": True} if name == "tied" else {}
    model = tiny("llama" if name == "tied" else name, dtype=torch.float64, **changes)
    atol = (
        1e-10 if name == "phi" else 1e-6
    )  # the norms of the others pass gradients through float32
    coef_NT = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected_NT, _ = naive(model, 0.7)
    expected = grads(model, (coef_NT * expected_NT).sum())
    for chunk in (2, 3):
        logp_NT = token_logp(model, *ROWS, temperature=0.7, chunk=chunk, fused=fused)
        torch.testing.assert_close(logp_NT, expected_NT, **CLOSE)
        got = grads(model, (coef_NT * logp_NT).sum())
        assert all(torch.allclose(got[key], expected[key], atol=atol) for key in expected)


def test_head_gradients_pass_gradcheck():
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(s, generator=generator, dtype=torch.float64) for s in [(5, 3), (7, 3), (7,)]
    )
    target = torch.tensor([0, 6, 3, 3, 1])

    def logp(hidden, weight, bias):
        head = Head(weight, bias, scale=1.5, softcap=3.0)
        return head_logp(hidden, target, head, temperature=0.6, chunk=2)

    assert torch.autograd.gradcheck(logp, tuple(x.requires_grad_() for x in (hidden, weight, bias)))


def test_a_frozen_head_gets_no_gradient():
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(7, 3)
    head_logp(hidden, torch.tensor([0, 1, 2, 3]), Head(weight)).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_logits_are_never_whole_in_memory():
    model = tiny(vocab_size=97)
    assert (
        backbone(model).head is not None
    )  # the check of the head, three tokens, is done before the watch begins
    with LargestLogits(97) as seen:
        token_logp(model, *ROWS, chunk=2).sum().backward()
        measure(model, *ROWS, {"entropy_NT", "topk_ids_NTK"}, chunk=2)
    assert seen.rows == 2


def test_forward_mode_equals_finite_differences_and_the_gradient():
    # LayerNorm, unlike Llama's RMSNorm, works in float64. Never scored before: the check of its
    # head runs inside the jvp
    model = tiny("phi", dtype=torch.float64)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    step = {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in params.items()
    }
    logp_of = logp_function(model, *ROWS, temperature=0.7, chunk=3)
    logp_NT, change_NT = torch.func.jvp(logp_of, (params,), (step,))
    torch.testing.assert_close(logp_NT, naive(model, 0.7)[0], **CLOSE)
    eps = 1e-6
    ahead, behind = (
        logp_of({name: p + sign * eps * step[name] for name, p in params.items()})
        for sign in (1, -1)
    )
    torch.testing.assert_close(
        change_NT, ((ahead - behind) / (2 * eps)).detach(), atol=1e-6, rtol=1e-6
    )
    coef_NT = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    gradient = grads(model, (coef_NT * token_logp(model, *ROWS, temperature=0.7)).sum())
    along = sum((gradient[name] * step[name]).sum() for name in step)
    torch.testing.assert_close((coef_NT * change_NT).sum(), along, atol=1e-8, rtol=1e-8)


def test_forward_mode_along_some_parameters_only():
    model = tiny("phi", dtype=torch.float64)
    name = "model.layers.1.mlp.fc1.weight"
    weight = dict(model.named_parameters())[name].detach()
    _, change_NT = torch.func.jvp(logp_function(model, *ROWS), ({name: weight},), ({name: weight},))
    eps = 1e-6
    logp_of = logp_function(model, *ROWS)
    slope_NT = (logp_of({name: weight * (1 + eps)}) - logp_of({name: weight * (1 - eps)})) / (
        2 * eps
    )
    torch.testing.assert_close(change_NT, slope_NT.detach(), atol=1e-6, rtol=1e-6)
    assert change_NT.abs().max() > 1e-3


def test_a_gap_in_the_mask_is_read_but_not_scored():
    model = tiny(dtype=torch.float64)
    whole_NT = token_logp(model, *ROWS)
    gap_NT = MASK_NT.clone()
    gap_NT[1, 2] = False
    got_NT = token_logp(model, PROMPTS, TOKENS_NT, gap_NT)
    torch.testing.assert_close(got_NT, whole_NT * gap_NT)


@torch.no_grad()
def test_a_head_that_no_config_explains_goes_through_the_models_own_forward():
    torch.manual_seed(0)
    model = ScaledLlama(tiny().config).double().eval()
    assert backbone(model).head is None
    out = measure(model, *ROWS, {"trainer_logp_NT", "entropy_NT"}, temperature=0.7)
    logp_NT, entropy_NT = naive(model, 0.7)
    torch.testing.assert_close(out["trainer_logp_NT"], logp_NT, **CLOSE)
    torch.testing.assert_close(out["entropy_NT"], entropy_NT, **CLOSE)
    torch.testing.assert_close(token_logp(model, *ROWS, temperature=0.7), logp_NT, **CLOSE)
    plain = tiny(seed=1, dtype=torch.float64)
    for one, other in ((model, plain), (plain, model)):
        kl_NT = measure(one, *ROWS, {"ref_kl_NT"}, temperature=0.7, ref_model=other)["ref_kl_NT"]
        torch.testing.assert_close(kl_NT, naive_kl(one, other, 0.7), **CLOSE)
    with pytest.raises(ValueError, match="hidden_NTD is not known for ScaledLlama"):
        measure(model, *ROWS, {"hidden_NTD"})


def test_autocast_scores_in_float32_and_agrees_in_both_directions():
    model = tiny()
    expected_NT = token_logp(model, *ROWS)
    exact = grads(model, expected_NT.sum())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got_NT = token_logp(model, *ROWS)
        measured_NT = measure(model, *ROWS, {"trainer_logp_NT"})["trainer_logp_NT"]
    assert got_NT.dtype == torch.float32
    torch.testing.assert_close(got_NT, expected_NT, atol=0.15, rtol=0)
    torch.testing.assert_close(measured_NT, got_NT.detach(), atol=1e-6, rtol=0)
    rough = grads(model, got_NT.sum())
    for name, value in exact.items():
        assert torch.cosine_similarity(rough[name].flatten(), value.flatten(), 0) > 0.98, name


def test_half_precision_logits_are_not_rounded():
    hidden, weight = torch.full((1, 64), 1.0), torch.full((2, 64), 0.3125)
    weight[1, 0] += (
        2**-9 * 0.3125 * 4
    )  # a difference that bfloat16 weights hold and a bfloat16 logit of 20 would lose
    logits = head_logits(hidden.bfloat16(), Head(weight.bfloat16()))
    assert logits[0].tolist() == [20.0, 20.0 + (weight.bfloat16()[1, 0].item() - 0.3125)]
    assert logits[0, 0] != logits[0, 1]


def test_wide_logits_of_a_half_precision_head_have_a_gradient() -> None:
    """The own parts of the ledger and token importance go back through them under autocast."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, grad = (
        torch.randn(*shape, generator=generator) for shape in ((5, 8), (11, 8), (5, 11))
    )
    leaves = [part.bfloat16().requires_grad_() for part in (hidden, weight)]
    logits = head_logits(leaves[0], Head(leaves[1]), temperature=0.5)
    assert logits.dtype == torch.float32
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    expected = torch.autograd.grad(wide[0] @ wide[1].T / 0.5, wide, grad)
    for one, other in zip(torch.autograd.grad(logits, leaves, grad), expected):
        assert torch.allclose(one.float(), other, rtol=0.02, atol=0.05)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_buckets_hold_every_row_once_within_the_budget(lengths, token_budget):
    batches = length_buckets(lengths, token_budget)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= token_budget


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*ROWS, {"entropy_N"}), "cannot measure 'entropy_N'. Known: entropy_NT"),
        ((PROMPTS[:3], TOKENS_NT, MASK_NT, {"entropy_NT"}), "3 prompts, token_ids_NT"),
        (
            (PROMPTS, TOKENS_NT[:, :4], MASK_NT, {"entropy_NT"}),
            "expected one prompt a row and equal shapes",
        ),
        ((*ROWS, {"ref_logp_NT"}), "ref_logp_NT is needed .* no reference model. Pass ref_model"),
        ((*ROWS, {"ref_kl_NT"}), "ref_kl_NT is needed .* no reference model. Pass ref_model"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, message):
    with pytest.raises(ValueError, match=message):
        measure(tiny(), *arguments)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_half_precision_head_on_cuda_equals_float32_products():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(s, generator=generator).bfloat16().cuda() for s in [(50, 64), (300, 64)]
    )
    target = torch.randint(300, (50,), generator=generator).cuda()
    exact = torch.log_softmax(hidden.double() @ weight.double().T, -1).gather(1, target[:, None])[
        :, 0
    ]
    torch.testing.assert_close(
        head_scores(hidden, target, Head(weight), chunk=7).logp_M.double(), exact, atol=1e-4, rtol=0
    )
    weight.requires_grad_()
    head_logp(hidden, target, Head(weight), chunk=7).sum().backward()
    reference = weight.detach().double().requires_grad_()
    torch.log_softmax(hidden.double() @ reference.T, -1).gather(1, target[:, None]).sum().backward()
    assert (
        torch.cosine_similarity(weight.grad.double().flatten(), reference.grad.flatten(), 0)
        > 0.9999
    )
