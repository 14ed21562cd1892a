"""``decoder.decode`` with Triton kernels between the matmuls: a row's attention stops at its own
position.

Axes: B rows, L cache slots, K key-value heads, C head size, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoise.sampling.decoder import Shape, Weights, linear
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
    """As ``decoder.decode``."""
    x_BD, change_BD, dtype, eps = (
        F.embedding(token_B, weights.embed_VD),
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
