"""The own part of a token: against finite differences of updates, all rows at once against one
backward each, and in the ledger's columns.
"""

from __future__ import annotations

import shutil
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch

import counterpoise as cp
from counterpoise.ledger.book import Book, Settings
from counterpoise.ledger.calculus import own as own_module
from counterpoise.ledger.calculus.logprobs import Texts, at, copy_params, of_model, trainable
from counterpoise.ledger.calculus.optimizers import response
from counterpoise.ledger.calculus.own import (
    lay_out,
    one_token_rows,
    own_by_rows,
    own_one_by_one,
    own_parts,
)
from counterpoise.ledger.calculus.row_norms import Call, CannotBatch, HeadCall, row_norms
from counterpoise.policy import add_lora, token_logp
from counterpoise.policy.fused import fused_layers
from counterpoise.policy.kernels import build
from counterpoise.types import TokenBatch
from helpers.reference_ledger import clean_gpt2, token_gradients
from helpers.tiny_models import tiny

PROMPTS = [[1, 2], [1, 2], [3, 4, 5], [3, 4, 5]]
IDS_NT = torch.tensor([[6, 7, 8], [6, 9, 0], [2, 2, 7], [2, 4, 1]])
MASK_NT = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1], [1, 1, 1]]).bool()  # a hole in row 2
WEIGHT_NT = torch.linspace(-1.5, 1.0, 12, dtype=torch.float64).view(4, 3) * MASK_NT
TOKENS = [(n, t) for n, t in MASK_NT.nonzero().tolist()]
LR, BETAS, EPS = 1e-3, (0.8, 0.95), 1e-6


def own_of(model, rows, params, rates, tokens):
    return own_parts(model, rows, params, rates, lay_out(model, rows, params, tokens))


def texts(**settings) -> Texts:
    return Texts(PROMPTS, IDS_NT, MASK_NT, **settings)


def gradient_step(optimizer, grads: dict[str, torch.Tensor], model) -> None:
    for name, p in model.named_parameters():
        p.grad = -grads[name]
    optimizer.step()
    optimizer.zero_grad()


def flat_sum(model, gradient, weight_NT) -> dict[str, torch.Tensor]:
    """sum_j weight_j grad logp_j, by parameter."""
    total = sum(weight_NT[k] * g for k, g in gradient.items())
    sizes = [p.numel() for p in model.parameters()]
    named = zip(model.named_parameters(), total.split(sizes))
    return {name: part.view_as(p) for (name, p), part in named}


def adam_move(first, second, step, grads):
    """Where Adam would go with these gradients, second moments fixed: written out."""
    return {
        name: LR
        * (BETAS[0] * first[name] + (1 - BETAS[0]) * g)
        / (1 - BETAS[0] ** step)
        / ((second[name] / (1 - BETAS[1] ** step)).sqrt() + EPS)
        for name, g in grads.items()
    }


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_own_is_what_scaling_one_tokens_gradient_does_to_it(tied, kind):
    """Finite differences: the update with token j's gradient (1 + s) times as large, and j's
    log-prob after it; with SGD and with AdamW that has been going for two updates.
    """
    model = clean_gpt2(tied=tied)
    make = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
    more = {} if kind == "sgd" else {"betas": BETAS, "eps": EPS, "weight_decay": 0.1}
    optimizer = make(model.parameters(), lr=LR, **more)
    for sign in (1, -1):
        gradient = token_gradients(model, PROMPTS, IDS_NT, MASK_NT)
        gradient_step(optimizer, flat_sum(model, gradient, sign * WEIGHT_NT.flip(0)), model)
    before = copy_params(trainable(model))
    gradient = token_gradients(model, PROMPTS, IDS_NT, MASK_NT)
    names = dict(model.named_parameters())
    first = {n: -optimizer.state[p].get("exp_avg", p).clone() for n, p in names.items()}
    gradient_step(optimizer, flat_sum(model, gradient, WEIGHT_NT), model)
    second = {n: optimizer.state[p].get("exp_avg_sq") for n, p in names.items()}
    part = own_of(model, texts(), before, response(optimizer, names), TOKENS)
    for j, (n, t) in enumerate(TOKENS):

        def logp(s: float, n=n, t=t) -> float:
            scaled_NT = WEIGHT_NT.clone()
            scaled_NT[n, t] *= 1 + s
            moves = [flat_sum(model, gradient, weight_NT) for weight_NT in (scaled_NT, WEIGHT_NT)]
            if kind == "adamw":
                moves = [adam_move(first, second, 3, grads) for grads in moves]
            else:
                moves = [{name: LR * g for name, g in grads.items()} for grads in moves]
            moved = {name: p + moves[0][name] - moves[1][name] for name, p in before.items()}
            rows = (PROMPTS[n : n + 1], IDS_NT[n : n + 1], MASK_NT[n : n + 1])
            return float(at(model, moved, lambda m: token_logp(m, *rows))[0, t].detach())

        slope = (logp(0.01) - logp(-0.01)) / 0.02
        assert float(WEIGHT_NT[n, t] * part[j]) == pytest.approx(slope, rel=1e-5, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("gpt2", {}),
    ],
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rows_at_once_equal_one_backward_each(name, settings, temperature, monkeypatch, caplog):
    model = tiny(name, **settings)
    params, rows = trainable(model), texts(temperature=temperature)
    expected = own_one_by_one(of_model(model, rows), params, rates(params), TOKENS)
    monkeypatch.setattr(own_module, "MOST_NUMBERS", 3 * max(p.numel() for p in params.values()))
    got = own_of(model, rows, params, rates(params), TOKENS)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-8)
    assert own_module._AGREES[model] == (name != "gpt2")  # whose positions are one row for all
    slow = [r for r in caplog.records if "backward per token" in r.getMessage()]
    assert len(slow) == (name == "gpt2")


@pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="there is no C compiler")
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_fused_layers_tell_what_own_layers_would(name, monkeypatch):
    model = tiny(name)
    params, rows, seen = trainable(model), texts(), []
    expected = own_of(model, rows, params, rates(params), TOKENS)
    real = own_module.seen

    @contextmanager
    def noted(*args):
        with real(*args) as told:
            seen.append(len(told))
            yield told

    monkeypatch.setattr(own_module, "seen", noted)
    chosen, kernels = lay_out(model, rows, params, TOKENS), partial(fused_layers, model)
    got = own_parts(model, rows, params, rates(params), chosen, kernels=kernels)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-8)
    per_layer = 9 + 2 * (name == "qwen3")
    assert seen == [per_layer * len(model.model.layers)]
    frozen = {n: p for n, p in params.items() if "layers.0" not in n and "embed" not in n}
    model.model.layers[0].requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    expected = own_of(model, rows, frozen, rates(frozen), TOKENS)
    got = own_parts(model, rows, frozen, rates(frozen), chosen, kernels=kernels)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(
    ("off_wide", "off_half", "agrees"), [(0.0, 0.2, True), (0.0, 1.0, False), (0.05, 0.0, False)]
)
def test_half_precision_may_move_own_parts_and_a_wrong_derivative_is_seen(
    off_wide, off_half, agrees, monkeypatch
):
    """Whether rows share a backward must not hang on how half-precision products round."""
    real, model = own_module.own_by_rows, tiny("llama", dtype=torch.float32)

    def moved(*args):
        precision = args[5]
        return real(*args) * (1 + (off_wide if precision is nullcontext else off_half))

    monkeypatch.setattr(own_module, "own_by_rows", moved)
    autocast, params = partial(torch.autocast, "cpu", torch.float16), trainable(model)
    chosen = lay_out(model, texts(), params, TOKENS)
    own_parts(model, texts(), params, rates(params), chosen, autocast)
    assert own_module._AGREES[model] == agrees


def test_frozen_parameters_and_adapters():
    model = tiny("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    for chosen in (model, add_lora(tiny("llama"), r=2, alpha=4.0, target_modules="all-linear")):
        params = trainable(chosen)
        expected = own_one_by_one(of_model(chosen, texts()), params, rates(params), TOKENS)
        packed = one_token_rows(texts(), TOKENS, chosen.device)
        got = own_by_rows(chosen, params, rates(params), packed)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-8)
        assert got.min() > 0


def rates(params) -> dict[str, torch.Tensor]:
    """Made-up responses, different for every weight."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.rand(p.shape, generator=generator, dtype=p.dtype) for name, p in params.items()
    }


def book_of(model, own_tokens: int, seed: int = 0, clip: float = 0.5) -> Book:
    """Two updates of dr_grpo with SGD on a model, accounted for."""
    method = cp.method("dr_grpo")
    logp_NT = token_logp(model, PROMPTS, IDS_NT, MASK_NT).detach()
    columns = (torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 0.0, 1.0, 0.0]), logp_NT)
    batch = TokenBatch(IDS_NT, MASK_NT, *columns, max_length=3)
    optimizer, credit = torch.optim.SGD(model.parameters(), lr=LR), method.assign(batch)
    settings = Settings(own_tokens=own_tokens, seed=seed)
    book = Book(model, optimizer, batch, PROMPTS, credit, lambda ids: ["x"] * len(ids), settings)
    for row_R in (torch.tensor([1, 0]), torch.tensor([2, 3])):
        rows = method.rows(batch, credit, row_R)
        book.before()
        prompts = [PROMPTS[r] for r in row_R.tolist()]
        loss = method.loss(token_logp(model, prompts, IDS_NT[row_R], rows.mask_NT), rows)
        (clip * (loss.loss_NT * rows.scale_NT).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        book.after(rows, loss, clip)
    return book


def test_own_and_others_of_the_account_are_inner_products_of_gradients():
    """First update (rows 0 and 1) of SGD from known weights: own is lr c_j |g_j|^2, others sums
    lr c_k <g_j, g_k> over the rest, c = coef * scale * clip factor.
    """
    gradient = token_gradients(tiny("llama"), PROMPTS, IDS_NT, MASK_NT)
    columns = book_of(tiny("llama"), own_tokens=100).columns
    weight_NT = columns["coef"] * columns["scale"] * 0.5
    first = [k for k in gradient if k[0] < 2]
    for j in first:
        pulls = {k: LR * float(weight_NT[k] * (gradient[j] @ gradient[k])) for k in first}
        assert float(columns["own"][j]) == pytest.approx(pulls.pop(j), rel=1e-4)
        assert float(columns["others"][j]) == pytest.approx(sum(pulls.values()), rel=2e-3, abs=1e-7)
    total_NT = columns["own"] + columns["others"]
    torch.testing.assert_close(total_NT[MASK_NT], columns["predicted"][MASK_NT])
    assert (columns["own_head"].abs() <= columns["own"].abs() * 1.001)[MASK_NT].all()  # untied


def test_a_sample_of_each_update_that_the_seed_decides():
    drawn = [~book_of(tiny("llama"), 2, seed).columns["own"].isnan() for seed in (0, 0, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert any(not torch.equal(drawn[0], other) for other in drawn[2:])
    for is_drawn_NT in drawn:
        assert [int(part.sum()) for part in (is_drawn_NT[:2], is_drawn_NT[2:])] == [2, 2]
        assert not (is_drawn_NT & ~MASK_NT).any()
    none = book_of(tiny("llama"), 0)
    assert "own" not in none.columns and "own/num" not in none.summary()
    assert none.table(0)["own"].null_count == none.table(0)["others"].null_count == 10
    assert "own_head" in none.columns


def test_embedding_and_head_set_no_limit_to_the_tokens_of_a_pass(monkeypatch):
    """Their gradients by row are never laid out, so a wide vocabulary costs no more forwards."""
    model = tiny("llama", vocab_size=997, tie_word_embeddings=True)
    params, calls = trainable(model), []
    own_of(model, texts(), params, rates(params), TOKENS[:2])  # tried once
    largest = max(p.numel() for name, p in params.items() if "embed" not in name)
    monkeypatch.setattr(own_module, "MOST_NUMBERS", len(TOKENS) * largest)
    handle = model.model.register_forward_hook(lambda *_: calls.append(1))
    got = own_of(model, texts(), params, rates(params), TOKENS)
    handle.remove()
    assert len(calls) == 1
    expected = own_one_by_one(of_model(model, texts()), params, rates(params), TOKENS)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_learns_nothing_from_padding(tied):
    """As torch has it: the row of ``padding_idx`` has no gradient, repeated tokens add up."""
    model = tiny("llama", tie_word_embeddings=tied)
    assert model.model.embed_tokens.padding_idx == 0
    rows = Texts([[0, 2, 2], [2, 0, 5], [3, 0, 0], [4, 4, 4]], IDS_NT, MASK_NT)
    params = trainable(model)
    expected = own_one_by_one(of_model(model, rows), params, rates(params), TOKENS)
    got = own_by_rows(model, params, rates(params), one_token_rows(rows, TOKENS, model.device))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-8)


def test_a_weight_used_in_two_ways_takes_a_backward_per_token():
    model = tiny("llama", tie_word_embeddings=True)
    call = Call(model.model.norm, "weight", "head", torch.ones(1, 2, 16), torch.ones(1, 2, 16))
    head = HeadCall("head", None, torch.ones(1, 16), torch.ones(1, 29))
    with pytest.raises(CannotBatch, match="used in two ways"):
        row_norms([call], head, {"head": 1.0}, 100)
