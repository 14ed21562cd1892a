"""The head: phi against loops and its bounds, the kernel in slices of the vocabulary, coupling
tables, KL, own part.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoise.ledger.calculus.head_change import HeadResponse, HeadState, head_change
from counterpoise.ledger.calculus.head_change import kl as small_kl
from counterpoise.ledger.calculus.head_kernel import coupling_table, head_kernel
from counterpoise.ledger.measures.changes import cancellation
from counterpoise.maths.head import Head
from counterpoise.policy import measure
from counterpoise.policy.backbone import backbone
from helpers.reference_ledger import clean_gpt2, kl, phi, token_gradients
from helpers.tiny_models import tiny

PROMPTS = [[1, 2], [3, 4, 5]]
IDS_NT = torch.tensor([[6, 7, 8], [6, 9, 0]])
MASK_NT = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
SIZES = st.tuples(
    st.integers(2, 9),
    st.integers(2, 7),
    st.integers(1, 4),
    st.integers(0, 2**31),
    st.floats(0.0, 8.0),
)


def case(sizes):
    vocab, num, width, seed, spread = sizes
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num, width, dtype=torch.float64, generator=generator)
    weight = spread * torch.randn(vocab, width, dtype=torch.float64, generator=generator)
    return hidden, weight, torch.randint(0, vocab, (num,), generator=generator)


@settings(max_examples=60)
@given(SIZES, st.integers(1, 9))
def test_phi_equals_the_loops_in_any_slicing(sizes, chunk):
    hidden, weight, target = case(sizes)
    kernel = head_kernel(hidden, weight, target, chunk=chunk)
    pi = (hidden @ weight.T).softmax(-1).tolist()
    for j, k in itertools.product(range(len(target)), repeat=2):
        expected = phi(pi[j], pi[k], int(target[j]), int(target[k]))
        assert float(kernel.phi_MM[j, k]) == pytest.approx(expected, abs=1e-12)
        assert float(kernel.kernel_MM[j, k]) == pytest.approx(
            expected * float(hidden[j] @ hidden[k]), abs=1e-10
        )
    assert kernel.confidence_M.tolist() == pytest.approx(
        [pi[j][target[j]] for j in range(len(target))]
    )


@settings(max_examples=100)
@given(SIZES)
def test_phi_bounds(sizes):
    """Identical tokens: phi >= (1 - p_j)(1 - p_k) >= 0. All: |phi| <= 2 (1 - p_j)(1 - p_k)."""
    hidden, weight, target = case(sizes)
    kernel = head_kernel(hidden, weight, target)
    room_MM = (1 - kernel.confidence_M)[:, None] * (1 - kernel.confidence_M)
    is_same_MM = target[:, None] == target
    assert (kernel.phi_MM - room_MM)[is_same_MM].min() >= -1e-12
    assert (kernel.phi_MM.abs() - 2 * room_MM).max() <= 1e-12


def test_phi_by_hand():
    """pi_j = (1/2, 1/4, 1/4), pi_k = (1/4, 1/2, 1/4), overlap 1/8 + 1/8 + 1/16 = 5/16.

    Both tokens 0: 1 - 1/2 - 1/4 + 5/16 = 9/16. Token 0 and token 1: 0 - pi_j(1) - pi_k(0) + 5/16 =
    -1/4 - 1/4 + 5/16 = -3/16."""
    hidden = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]], dtype=torch.float64).log()
    weight = torch.eye(3, dtype=torch.float64)
    assert float(head_kernel(hidden, weight, torch.tensor([0, 0])).phi_MM[0, 1]) == pytest.approx(
        9 / 16
    )
    assert float(head_kernel(hidden, weight, torch.tensor([0, 1])).phi_MM[0, 1]) == pytest.approx(
        -3 / 16
    )


def test_kernel_is_the_inner_product_of_head_gradients():
    model = clean_gpt2(tied=False)
    gradient = token_gradients(model, PROMPTS, IDS_NT, MASK_NT, ["lm_head.weight"])
    hidden = measure(model, PROMPTS, IDS_NT, MASK_NT, {"hidden_NTD"})["hidden_NTD"][MASK_NT]
    kernel_MM = head_kernel(
        hidden, model.lm_head.weight.detach(), IDS_NT[MASK_NT], chunk=4
    ).kernel_MM
    flat = torch.stack([gradient[n, t] for n, t in MASK_NT.nonzero().tolist()])
    torch.testing.assert_close(kernel_MM, flat @ flat.T, rtol=1e-9, atol=1e-12)


def test_head_cancellation_by_loops():
    hidden, weight, target = case((6, 5, 3, 1, 1.0))
    kernel, weight_M = (
        head_kernel(hidden, weight, target),
        torch.tensor([1.0, -2.0, 0.5, 0.0, -0.25], dtype=torch.float64),
    )
    found = cancellation((kernel.kernel_MM * weight_M).unbind(1))
    for j in range(5):
        pulls = [float(weight_M[k] * kernel.kernel_MM[j, k]) for k in range(5)]
        assert float(found[j]) == pytest.approx(1 - abs(sum(pulls)) / sum(map(abs, pulls)))
    nothing = cancellation((kernel.kernel_MM * torch.zeros(5).double()).unbind(1))
    assert nothing.tolist() == [0.0] * 5


def test_coupling_table_by_loops():
    hidden, weight, _ = case((6, 12, 3, 3, 3.0))
    target = (hidden @ weight.T).argmax(-1)  # likely tokens: some of them confident
    kernel = head_kernel(hidden, weight, target)
    prompt, sign = torch.arange(12) // 4, torch.tensor([1, -1, 1] * 4)
    table = coupling_table(kernel, target, prompt, sign)
    expected: dict[tuple, list[tuple[float, float]]] = {}
    for j, k in itertools.combinations(range(12), 2):
        confident = sum(float(kernel.confidence_M[i]) >= 0.9 for i in (j, k))
        key = (
            "identical" if target[j] == target[k] else "different",
            ("none", "one", "both")[confident],
            "same" if prompt[j] == prompt[k] else "different",
            "same" if sign[j] == sign[k] else "different",
        )
        expected.setdefault(key, []).append(
            (float(kernel.phi_MM[j, k]), float(kernel.kernel_MM[j, k]))
        )
    total = sum(abs(value) for pairs in expected.values() for _, value in pairs)
    assert {
        tuple(row[name] for name in ("token", "confidence", "prompt", "sign")) for row in table
    } == set(expected)
    assert {row["confidence"] for row in table} >= {"none", "one"}
    for row in table:
        pairs = expected[tuple(row[name] for name in ("token", "confidence", "prompt", "sign"))]
        assert row["pairs"] == len(pairs)
        assert row["mean_phi"] == pytest.approx(sum(p for p, _ in pairs) / len(pairs))
        assert row["mean_abs_kernel"] == pytest.approx(sum(abs(v) for _, v in pairs) / len(pairs))
        assert row["abs_frac"] == pytest.approx(sum(abs(v) for _, v in pairs) / total)


@pytest.mark.parametrize("chunk", [1, 2, None])
def test_head_change_equals_loops(chunk):
    hidden, weight, target = case((5, 4, 3, 5, 1.0))
    moved, other = hidden + 0.1, weight * 1.2
    temperature = 0.5
    found = head_change(
        HeadState(hidden, Head(weight)),
        HeadState(moved, Head(other)),
        target,
        temperature=temperature,
        chunk=chunk,
    )
    before = ((hidden @ weight.T) / temperature).softmax(-1).tolist()
    after = ((moved @ other.T) / temperature).softmax(-1).tolist()
    for m in range(4):
        assert float(found.logp_before_M[m]) == pytest.approx(math.log(before[m][target[m]]))
        assert float(found.logp_after_M[m]) == pytest.approx(math.log(after[m][target[m]]))
        assert float(found.entropy_M[m]) == pytest.approx(-sum(p * math.log(p) for p in before[m]))
        assert found.kl_M is not None
        assert float(found.kl_M[m]) == pytest.approx(kl(after[m], before[m]))
    assert found.own_head_M is None


@pytest.mark.parametrize(
    "name", ["gpt2", "gemma2", "cohere", "phi"]
)  # plain, softcap, logit scale, bias
def test_own_part_equals_the_head_gradient(name):
    """<g_j, P g_j> over the head's weight and bias, P a number (SGD) and a tensor (AdamW), against
    autograd.
    """
    model = tiny(name, dtype=torch.float64, tie_word_embeddings=False)
    head = backbone(model).head
    names = [
        key
        for key, p in model.named_parameters()
        if any(p is q for q in (head.weight_VD, head.bias_V))
    ]
    hidden = measure(model, PROMPTS, IDS_NT, MASK_NT, {"hidden_NTD"})["hidden_NTD"][MASK_NT]
    gradient = token_gradients(model, PROMPTS, IDS_NT, MASK_NT, names)
    state = HeadState(
        hidden, Head(*(x.detach() if isinstance(x, torch.Tensor) else x for x in head))
    )
    torch.manual_seed(2)
    weight_P, bias_P = (
        torch.rand_like(state.head.weight_VD),
        torch.rand(len(state.head.weight_VD), dtype=torch.float64),
    )
    numbers = head_change(
        state, state, IDS_NT[MASK_NT], response=HeadResponse(0.3, 0.7), chunk=2
    ).own_head_M
    tensors = head_change(
        state, state, IDS_NT[MASK_NT], response=HeadResponse(weight_P, bias_P), chunk=2
    ).own_head_M
    assert numbers is not None
    assert tensors is not None
    for m, (n, t) in enumerate(MASK_NT.nonzero().tolist()):
        weight_g, bias_g = gradient[n, t][: weight_P.numel()], gradient[n, t][weight_P.numel() :]
        assert float(numbers[m]) == pytest.approx(
            float(0.3 * weight_g @ weight_g + 0.7 * bias_g @ bias_g), rel=1e-5
        )
        expected = (weight_P.flatten() * weight_g.square()).sum() + (
            bias_P[: len(bias_g)] * bias_g.square()
        ).sum()
        assert float(tensors[m]) == pytest.approx(float(expected), rel=1e-5)


def test_own_part_is_phi_times_the_hidden_norm_under_sgd():
    hidden, weight, target = case((7, 5, 3, 9, 1.0))
    kernel = head_kernel(hidden, weight, target)
    state = HeadState(hidden, Head(weight))
    own = head_change(state, state, target, response=HeadResponse(0.25)).own_head_M
    assert own is not None
    torch.testing.assert_close(
        own, 0.25 * kernel.phi_MM.diagonal() * hidden.square().sum(-1), rtol=1e-12, atol=1e-15
    )


@pytest.mark.parametrize("size", [1e-5, 1e-3, 1.0])
def test_kl_of_a_small_step_is_no_rounding_noise(size: float) -> None:
    """In float32 over a large vocabulary: at least 0 everywhere, and what the definition gives in
    float64.
    """
    generator = torch.Generator().manual_seed(0)
    before_MV = 3 * torch.randn(8, 50_000, generator=generator, dtype=torch.float64)
    after_MV = before_MV + size * torch.randn(8, 50_000, generator=generator, dtype=torch.float64)
    exact_M = torch.tensor(
        [
            kl(after, before)
            for after, before in zip(after_MV.softmax(-1).tolist(), before_MV.softmax(-1).tolist())
        ]
    )
    found_M = small_kl(after_MV.float().log_softmax(-1), before_MV.float().log_softmax(-1))
    assert bool((found_M >= 0).all())
    torch.testing.assert_close(
        found_M.double(), exact_M.double(), rtol=0.05 if size < 1e-4 else 1e-3, atol=0.0
    )


def test_kl_where_a_token_vanishes_is_finite() -> None:
    before_MV, after_MV = (torch.tensor([[0.0, x]]).log_softmax(-1) for x in (0.0, -200.0))
    assert small_kl(after_MV, before_MV).tolist() == pytest.approx([math.log(2)])
