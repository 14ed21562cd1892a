"""``decoder.decode`` with Triton kernels between the matmuls: a row's attention stops at its own
position. Members of an arena's stack decode side by side, each with its own weights.

Axes: B rows, L cache slots, K key-value heads, C head size, D hidden size, V vocabulary, S members.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.sampling import decoder
from counterpoise.sampling.decoder import Shape, Weights
from counterpoise.sampling.kernels.triton_decode import add_norm, attend, gate, rotate_and_store

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def decode(
    weights: Weights,
    shape: Shape,
    token_B: Tensor,
    position_B: Tensor,
    keys: Tensor,
    values: Tensor,
    cos_LC: Tensor,
    sin_LC: Tensor,
) -> Tensor:
    """As ``decoder.decode``; weights may have a first axis of members, B / S rows each."""
    x_BD, change_BD, dtype, eps = (
        embed(weights.embed_VD, token_B),
        None,
        weights.head_DV.dtype,
        shape.eps,
    )
    for number, layer in enumerate(weights.layers):
        normed_BD = add_norm(x_BD, change_BD, layer.input_norm, eps, dtype)
        q_BHC = rotate_and_store(
            linear(normed_BD, layer.qkv, layer.qkv_bias),
            position_B,
            cos_LC,
            sin_LC,
            keys[number],
            values[number],
            layer.query_norm,
            layer.key_norm,
            eps,
            shape.num_heads,
        )
        mixed_BF = attend(q_BHC, position_B, keys[number], values[number], shape.scaling)
        normed_BD = add_norm(
            x_BD, linear(mixed_BF, layer.out, layer.out_bias), layer.middle_norm, eps, dtype
        )
        change_BD = linear(
            gate(linear(normed_BD, layer.gate_up, layer.gate_up_bias)), layer.down, layer.down_bias
        )
    return add_norm(x_BD, change_BD, weights.norm_D, eps, dtype)


def linear(x_BF: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x W + b``, of each member's rows with its own weight where there are several."""
    return decoder.linear(_by_member(x_BF, weight), weight, bias).view(len(x_BF), -1)


def embed(weight: Tensor, token_B: Tensor) -> Tensor:
    return decoder.embed(weight, _by_member(token_B, weight)).view(len(token_B), -1)


def _by_member(rows: Tensor, weight: Tensor) -> Tensor:
    return rows if weight.ndim == 2 else rows.unflatten(0, (len(weight), -1))
