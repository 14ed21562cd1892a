"""Layers whose weights are split together multiply as layers whose weights are split one by one."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

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
