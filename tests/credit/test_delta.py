"""DelTA: twins, numbers by hand, reductions, invariances, ablation variants."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoise.credit import proxies
from counterpoise.credit.delta import delta, delta_weight
from counterpoise.types import TokenBatch
from helpers import reference_delta as reference
from helpers.delta_cases import KEPT, PROXIES, VARIANTS, VOCAB, example, ragged, twin, with_columns
from helpers.strategies import ragged_batches


@pytest.mark.parametrize("proxy", PROXIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_twin(proxy, variant):
    """The twin takes v as dense vectors and Delta as a difference of distances: the affine form
    equals it.
    """
    for seed in range(3):
        batch, credit_NT = example(seed)
        expected_NT = twin(credit_NT, batch, proxy=proxy, **VARIANTS[variant])
        torch.testing.assert_close(
            delta_weight(credit_NT, batch, proxy=proxy, **VARIANTS[variant]),
            expected_NT,
            rtol=1e-11,
            atol=1e-12,
        )
        torch.testing.assert_close(
            delta(credit_NT, batch, proxy=proxy, **VARIANTS[variant]),
            credit_NT * expected_NT,
            rtol=1e-11,
            atol=1e-12,
        )


@pytest.mark.parametrize("proxy", PROXIES)
@given(batch=ragged_batches(), seed=st.integers(0, 5))
@settings(max_examples=25)
def test_twin_on_ragged_batches(proxy, batch, seed):
    batch = with_columns(batch, seed)
    credit_NT = (batch.reward_N - batch.reward_N.mean())[:, None] * batch.mask_NT
    weight_NT = delta_weight(credit_NT, batch, proxy=proxy)
    torch.testing.assert_close(
        weight_NT, twin(credit_NT, batch, proxy=proxy), rtol=1e-9, atol=1e-10
    )
    assert (weight_NT[batch.mask_NT].mean() - 1).abs() < 1e-12
    assert (weight_NT[~batch.mask_NT] == 0).all()


def test_topk_and_temperature_parameters():
    batch, credit_NT = example()
    for params in ({"proxy": "topk", "topk": 2}, {"proxy": "head", "temperature": 0.7}):
        torch.testing.assert_close(
            delta_weight(credit_NT, batch, **params),
            twin(credit_NT, batch, **params),
            rtol=1e-11,
            atol=1e-12,
        )
    whole = delta_weight(credit_NT, batch, proxy="topk", topk=KEPT)
    assert torch.equal(whole, delta_weight(credit_NT, batch, proxy="topk"))
    assert not torch.allclose(whole, delta_weight(credit_NT, batch, proxy="topk", topk=2))


def test_topk_with_the_whole_vocabulary_ranks_like_the_gradient_of_the_hidden_state():
    """With all V candidates v = W_y - sum p_j W_j is the gradient of log p(y) by h, taken here by
    autograd.
    """
    batch, credit_NT = example()
    hidden_NTD = batch.hidden_NTD.clone().requires_grad_()
    logp_NTV = torch.log_softmax(hidden_NTD @ batch.head_VD.T, -1)
    logp_NTV.gather(-1, batch.token_ids_NT[..., None]).sum().backward()
    best = logp_NTV.detach().topk(VOCAB)
    # the row proxy with p = 0 has v = h: put the gradient there
    as_row = batch.replace(
        hidden_NTD=hidden_NTD.grad, sampler_logp_NT=torch.full_like(batch.sampler_logp_NT, -1e9)
    )
    as_topk = batch.replace(topk_ids_NTK=best.indices, topk_logp_NTK=best.values)
    torch.testing.assert_close(
        delta_weight(credit_NT, as_topk, proxy="topk"),
        delta_weight(credit_NT, as_row),
        rtol=1e-11,
        atol=1e-12,
    )


def test_head_is_the_gradient_of_the_head():
    """v of every token by autograd on W, put into the row proxy as its hidden state."""
    batch, credit_NT = example()
    rows = []
    for i in range(batch.num_rollouts):
        for t in range(batch.mask_NT.shape[1]):
            head_VD = batch.head_VD.clone().requires_grad_()
            torch.log_softmax(head_VD @ batch.hidden_NTD[i, t], 0)[
                batch.token_ids_NT[i, t]
            ].backward()
            rows.append(head_VD.grad.flatten())
    as_row = batch.replace(
        hidden_NTD=torch.stack(rows).view(*batch.mask_NT.shape, -1),
        sampler_logp_NT=torch.full_like(batch.sampler_logp_NT, -1e9),
    )
    for variant in ({}, {"score": "within_side"}, {"refinements": 3}):
        actual_NT = delta_weight(credit_NT, batch, proxy="head", **variant)
        torch.testing.assert_close(
            actual_NT, delta_weight(credit_NT, as_row, **variant), rtol=1e-11, atol=1e-12
        )


def test_by_hand():
    """One dimension, p = 1/2, so v = h/2. Positive rollout, credit 1: v = 3, 1.

    Negative, credit -2: v = -1, 1. One token of credit 0.

    mu+ = (3 + 1)/2 = 2, mu- = (2(-1) + 2(1))/4 = 0, mu+ - mu- = 2, |mu-|^2 - |mu+|^2 = -4.
    Delta = 4 v - 4 on the positive side: 8, 0. On the negative side -(4 v - 4): 8, 0.
    Both sides: mean 4, variance 16, gamma = 4; Delta/gamma = 2, 0; alpha = s(2) = 0.880797, 0.5.
    Refined: mu+ = (0.880797 * 3 + 0.5 * 1)/1.380797 = 2.275781, mu- = (0.880797 (-1) +
        0.5)/1.380797 = -0.275781 (the 2s cancel).
    mu+ - mu- = 2.551561, |mu-|^2 - |mu+|^2 = 0.076055 - 5.179177 = -5.103122.
    Delta = 5.103122 v - 5.103122: 10.206245, 0 on the positive side; 10.206245, 0 on the negative.
    gamma stays 4. alpha = s(2.551561) = 0.927678, 0.5. Weight 0.8 + 0.4 alpha = 1.171071, 1.0; the
    token of credit 0: 0.8. Sum of five: 5.142143. Times 5/5.142143 = 0.972357: 1.138700, 0.972357,
    0.777886."""
    batch = TokenBatch.from_lists(
        [[1, 2], [3, 2], [4]],
        group=[0, 0, 1],
        reward=[1.0, 0.0, 1.0],
        sampler_logp=[[math.log(0.5)] * 2, [math.log(0.5)] * 2, [math.log(0.5)]],
        hidden_NTD=torch.tensor(
            [[[6.0], [2.0]], [[-2.0], [2.0]], [[9.0], [0.0]]], dtype=torch.float64
        ),
        dtype=torch.float64,
    )
    credit_NT = torch.tensor([[1.0, 1.0], [-2.0, -2.0], [0.0, 0.0]], dtype=torch.float64)
    weight_NT = torch.tensor(
        [[1.138700, 0.972357], [1.138700, 0.972357], [0.777886, 0.0]], dtype=torch.float64
    )
    torch.testing.assert_close(delta_weight(credit_NT, batch), weight_NT, rtol=0, atol=1e-6)
    torch.testing.assert_close(delta(credit_NT, batch), credit_NT * weight_NT, rtol=0, atol=2e-6)
    # without refinement: 0.8 + 0.4 * 0.880797 = 1.152319 and 1.0, over the four credited tokens:
    # mean 1.076159
    plain_NT = delta_weight(credit_NT, batch, refinements=0, count_zero=False)
    torch.testing.assert_close(
        plain_NT[0],
        torch.tensor([1.152319, 1.0], dtype=torch.float64) / 1.0761594,
        rtol=0,
        atol=1e-6,
    )


def test_one_refinement_keeps_the_first_temperature():
    """gamma comes from the Delta before: with K = 1 it is that of the first round, with K = 2 that
    of the second.
    """
    batch, credit_NT = example()
    rows, v = ragged(credit_NT, batch), reference.vectors(batch, "row")
    scales = reference.margins(rows, v, refinements=3)[1]
    assert scales[0] == scales[1]
    assert scales[1] != scales[2] != scales[3]
    report = delta.report(credit_NT, delta(credit_NT, batch), batch)
    assert math.isclose(report["gamma_positive"], scales[1][1], rel_tol=1e-12)
    assert math.isclose(report["gamma_negative"], scales[1][-1], rel_tol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("proxy", PROXIES)
def test_equal_bounds_of_one_are_uniform_bit_for_bit(proxy, dtype):
    batch, credit_NT = example(dtype=dtype)
    for params in (
        {},
        {"refinements": 0},
        {"hard": True},
        {"normalise": False},
        {"count_zero": False},
    ):
        assert torch.equal(
            delta(credit_NT, batch, proxy=proxy, low=1.0, high=1.0, **params), credit_NT
        )


@pytest.mark.parametrize("proxy", PROXIES)
def test_empty_side_gives_ones(proxy):
    batch, credit_NT = example()
    for one_sided_NT in (
        credit_NT.clamp(min=0),
        credit_NT.clamp(max=0),
        torch.zeros_like(credit_NT),
    ):
        for params in ({}, {"score": "within_side"}, {"normalise": False}, {"select": "top"}):
            assert torch.equal(
                delta_weight(one_sided_NT, batch, proxy=proxy, **params),
                batch.mask_NT.to(torch.float64),
            )
            assert torch.equal(delta(one_sided_NT, batch, proxy=proxy, **params), one_sided_NT)


def test_mean_weight_is_one_over_counted_tokens():
    batch, credit_NT = example()
    every, credited = batch.mask_NT, credit_NT != 0
    for name, params in VARIANTS.items():
        weight_NT = delta_weight(credit_NT, batch, **params)
        counted = credited if not params.get("count_zero", True) else every
        if params.get("normalise", True):
            assert abs(weight_NT[counted].mean().item() - 1) < 1e-14, name
    low, high = delta_weight(credit_NT, batch, normalise=False)[credited].aminmax()
    assert 0.8 < low < high < 1.2
    # zero-advantage tokens sit at the bottom of the range and lift the others
    assert delta_weight(credit_NT, batch)[credited].mean() > 1 + 1e-3
    assert (delta_weight(credit_NT, batch, normalise=False)[every & ~credited] == 0.8).all()


def test_tokens_the_sides_share_weigh_less_than_tokens_of_one_side():
    """Ten copies of a shared direction and one of its own on each side: the shared one gets the
    smaller weight.
    """
    hidden_NTD = torch.zeros(2, 11, 2, dtype=torch.float64)
    hidden_NTD[:, :10, 0] = 1.0
    hidden_NTD[0, 10, 1], hidden_NTD[1, 10, 1] = 1.0, -1.0
    batch = TokenBatch.from_lists(
        [[0] * 10 + [1], [0] * 10 + [2]],
        group=[0, 0],
        reward=[1.0, 0.0],
        sampler_logp=[[-1.0] * 11] * 2,
        hidden_NTD=hidden_NTD,
        dtype=torch.float64,
    )
    credit_NT = torch.tensor([[1.0], [-1.0]], dtype=torch.float64) * batch.mask_NT
    weight_NT = delta_weight(credit_NT, batch)
    assert (weight_NT[:, 10] > 1.1).all()
    assert (weight_NT[:, :10] < 1).all()
    # closeness to the own centroid alone prefers the frequent direction
    within_NT = delta_weight(credit_NT, batch, score="within_side")
    assert (within_NT[:, 10] < within_NT[:, 0]).all()
    kept_NT = delta_weight(credit_NT, batch, select="top", select_frac=0.05)
    assert torch.equal(kept_NT, torch.zeros_like(kept_NT).index_fill(1, torch.tensor([10]), 11.0))


def test_equal_centroids_give_ones():
    """Nothing tells the sides apart: Delta is 0 everywhere, gamma sits at its floor, hard alphas
    are all 0.
    """
    batch, credit_NT = example()
    same = batch.replace(
        hidden_NTD=torch.ones_like(batch.hidden_NTD),
        sampler_logp_NT=torch.full_like(batch.sampler_logp_NT, -1.0),
    )
    credited = credit_NT != 0
    weight_NT = delta_weight(credit_NT, same, count_zero=False)
    torch.testing.assert_close(weight_NT[credited], torch.ones_like(weight_NT[credited]))
    assert torch.equal(
        delta_weight(credit_NT, same, hard=True, low=0.0, high=1.0), same.mask_NT.double()
    )
    assert delta.report(credit_NT, credit_NT, same)["gamma_positive"] == pytest.approx(1e-4)


@pytest.mark.parametrize("score", [{"score": "random"}, {"select": "random"}])
def test_random_variants(score):
    batch, credit_NT = example(lengths=(400, 300, 500, 350, 100, 400, 250, 300))
    drawn = [
        delta_weight(
            credit_NT, batch, generator=torch.Generator().manual_seed(s), normalise=False, **score
        )
        for s in (0, 0, 1)
    ]
    credited = credit_NT != 0
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    if "select" in score:
        assert abs(drawn[0][credited].mean().item() - 0.5) < 1e-3
        assert set(drawn[0][credited].tolist()) == {0.0, 1.0}
    else:
        assert 0.8 <= drawn[0][credited].min() < 0.81
        assert 1.19 < drawn[0][credited].max() <= 1.2
        assert abs(drawn[0][credited].mean().item() - 1.0) < 0.01
    normalised = delta_weight(credit_NT, batch, generator=torch.Generator().manual_seed(0), **score)
    assert abs(normalised[batch.mask_NT].mean().item() - 1) < 1e-14
    bare = TokenBatch(
        batch.token_ids_NT, batch.mask_NT, batch.group_N, batch.reward_N, batch.sampler_logp_NT
    )
    assert torch.equal(
        delta_weight(credit_NT, bare, generator=torch.Generator().manual_seed(0), **score),
        normalised,
    )


@pytest.mark.parametrize("variant", [*VARIANTS, "random", "select_random"])
@pytest.mark.parametrize("proxy", PROXIES)
def test_padding_and_permutation(proxy, variant):
    params = {"random": {"score": "random"}, "select_random": {"select": "random"}}.get(
        variant, {"proxy": proxy, **VARIANTS.get(variant, {})}
    )
    batch, credit_NT = example()

    def weight(credit_NT, batch):
        return delta_weight(credit_NT, batch, generator=torch.Generator().manual_seed(3), **params)

    expected_NT = weight(credit_NT, batch)
    noise = float("nan")  # what stands on padding is never read
    wider = TokenBatch(
        token_ids_NT=torch.nn.functional.pad(batch.token_ids_NT, (0, 3), value=VOCAB + 50),
        mask_NT=torch.nn.functional.pad(batch.mask_NT, (0, 3)),
        group_N=batch.group_N,
        reward_N=batch.reward_N,
        sampler_logp_NT=torch.nn.functional.pad(batch.sampler_logp_NT, (0, 3), value=noise),
        hidden_NTD=torch.nn.functional.pad(batch.hidden_NTD, (0, 0, 0, 3), value=noise),
        topk_ids_NTK=torch.nn.functional.pad(batch.topk_ids_NTK, (0, 0, 0, 3), value=VOCAB + 50),
        topk_logp_NTK=torch.nn.functional.pad(batch.topk_logp_NTK, (0, 0, 0, 3), value=noise),
        head_VD=batch.head_VD,
    )
    torch.testing.assert_close(
        weight(torch.nn.functional.pad(credit_NT, (0, 3)), wider),
        torch.nn.functional.pad(expected_NT, (0, 3)),
        rtol=1e-13,
        atol=1e-13,
    )
    order = torch.randperm(len(credit_NT), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        weight(credit_NT[order], batch.select(order)), expected_NT[order], rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("proxy", PROXIES)
def test_chunks_and_strides_change_nothing(proxy, monkeypatch):
    batch, credit_NT = example()
    expected = [
        delta_weight(credit_NT, batch, proxy=proxy, **params) for params in VARIANTS.values()
    ]
    monkeypatch.setattr(proxies, "CHUNK_NUMBERS", 7)
    monkeypatch.setattr(proxies, "CHUNK_LOGITS", 13)
    strided = batch.replace(
        **{
            name: getattr(batch, name).transpose(0, 1).contiguous().transpose(0, 1)
            for name in ("hidden_NTD", "topk_ids_NTK", "topk_logp_NTK")
        }
    )
    for params, whole_NT in zip(VARIANTS.values(), expected):
        torch.testing.assert_close(
            delta_weight(credit_NT, strided, proxy=proxy, **params),
            whole_NT,
            rtol=1e-12,
            atol=1e-13,
        )


@pytest.mark.parametrize("proxy", PROXIES)
def test_float32_is_close_to_float64(proxy):
    lengths = (40, 30, 50, 35, 10, 40, 25, 30)
    batch, credit_NT = example(lengths=lengths)
    narrow, narrow_NT = example(lengths=lengths, dtype=torch.float32)
    assert torch.equal(narrow.token_ids_NT, batch.token_ids_NT)
    weight_NT = delta_weight(narrow_NT, narrow, proxy=proxy)
    assert weight_NT.dtype == torch.float32
    torch.testing.assert_close(
        weight_NT.double(), delta_weight(credit_NT, batch, proxy=proxy), rtol=0, atol=2e-6
    )
    # hidden states and the head may come in bfloat16; sums stay in float32 or wider
    half = narrow.replace(
        hidden_NTD=narrow.hidden_NTD.bfloat16(), head_VD=narrow.head_VD.bfloat16()
    )
    rounded = narrow.replace(hidden_NTD=half.hidden_NTD.float(), head_VD=half.head_VD.float())
    assert torch.equal(
        delta_weight(narrow_NT, half, proxy=proxy), delta_weight(narrow_NT, rounded, proxy=proxy)
    )


def test_inputs_are_left_alone_and_nothing_carries_a_gradient():
    batch, credit_NT = example()
    batch = batch.replace(
        hidden_NTD=batch.hidden_NTD.clone().requires_grad_(),
        head_VD=batch.head_VD.clone().requires_grad_(),
    )
    before = [
        credit_NT.clone(),
        batch.hidden_NTD.detach().clone(),
        batch.head_VD.detach().clone(),
        batch.topk_logp_NTK.clone(),
    ]
    for proxy in PROXIES:
        assert not delta(credit_NT, batch, proxy=proxy).requires_grad
    after = [credit_NT, batch.hidden_NTD.detach(), batch.head_VD.detach(), batch.topk_logp_NTK]
    assert all(torch.equal(a, b) for a, b in zip(before, after))


def test_tokens_another_rule_silenced_are_on_no_side():
    """A token whose credit is 0 does not pull its rollout's centroid."""
    batch, credit_NT = example()
    silenced_NT = credit_NT.clone()
    silenced_NT[0, 1:] = 0
    loud = batch.hidden_NTD.clone()
    loud[0, 1:] = 1e6
    assert torch.equal(
        delta_weight(silenced_NT, batch), delta_weight(silenced_NT, batch.replace(hidden_NTD=loud))
    )


@pytest.mark.parametrize("proxy", PROXIES)
def test_weights_do_not_depend_on_the_scale_or_the_sign_of_the_credit(proxy):
    """Centroids are means, and the two sides are treated alike."""
    batch, credit_NT = example()
    expected_NT = delta_weight(credit_NT, batch, proxy=proxy)
    for factor in (3.0, -1.0):
        torch.testing.assert_close(
            delta_weight(factor * credit_NT, batch, proxy=proxy),
            expected_NT,
            rtol=1e-12,
            atol=1e-13,
        )


@pytest.mark.parametrize("proxy", PROXIES)
def test_mixed_dtypes_are_computed_in_the_widest(proxy):
    batch, credit_NT = example()
    narrow, narrow_NT = example(dtype=torch.float32)
    expected_NT = delta_weight(credit_NT, batch, proxy=proxy)
    from_narrow_credit_NT = delta_weight(narrow_NT, batch, proxy=proxy)
    assert from_narrow_credit_NT.dtype == torch.float32
    torch.testing.assert_close(from_narrow_credit_NT, expected_NT.float(), rtol=1e-6, atol=0)
    from_narrow_columns_NT = delta_weight(credit_NT, narrow, proxy=proxy)
    assert from_narrow_columns_NT.dtype == torch.float64
    torch.testing.assert_close(from_narrow_columns_NT, expected_NT, rtol=2e-6, atol=0)
