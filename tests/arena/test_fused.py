"""Members' layers in Triton compute what the plain ones do, each member with its own weights.

The kernels run on a CUDA device, or on a CPU that has Triton (slowly):
TRITON_INTERPRET=1 pytest tests/arena/test_fused.py
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from counterpoise.arena import forward
from counterpoise.arena.stack import Stack, assemble, restructure, stack_of
from counterpoise.sampling.decoder import Weights
from helpers.tiny_models import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAN_RUN = importlib.util.find_spec("triton") is not None and (
    DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
)
pytestmark = pytest.mark.skipif(not CAN_RUN, reason="no Triton that could run here")

MODELS = ["llama", "qwen2", "qwen3"]


@pytest.fixture(autouse=True)
def exact_matmuls():
    torch.backends.cuda.matmul.allow_tf32 = False


def members_apart(name: str, **sizes: int) -> tuple[Stack, torch.Tensor]:
    """Three members with weights of their own, norms and biases too."""
    stack = stack_of(tiny(name, **sizes), 3)
    noise = torch.randn(stack.theta_SP.shape, generator=torch.Generator().manual_seed(1))
    return stack, stack.theta_SP.detach() + 0.1 * noise


def read(stack: Stack, theta_SP: torch.Tensor) -> tuple[Weights, torch.Tensor]:
    """The weights, and the one tensor that gradients go to."""
    leaf = theta_SP.clone().requires_grad_()
    parts, start = [], 0
    for size in stack.pieces:
        shape = size if len(size) > 1 else (1, *size)
        parts.append(leaf[:, start : start + size.numel()].unflatten(1, shape))
        start += size.numel()
    return assemble(parts, stack.like, stack.is_tied), leaf


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to a share of the largest number."""
    worst = (found.cpu() - expected).abs().max() / expected.abs().max()
    assert worst < 2e-5, f"off by {worst:.2g} of the largest number"


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_and_gradients_are_those_of_the_plain_layers(name: str) -> None:
    from counterpoise.arena.kernels.triton_layers import hidden_of_embeddings

    stack, theta_SP = members_apart(name)
    ids_SRL = torch.randint(3, 29, (3, 4, 9), generator=torch.Generator().manual_seed(2))
    pull = torch.randn(3, 4, 9, 16, generator=torch.Generator().manual_seed(3))
    found = []
    for device, walk in (("cpu", forward.hidden_of_embeddings), (DEVICE, hidden_of_embeddings)):
        weights, leaf = read(stack, theta_SP.to(device))
        turns = stack.cos_LC.to(device), stack.sin_LC.to(device)
        cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        rows = forward.embed_rows(weights, ids_SRL.to(device))
        hidden = walk(weights, stack.shape, rows, *turns, cache)
        (hidden * pull.to(device)).sum().backward()
        assert leaf.grad is not None
        found.append([hidden.detach(), leaf.grad, *(part.detach() for kv in cache for part in kv)])
    for plain, fused in zip(*found, strict=True):
        assert_close(fused, plain)
    grad_SP = found[0][1]
    assert (grad_SP[0] - grad_SP[1]).abs().max() > 0.1 * grad_SP.abs().max()  # members do differ


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_kv_heads", [2, 4])  # of four: with two and with one query per key
def test_a_decode_step_is_that_of_the_plain_layers(name: str, num_kv_heads: int) -> None:
    from counterpoise.sampling.kernels import triton_decoder

    stack, theta_SP = members_apart(name, num_key_value_heads=num_kv_heads)
    shape, generator = stack.shape, torch.Generator().manual_seed(4)
    token_B = torch.randint(3, 29, (6,), generator=generator)
    position_B = torch.tensor([0, 3, 20, 31, 7, 1])
    size = (shape.num_layers, 6, shape.num_kv_heads, 32, shape.head_size)
    cache = torch.randn(2, *size, generator=generator)
    keys, values = cache.clone()
    plain = forward.decode(
        restructure(stack, theta_SP),
        shape,
        *(token_B, position_B, keys, values, stack.cos_LC, stack.sin_LC),
    )
    columns = (token_B, position_B, *cache, stack.cos_LC, stack.sin_LC)
    columns = tuple(column.to(DEVICE) for column in columns)
    weights = restructure(stack, theta_SP.to(DEVICE))
    fused = triton_decoder.decode(weights, shape, *columns)
    assert_close(fused.view_as(plain), plain)
    for own, expected in zip(columns[2:4], (keys, values)):
        assert_close(own, expected)
