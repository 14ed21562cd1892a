"""Layers whose weights are split together multiply as layers whose weights are split one by one."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from counterpoise.ledger.calculus import head_change as head_module
from counterpoise.ledger.calculus.head_change import HeadResponse, HeadState, head_change, kl
from counterpoise.maths.head import Head
from counterpoise.policy import joined, split
from counterpoise.policy.fused import _Weights
from counterpoise.policy.mix import Kernels
from helpers.tiny_models import tiny

KERNELS = Kernels(*[None] * 4, joins_always=False, reads_masks=True, is_triton=True)  # pyright: ignore[reportArgumentType]


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    high = (x.contiguous().view(torch.int32) + 4096 & -8192).view(torch.float32)
    return high, x - high


@pytest.fixture
def splits(monkeypatch):
    """What the kernels compute, in torch; and how often weights were split."""
    count = []

    def left_parts(x: Tensor) -> Tensor:
        high, low = halves(x)
        return torch.cat([low, high, high], -1)

    def right_parts(x: Tensor) -> Tensor:
        count.append(len(x))
        high, low = halves(x)
        return torch.cat([high, low, high], -1)

    home = "counterpoise.policy.kernels.triton_split"
    kernels = SimpleNamespace(left_parts=left_parts, right_parts=right_parts)
    monkeypatch.setitem(sys.modules, home, kernels)
    monkeypatch.setattr("counterpoise.policy.fused.can_split", lambda weight: True)
    return count


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("num_together", [5, 2])
def test_layers_split_together_multiply_as_layers_split_alone(
    splits, monkeypatch, name, num_together
):
    decoder: Any = tiny(name, num_hidden_layers=5).model
    of_first: Any = joined.projections(decoder.layers[0])
    size = sum(linear.weight.numel() for group in of_first for linear in group)
    monkeypatch.setattr(joined, "MOST_NUMBERS", num_together * size)
    weights = _Weights(decoder, KERNELS)
    for _ in range(2):
        splits.clear()
        for layer in decoder.layers:
            with torch.no_grad():
                made = weights.of(layer, "cpu")
            assert made is not None
            num_splits = len(splits)
            groups: Any = joined.projections(layer)
            for product, group in zip(made, groups):
                x = torch.randn(5, group[0].in_features, generator=torch.Generator().manual_seed(1))
                whole = torch.cat([linear.weight for linear in group])
                bias = None if group[0].bias is None else torch.cat([p.bias for p in group])
                assert torch.equal(product.of(x), split.split_product(x, whole, bias))
            del splits[num_splits:]
        assert len(splits) == 4 * (5 // num_together)  # four kinds; a layer left over is alone
        assert not weights.own.split  # nothing is kept
        with torch.no_grad():  # another forward has other weights
            for parameter in decoder.parameters():
                parameter.mul_(1.5)


def test_a_weight_for_many_products_is_split_once_where_its_parts_may_stay(splits, monkeypatch):
    weight, xs = torch.randn(7, 5), torch.randn(3, 4, 5)
    expected = [split.split_product(x, weight) for x in xs]
    for most, num_splits in ((weight.numel(), 1), (weight.numel() - 1, 2 * len(xs))):
        monkeypatch.setattr(split, "MOST_NUMBERS", most)
        splits.clear()
        product = split.product_by(weight)
        got = [product(x) for x in xs]
        assert len(splits) == num_splits
        torch.testing.assert_close(got, expected)


def test_heads_are_split_once_for_all_tokens(splits, monkeypatch):
    def compare(before_MV: Tensor, after_MV: Tensor, target_M: Tensor, rate_MV: Tensor) -> Tensor:
        """What the kernel gives, in torch."""
        logp_MV, after_MV = before_MV.log_softmax(-1), after_MV.log_softmax(-1)
        u_MV = one_hot(target_M, before_MV.shape[1]) - logp_MV.exp()
        columns = (logp_MV, after_MV)
        return torch.stack(
            [
                *(column.gather(1, target_M[:, None])[:, 0] for column in columns),
                -(logp_MV.exp() * logp_MV).sum(1),
                kl(after_MV, logp_MV),
                (rate_MV * u_MV.square()).sum(1),
            ]
        )

    home = "counterpoise.ledger.calculus.kernels.triton_head"
    monkeypatch.setitem(sys.modules, home, SimpleNamespace(compare_logits=compare))
    monkeypatch.setattr(head_module, "can_split", lambda weight: True)
    before, after = (HeadState(torch.randn(6, 5), Head(torch.randn(9, 5))) for _ in range(2))
    response, target_M = HeadResponse(torch.rand(9, 5)), torch.arange(6)
    plain, fused = (
        head_change(before, after, target_M, response=response, chunk=2, fused=is_fused)
        for is_fused in (False, True)
    )
    assert len(splits) == 3  # before, after and the response
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
