"""The ledger through the fused layers of the update equals the ledger through the model's own, and
its kernels equal the plain operations.

The kernels run on a CUDA device, or on a CPU that has Triton (slowly):
TRITON_INTERPRET=1 pytest tests/ledger/test_kernels.py
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch

import counterpoise as cp
from counterpoise.ledger.book import Book, Settings
from counterpoise.ledger.calculus import head_change as head_module
from counterpoise.ledger.calculus import logprobs as logprobs_module
from counterpoise.ledger.calculus.head_change import HeadResponse, HeadState, head_change
from counterpoise.ledger.calculus.layers import attention_of
from counterpoise.ledger.calculus.logprobs import Texts, trainable
from counterpoise.ledger.calculus.own import lay_out, own_by_rows
from counterpoise.ledger.calculus.tangents import logp_change
from counterpoise.maths.head import Head
from counterpoise.policy import fused as fused_module
from counterpoise.policy import load_model, measure, token_logp
from counterpoise.policy.backbone import backbone
from counterpoise.policy.fused import fused_layers, has_triton_layers
from counterpoise.policy.mix import triton_kernels
from counterpoise.policy.pack import Whole, pack_rows
from counterpoise.policy.prefix import Prefixes
from counterpoise.policy.split import split_product
from counterpoise.trainer import loop
from counterpoise.trainer.config import parse_config
from counterpoise.types import TokenBatch, TokenLoss
from helpers.tiny_models import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAN_RUN = importlib.util.find_spec("triton") is not None and (
    DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
)
needs_triton = pytest.mark.skipif(not CAN_RUN, reason="no Triton that could run here")
# Triton's interpreter cuts bfloat16 instead of rounding it
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
MODELS = {
    "llama": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "one key-value head": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}
PROMPTS = [[3, 4, 5], [6, 7], [3, 4, 5], [6, 7], [3, 4, 5]]
LENGTHS = [7, 5, 6, 7, 2]


@pytest.fixture(autouse=True)
def exact_matmuls():
    torch.backends.cuda.matmul.allow_tf32 = False


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def texts():
    mask_NT = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    ids_NT = torch.randint(3, 29, (5, 7), generator=torch.Generator().manual_seed(0))
    return PROMPTS, ids_NT.to(DEVICE), mask_NT.to(DEVICE)


@needs_triton
@pytest.mark.parametrize("size", [1, 40, 1100])
def test_split_products_keep_22_bits_of_each_factor(size):
    """Against float64: a float32 product is off by up to 2^-24 of the sum of absolute terms for
    each rounding, one of TF32 by 2^-11.
    """
    x, weight, bias = normal(3, 5, size), normal(7, size, seed=1), normal(7, seed=2)
    got = split_product(x, weight, bias)
    exact = x.double() @ weight.double().T + bias.double()
    most = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    assert ((got.double() - exact).abs() / most).max() < 2.0**-20
    assert torch.backends.cuda.matmul.allow_tf32 is False


@needs_triton
def test_split_products_cut_wide_weights(monkeypatch):
    from counterpoise.policy import split

    x, weight = normal(3, 8), normal(7, 8, seed=1)
    whole = split_product(x, weight)
    monkeypatch.setattr(split, "MOST_NUMBERS", 24)
    torch.testing.assert_close(split_product(x, weight), whole, rtol=1e-6, atol=1e-6)


@needs_triton
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_scores_of_fused_layers_in_float32_are_those_of_plain_layers(name, monkeypatch):
    """With products for tensor cores, which the fused layers use without a gradient alone."""
    model, needs = tiny(name).to(DEVICE), {"trainer_logp_NT"}
    plain = measure(model, *texts(), needs)["trainer_logp_NT"]
    calls = []
    monkeypatch.setattr(fused_module, "can_split", lambda weight: not calls.append(weight.shape))
    with fused_layers(model, triton_kernels()):
        assert has_triton_layers(model)
        split = measure(model, *texts(), needs)["trainer_logp_NT"]
    assert len(calls) == 2  # layers of one forward
    assert not has_triton_layers(model)
    torch.testing.assert_close(split, plain, rtol=0, atol=1e-5)


@needs_triton
@pytest.mark.parametrize(("share", "half"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("name", list(MODELS))
def test_forward_mode_with_kernels_equals_forward_mode_without(name, share, half):
    if name == "qwen3" and half and DEVICE == "cpu":
        pytest.skip("float16 cannot hold the changes of its norms of heads")
    kind, changes = MODELS[name]
    model = tiny(kind, **changes).to(DEVICE)
    params = trainable(model)
    direction_C = {
        key: 0.05 * normal(3, *value.shape, seed=seed)
        for seed, (key, value) in enumerate(params.items())
    }
    rows = pack_rows(*texts(), torch.device(DEVICE), share=share)
    assert isinstance(rows.layout, Prefixes) == share
    with torch.autocast(DEVICE, HALF, enabled=half):
        plain_CM, fused_CM = (
            logp_change(model, params, direction_C, rows, backbone(model).head, fused=fused)
            for fused in (False, True)
        )
    error = (fused_CM - plain_CM).abs().max() / plain_CM.abs().max()
    assert error < (10 * torch.finfo(HALF).eps if half else 1e-5)


def ragged(share):
    """Rows that end inside the blocks of a kernel; three prompts, one of them a single token."""
    if not share:
        return Whole(torch.zeros(3, 45, device=DEVICE).long(), torch.zeros(0).long())
    columns = torch.zeros(3, 37), torch.tensor([37, 18, 1]), torch.tensor([0, 2, 1, 0])
    return Prefixes(*(column.long().to(DEVICE) for column in (*columns, torch.zeros(4, 29))))


@needs_triton
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(
    ("num_queries", "num_kv", "size", "num_changes"),
    [(3, 1, 64, 3), (3, 1, 24, 6), (6, 2, 24, 1), (2, 2, 64, 5), (2, 1, 128, 2)],
)
def test_attention_in_one_kernel_equals_plain_operations(
    num_queries, num_kv, size, num_changes, share
):
    """Against float64, of values and of each change, padding included: in float32 to its rounding,
    in half precision no further off than the plain operations.
    """
    from counterpoise.ledger.calculus.kernels import triton_attend

    layout, slots = ragged(share), 1 + num_changes
    num_tokens = 3 * 37 + 4 * 29 if share else 3 * 45
    qkv = normal(num_tokens, slots, num_queries + 2 * num_kv, size)
    qkv[:, :, :num_queries] *= 3 * size**-0.5  # scores of a few units
    heads = [num_queries, num_kv, num_kv]

    def errors(attend, dtype):
        part = qkv.to(dtype)
        exact_MAF = attention_of(layout)(*part.double().split(heads, 2))
        got_MAF = attend(*part.split(heads, 2))
        assert got_MAF.dtype == dtype and got_MAF.is_contiguous()
        return (got_MAF - exact_MAF).norm(dim=(0, 2)) / exact_MAF.norm(dim=(0, 2))

    fused, plain = triton_attend.attention_of(layout), attention_of(layout)
    assert errors(fused, torch.float32).max() < 2e-6
    assert (errors(fused, HALF) < 1.1 * errors(plain, HALF)).all()


@needs_triton
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_own_parts_of_fused_layers_are_those_of_plain_layers(name, half):
    """In float32 projections are modules that are called, under autocast joined products."""
    kind, changes = MODELS[name]
    model = tiny(kind, **changes).to(DEVICE)
    rows, params = Texts(*texts()), trainable(model)
    rates = {name: 1.0 + 0.1 * p.detach().abs() for name, p in params.items()}
    chosen = lay_out(model, rows, params, [(0, 3), (1, 4), (3, 0), (4, 1)])

    def parts(kernels):
        autocast = partial(torch.autocast, DEVICE, HALF, enabled=half)
        packed = chosen[0].rows
        return own_by_rows(model, params, rates, packed, 1.0, autocast, kernels)

    with torch.no_grad():
        expected = parts(nullcontext)
        got = parts(lambda: fused_layers(model, triton_kernels()))
    assert len(chosen) == 1 and expected.min() > 0
    torch.testing.assert_close(got, expected, rtol=0.03 if half else 1e-4, atol=1e-8)


@needs_triton
@pytest.mark.parametrize("size", [29, 2100])
@pytest.mark.parametrize("rate", ["tensor", "number", "none"])
def test_one_kernel_over_logits_equals_plain_operations(size, rate, monkeypatch):
    before, after = (HeadState(normal(6, 16, seed=s), Head(normal(size, 16, seed=9), scale=0.5))
                     for s in (1, 2))  # fmt: skip
    near = HeadState(before.hidden_MD + 1e-3 * after.hidden_MD, before.head)
    target_M = torch.tensor([0, 1, 2, 28, 5, 5], device=DEVICE)
    response = {
        "tensor": HeadResponse(normal(size, 16, seed=4).abs()),
        "number": HeadResponse(0.25),
        "none": None,
    }[rate]
    monkeypatch.setattr(head_module, "can_split", lambda weight: size == 29)
    for other in (after, near):
        plain, fused = (
            head_change(
                before, other, target_M, temperature=0.7, response=response, chunk=4, fused=fused
            )
            for fused in (False, True)
        )
        wide = head_change(
            *(
                HeadState(state.hidden_MD.double(), state.head._replace(
                    weight_VD=state.head.weight_VD.double()))
                for state in (before, other)
            ),
            target_M,
            temperature=0.7,
            response=None if response is None else HeadResponse(
                response.weight.double() if rate == "tensor" else response.weight),
        )  # fmt: skip
        for name, exact in wide._asdict().items():
            got = getattr(fused, name)
            assert (got is None) == (exact is None) == (getattr(plain, name) is None)
            if got is not None:
                torch.testing.assert_close(got.double(), exact, rtol=2e-5, atol=2e-6, msg=name)
    torch.testing.assert_close(fused.kl_M.double(), wide.kl_M, rtol=1e-2, atol=0)


def book_of(model, kernels) -> Book:
    """Two updates of dr_grpo, accounted for."""
    prompts, ids_NT, mask_NT = texts()
    method, group_N = cp.method("dr_grpo"), torch.tensor([0, 1, 0, 1, 0], device=DEVICE)
    logp_NT = token_logp(model, prompts, ids_NT, mask_NT).detach()
    reward_N = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0], device=DEVICE)
    batch = TokenBatch(ids_NT, mask_NT, group_N, reward_N, logp_NT, max_length=7)
    optimizer, credit = torch.optim.AdamW(model.parameters(), lr=1e-3), method.assign(batch)
    settings = Settings(kernels=kernels, own_tokens=3)
    book = Book(model, optimizer, batch, prompts, credit, lambda ids: ["x"] * len(ids), settings)
    for row_R in (torch.tensor([0, 2, 4], device=DEVICE), torch.tensor([1, 3], device=DEVICE)):
        rows = method.rows(batch, credit, row_R)
        book.before()
        some = [prompts[r] for r in row_R.tolist()]
        loss = method.loss(token_logp(model, some, ids_NT[row_R], mask_NT[row_R]), rows)
        (loss.loss_NT * rows.scale_NT).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        book.after(rows, TokenLoss(*(column.detach() for column in loss)))
    return book


@needs_triton
def test_the_ledger_through_fused_layers_says_what_it_says_through_plain_ones():
    model, other = tiny(tie_word_embeddings=True).to(DEVICE), tiny(tie_word_embeddings=True)
    fused, plain = (
        book_of(model, lambda: fused_layers(model, triton_kernels())).columns,
        book_of(other.to(DEVICE), nullcontext).columns,
    )
    assert fused.keys() == plain.keys()
    for name, column_NT in plain.items():
        if name in ("change", "is_flip", "noise_floor"):
            continue  # of the rounding itself
        size = column_NT.nan_to_num(0).abs().max()
        torch.testing.assert_close(
            fused[name], column_NT, rtol=0, atol=2e-4 * float(size) + 1e-6, equal_nan=True, msg=name
        )
    parts = [column for name, column in fused.items() if name.startswith("part_sign")]
    total_NT = torch.stack(parts).sum(0)
    torch.testing.assert_close(total_NT, fused["predicted"], rtol=1e-4, atol=1e-7, equal_nan=True)


def test_the_ledger_runs_with_the_kernels_of_the_update(monkeypatch):
    """Each enters the block of the update's layers; the decoder runs five times per update, and
    once more for the noise floor and for what is tried on a new model.
    """
    model, inside, forwards = tiny().to(DEVICE), [], []
    book_of(model, nullcontext)  # what is tried once

    @contextmanager
    def kernels():
        inside.append(True)
        yield
        inside.pop()

    def note(_module, _args):
        forwards.append(bool(inside))

    walks = []
    own = logprobs_module.logp_change
    monkeypatch.setattr(
        logprobs_module,
        "logp_change",
        lambda *args, **kwargs: walks.append(bool(inside)) or own(*args, **kwargs),
    )
    handle = model.model.register_forward_pre_hook(note)
    book_of(model, kernels)
    handle.remove()
    assert walks == [True, True]
    # before, after, the smaller class, own parts; and the noise floor
    assert forwards.count(True) == 2 * 4 + 1
    assert forwards.count(False) == 1 + 2  # the batch, and its updates


def test_the_trainer_gives_the_ledger_its_kernels(monkeypatch):
    policy, asked = load_model("bundled"), []
    config = parse_config({"optimizer": {"kernels": "torch"}})
    monkeypatch.setattr(loop, "chosen_kernels", lambda *args: asked.append(args) or nullcontext())
    with loop.ledger_recording(config, policy, 0).book.kernels():
        assert asked == [(policy.model, config.optimizer)]
