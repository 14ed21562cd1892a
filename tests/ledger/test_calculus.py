"""The decomposition engine on a tiny transformer in float64: forward mode, class parts, own and
coupling, optimizers, precision, fallbacks.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from counterpoise.ledger.calculus.decompose import (
    change_along,
    class_gradients,
    decompose,
    forward_mode,
)
from counterpoise.ledger.calculus.logprobs import (
    LogProbs,
    Texts,
    at,
    copy_params,
    of_model,
    trainable,
)
from counterpoise.ledger.calculus.optimizers import response
from counterpoise.ledger.calculus.own import own_one_by_one
from counterpoise.policy import token_logp
from helpers.reference_ledger import clean_gpt2, token_gradients
from helpers.tiny_models import tiny

PROMPTS = [[1, 2], [1, 2], [3, 4, 5], [3, 4, 5]]
IDS_NT = torch.tensor([[6, 7, 8], [6, 9, 0], [2, 2, 7], [2, 4, 1]])
MASK_NT = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1]]).bool()
ADVANTAGE_N = torch.tensor([1.0, -0.5, 0.25, -2.0], dtype=torch.float64)
TOKENS = MASK_NT.nonzero().tolist()


def texts(**settings) -> Texts:
    return Texts(PROMPTS, IDS_NT, MASK_NT, **settings)


def weights() -> torch.Tensor:
    """Made-up coefficients, different for every token."""
    return (
        torch.linspace(0.5, 1.5, 12, dtype=torch.float64).view(4, 3)
        * ADVANTAGE_N[:, None]
        * MASK_NT
    )


def by_sign() -> dict[str, dict[str, torch.Tensor]]:
    positive_NT = (ADVANTAGE_N > 0)[:, None] & MASK_NT
    return {
        "sign": {
            "positive": positive_NT,
            "negative": ~positive_NT & MASK_NT,
            "zero": torch.zeros_like(MASK_NT),
        }
    }


def stepped(model, optimizer, weight_NT) -> dict[str, torch.Tensor]:
    """One update on -sum weight logp; returns the parameters before it."""
    before = copy_params(trainable(model))
    (-(weight_NT * token_logp(model, PROMPTS, IDS_NT, MASK_NT)).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return before


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("is_batched", [True, False])
@pytest.mark.parametrize("token_budget", [6, 16384])
def test_forward_mode_equals_finite_differences(tied, is_batched, token_budget, monkeypatch):
    monkeypatch.setattr("counterpoise.ledger.calculus.logprobs.LEAST_BUDGET", 1)
    model = clean_gpt2(tied=tied)
    params = trainable(model)
    torch.manual_seed(1)
    direction_C = {name: torch.randn(2, *p.shape, dtype=p.dtype) for name, p in params.items()}
    logprobs = of_model(model, texts(token_budget=token_budget))
    assert len(list(logprobs.forward_chunks(2))) == (4 if token_budget == 6 else 1)
    change_CNT = change_along(logprobs, params, direction_C, is_batched=is_batched)

    def logp(c: int, s: float) -> torch.Tensor:
        moved = {name: p + s * direction_C[name][c] for name, p in params.items()}
        return at(model, moved, lambda m: token_logp(m, PROMPTS, IDS_NT, MASK_NT)).detach()

    for c in range(2):
        step = 1e-4
        slope_NT = (
            8 * (logp(c, step) - logp(c, -step)) - (logp(c, 2 * step) - logp(c, -2 * step))
        ) / (12 * step)  # error of order step^4
        torch.testing.assert_close(change_CNT[c], slope_NT, rtol=1e-6, atol=1e-7)
    assert change_CNT[:, ~MASK_NT].abs().max() == 0
    assert change_CNT[:, MASK_NT].abs().min() > 1e-3


def test_forward_passes_share_the_budget_by_their_memory():
    """A token costs 10.24 of the budget in forward mode; values and 3 directions leave 2,048 of
    8,192 for each: 20 rows of 10 a pass.
    """
    nothing = torch.zeros(30, 1).bool()
    logprobs = LogProbs(nothing, [10] * 30, at, at, 8192, 10.24)
    assert [len(row_R) for row_R in logprobs.forward_chunks(3)] == [20, 10]
    assert sorted(torch.cat(list(logprobs.forward_chunks(3))).tolist()) == list(range(30))
    assert [len(row_R) for row_R in logprobs.chunks(range(30))] == [30]


def test_classes_add_up_and_the_rest_of_sgd_is_nothing():
    model = clean_gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = stepped(model, optimizer, weights())
    live = dict(model.named_parameters())
    found = decompose(
        of_model(model, texts()),
        before,
        trainable(model),
        weights(),
        by_sign(),
        response(optimizer, live),
    )
    parts = found.parts["sign"]
    torch.testing.assert_close(
        parts["positive"] + parts["negative"], found.predicted_NT, rtol=1e-10, atol=1e-16
    )
    assert parts["rest"].abs().max() < 1e-12 * found.predicted_NT.abs().max()
    assert parts["zero"].abs().max() == 0  # an empty class
    assert parts["positive"][MASK_NT].abs().min() > 0


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"weight_decay": 0.1}])
def test_the_rest_of_adam_is_its_memory(make, options):
    """dtheta minus what this gradient moved, second moments fixed, is momentum of earlier batches
    and weight decay: computed here by hand.
    """
    model = clean_gpt2()
    optimizer = make(model.parameters(), lr=1e-3, betas=(0.8, 0.95), eps=1e-6, **options)
    stepped(model, optimizer, weights().flip(0) * MASK_NT)
    memory = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
    before = stepped(model, optimizer, weights())
    live = dict(model.named_parameters())
    found = decompose(
        of_model(model, texts()),
        before,
        trainable(model),
        weights(),
        by_sign(),
        response(optimizer, live),
    )
    rest = {}
    for name, p in live.items():
        state, group = optimizer.state[p], optimizer.param_groups[0]
        second = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
        size = 1e-3 / (1 - 0.8**2) / ((second / (1 - 0.95**2)).sqrt() + 1e-6)
        rest[name] = -size * 0.8 * memory[name]
        decay = group["weight_decay"] * before[name]
        rest[name] -= 1e-3 * decay if make is torch.optim.AdamW else size * (1 - 0.8) * decay
    expected_NT = change_along(
        of_model(model, texts()), before, {name: d[None] for name, d in rest.items()}
    )[0]
    torch.testing.assert_close(found.parts["sign"]["rest"], expected_NT, rtol=1e-6, atol=1e-12)
    total_NT = sum(found.parts["sign"].values())
    torch.testing.assert_close(total_NT, found.predicted_NT, rtol=1e-12, atol=1e-15)
    assert expected_NT[MASK_NT].abs().min() > 0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_response_of_sgd_with_nesterov(momentum):
    """The first batch of Nesterov's SGD from rest moves by lr (1 + momentum) g: nothing is left
    over.
    """
    model = clean_gpt2()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-3, momentum=momentum, nesterov=momentum > 0
    )
    before = stepped(model, optimizer, weights())
    found = decompose(
        of_model(model, texts()),
        before,
        trainable(model),
        weights(),
        by_sign(),
        response(optimizer, dict(model.named_parameters())),
    )
    assert found.parts["sign"]["rest"].abs().max() < 1e-12 * found.predicted_NT.abs().max()


def test_own_and_others_equal_all_inner_products():
    """delta_j = eta sum_k c_k <g_j, g_k>, the diagonal own and the rest others: against the N x N
    matrix of full gradients.
    """
    model, eta = clean_gpt2(tied=True), 1e-3
    optimizer = torch.optim.SGD(model.parameters(), lr=eta)
    gradient = token_gradients(model, PROMPTS, IDS_NT, MASK_NT)
    before = stepped(model, optimizer, weights())
    rate = response(optimizer, dict(model.named_parameters()))
    logprobs = of_model(model, texts())
    found = decompose(logprobs, before, trainable(model), weights(), by_sign(), rate)
    own = weights()[MASK_NT] * own_one_by_one(logprobs, before, rate, [(n, t) for n, t in TOKENS])
    for j, (n, t) in enumerate(TOKENS):
        pulls = {
            k: eta * float(weights()[k]) * float(gradient[n, t] @ gradient[k]) for k in gradient
        }
        assert float(own[j]) == pytest.approx(pulls[n, t], rel=1e-9)
        others = sum(value for k, value in pulls.items() if k != (n, t))
        assert float(found.predicted_NT[n, t]) == pytest.approx(float(own[j]) + others, rel=1e-9)
        negative = sum(value for k, value in pulls.items() if ADVANTAGE_N[k[0]] < 0)
        assert float(found.parts["sign"]["negative"][n, t]) == pytest.approx(negative, rel=1e-9)


def test_the_largest_class_comes_for_free_from_the_whole_gradient():
    """With what the optimizer got, the largest class of each axis is a difference; parts equal
    those of all classes by backward.
    """
    model = clean_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = copy_params(trainable(model))
    (-(weights() * token_logp(model, PROMPTS, IDS_NT, MASK_NT)).sum()).backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    updates = response(optimizer, dict(model.named_parameters()))
    even_NT = IDS_NT % 2 == 0
    classes = by_sign() | {"parity": {"even": even_NT & MASK_NT, "odd": ~even_NT & MASK_NT}}
    rows = []
    logprobs = of_model(model, texts())
    counted = logprobs._replace(
        reverse=lambda params, row_R: rows.extend(row_R.tolist()) or logprobs.reverse(params, row_R)
    )
    found = decompose(
        counted, before, trainable(model), weights(), {"sign": by_sign()["sign"]}, updates, whole
    )
    assert sorted(rows) in ([0, 2], [1, 3])  # one sign only
    expected = decompose(logprobs, before, trainable(model), weights(), classes, updates)
    both = decompose(logprobs, before, trainable(model), weights(), classes, updates, whole)
    for axis, parts in expected.parts.items():
        for name, part_NT in parts.items():
            torch.testing.assert_close(both.parts[axis][name], part_NT, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(
        found.parts["sign"]["positive"], expected.parts["sign"]["positive"], rtol=1e-8, atol=1e-11
    )


def test_class_gradients_of_classes_that_share_rows():
    model = clean_gpt2()
    gradient = token_gradients(model, PROMPTS, IDS_NT, MASK_NT)
    even_NT = (IDS_NT % 2 == 0) & MASK_NT
    weight_CNT = torch.stack(
        [weights() * even_NT, weights() * ~even_NT, torch.zeros_like(weights())]
    )
    found = class_gradients(of_model(model, texts(token_budget=10)), trainable(model), weight_CNT)
    flat_CP = torch.cat([g.flatten(1) for g in found.values()], 1)
    for c in range(3):
        expected_P = sum(weight_CNT[c][k] * gradient[k] for k in gradient)
        torch.testing.assert_close(flat_CP[c], expected_P, rtol=1e-9, atol=1e-12)


def test_the_engine_leaves_the_model_alone():
    model = clean_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = stepped(model, optimizer, weights())
    model.train()
    after, memory = (
        copy_params(trainable(model)),
        [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()],
    )
    rng = torch.get_rng_state()
    decompose(
        of_model(model, texts()),
        before,
        trainable(model),
        weights(),
        by_sign(),
        response(optimizer, dict(model.named_parameters())),
    )
    assert all(torch.equal(after[name], p) for name, p in model.named_parameters())
    assert all(
        torch.equal(kept, optimizer.state[p]["exp_avg"])
        for kept, p in zip(memory, model.parameters())
    )
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(rng, torch.get_rng_state())
    assert model.training


def test_unknown_optimizers_say_so_and_still_predict():
    model = clean_gpt2()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-4)
    before = stepped(model, optimizer, weights())
    with pytest.raises(ValueError, match="optimizer Adagrad .known: AdamW, Adam, SGD"):
        response(optimizer, dict(model.named_parameters()))
    damped = torch.optim.SGD(model.parameters(), lr=1.0, dampening=0.5, momentum=0.9)
    with pytest.raises(ValueError, match="SGD with dampening"):
        response(damped, dict(model.named_parameters()))
    out = decompose(of_model(model, texts()), before, trainable(model), weights(), by_sign(), None)
    delta_NT = token_logp(model, PROMPTS, IDS_NT, MASK_NT) - at(
        model, before, lambda m: token_logp(m, PROMPTS, IDS_NT, MASK_NT)
    )
    assert out.parts == {}
    torch.testing.assert_close(out.predicted_NT, delta_NT.detach(), rtol=0.05, atol=1e-4)


def test_frozen_parameters_take_no_part():
    model = clean_gpt2(tied=False)
    model.transformer.wte.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    before = stepped(model, optimizer, weights())
    assert "transformer.wte.weight" not in before
    live = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = decompose(
        of_model(model, texts()),
        before,
        trainable(model),
        weights(),
        by_sign(),
        response(optimizer, live),
    )
    assert found.parts["sign"]["rest"].abs().max() < 1e-12 * found.predicted_NT.abs().max()


def test_parameters_that_the_optimizer_does_not_hold_have_response_zero():
    model = clean_gpt2(tied=False)
    optimizer = torch.optim.SGD(model.lm_head.parameters(), lr=0.5)
    found = response(optimizer, dict(model.named_parameters()))
    assert found["lm_head.weight"] == 0.5
    assert {value for name, value in found.items() if name != "lm_head.weight"} == {0.0}


def test_autocast_changes_the_engine_by_its_precision_only():
    model = clean_gpt2(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    before = stepped(model, optimizer, weights().float())
    updates = response(optimizer, dict(model.named_parameters()))
    wide = decompose(
        of_model(model, texts()), before, trainable(model), weights().float(), by_sign(), updates
    )
    narrow_logprobs = of_model(model, texts(), lambda: torch.autocast("cpu", torch.bfloat16))
    narrow = decompose(
        narrow_logprobs, before, trainable(model), weights().float(), by_sign(), updates
    )
    gap = (wide.predicted_NT - narrow.predicted_NT)[MASK_NT].norm() / wide.predicted_NT[
        MASK_NT
    ].norm()
    assert 0 < gap < 0.1


class NoForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Blocked(nn.Module):
    """A model part without forward mode."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return NoForwardMode.apply(self.inner(x))


def test_forward_mode_is_found_out_on_one_row():
    model = clean_gpt2()
    assert forward_mode(of_model(model, texts()), trainable(model)) == (True, "")
    model.transformer.h[0].mlp = Blocked(model.transformer.h[0].mlp)
    is_batched, why = forward_mode(of_model(model, texts()), trainable(model))
    assert is_batched is None
    assert why


def test_forward_mode_one_by_one_where_batching_fails():
    calls = []

    def no_batches(params, row_R):
        assert row_R.tolist() == [1]
        value = params["w"] * 2
        if calls.append(value) or len(calls) == 1:
            raise RuntimeError("no batching rule")
        return value[None]

    logprobs = LogProbs(torch.ones(2, 3).bool(), [9, 3], no_batches, no_batches)
    assert forward_mode(logprobs, {"w": torch.ones(3)}) == (False, "")


def test_attention_without_forward_mode_is_switched_and_restored():
    def opaque(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        out = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return NoForwardMode.apply(out[0]), out[1]

    ALL_ATTENTION_FUNCTIONS.register("opaque", opaque)
    model = clean_gpt2()
    direction_C = {name: torch.ones_like(p)[None] for name, p in trainable(model).items()}
    expected_CNT = change_along(of_model(model, texts()), trainable(model), direction_C)
    model.set_attn_implementation("opaque")
    found_CNT = change_along(of_model(model, texts()), trainable(model), direction_C)
    assert model.config._attn_implementation == "opaque"
    torch.testing.assert_close(found_CNT, expected_CNT, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "cohere", "phi", "gpt2"])
def test_forward_mode_of_other_architectures(name):
    """Several of them keep a norm or angles in float32, so differences are taken over a wider
    batch; batched and single passes agree closely.
    """
    model = tiny(name, dtype=torch.float64)
    params = trainable(model)
    torch.manual_seed(1)
    direction_C = {key: torch.randn(2, *p.shape, dtype=p.dtype) for key, p in params.items()}
    logprobs = of_model(model, texts(temperature=0.7))
    change_CNT = change_along(logprobs, params, direction_C)
    torch.testing.assert_close(
        change_CNT,
        change_along(logprobs, params, direction_C, is_batched=False),
        rtol=1e-5,
        atol=1e-5,
    )

    def logp(s: float) -> torch.Tensor:
        moved = {key: p + s * direction_C[key][1] for key, p in params.items()}
        return at(
            model, moved, lambda m: token_logp(m, PROMPTS, IDS_NT, MASK_NT, temperature=0.7)
        ).detach()

    slope_NT = (logp(1e-3) - logp(-1e-3)) / 2e-3
    assert (change_CNT[1] - slope_NT)[MASK_NT].norm() < 2e-3 * slope_NT[MASK_NT].norm()


def test_other_parameters_are_at_every_place_of_a_tied_weight_and_go_again():
    model = tiny("llama", tie_word_embeddings=True)
    own, other = model.lm_head.weight, torch.zeros_like(model.lm_head.weight)
    seen = at(
        model,
        {"model.embed_tokens.weight": other},
        lambda m: (m.lm_head.weight, m.model.embed_tokens.weight, m.model.norm.weight),
    )
    assert seen[0] is other and seen[1] is other and seen[2] is model.model.norm.weight
    with pytest.raises(ZeroDivisionError):
        at(model, {"model.embed_tokens.weight": other}, lambda m: 1 / 0)
    assert model.lm_head.weight is own and model.model.embed_tokens.weight is own
    with pytest.raises(KeyError, match="lm_head.weight"):  # its name is that of the embedding
        at(model, {"lm_head.weight": other}, lambda m: None)
