"""The forward of all members with Triton kernels between the matmuls: residual and norm, rotation,
gate, each in one pass forward and one backward.

They are the trainer's own (``policy.kernels``). Under autocast they write the half-precision
numbers that the next product would round to anyway.

Axes: S members, R rows of a member, L tokens of a row, M = R x L, D hidden size, C head size.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from counterpoise.arena.forward import attend_causal
from counterpoise.policy.kernels.triton_gate import open_joined_gate
from counterpoise.policy.kernels.triton_norm import add_norm
from counterpoise.policy.kernels.triton_rotate import rotate
from counterpoise.policy.mix import product_dtype
from counterpoise.sampling.decoder import Layer, Shape, Weights, linear


def hidden_of_embeddings(
    weights: Weights,
    shape: Shape,
    x_SRLD: Tensor,
    cos_LC: Tensor,
    sin_LC: Tensor,
    cache: list[tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """As ``forward.hidden_of_embeddings``."""
    num_rows, length = x_SRLD.shape[1:3]
    turn = cos_LC[None, :length], sin_LC[None, :length]
    dtype = product_dtype(weights.head_DV, weights.head_DV)
    normed_of = partial(add_norm, eps=shape.eps, dtype=dtype)
    x_SMD, change = x_SRLD.flatten(1, 2), None
    for layer in weights.layers:
        x_SMD, normed_SMD = normed_of(x_SMD, change, layer.input_norm)
        q, k, v = heads(layer, shape, normed_SMD, length, turn)
        mixed_SMF = attend_causal(shape, q, k, v, cache).reshape(*x_SMD.shape[:2], -1)
        change = linear(mixed_SMF, layer.out, layer.out_bias)
        x_SMD, normed_SMD = normed_of(x_SMD, change, layer.middle_norm)
        opened_SMF = open_joined_gate(linear(normed_SMD, layer.gate_up, layer.gate_up_bias))
        change = linear(opened_SMF, layer.down, layer.down_bias)
    _, out_SMD = add_norm(x_SMD, change, weights.norm_D, shape.eps, x_SMD.dtype)
    return out_SMD.unflatten(1, (num_rows, length))


def heads(
    layer: Layer, shape: Shape, normed_SMD: Tensor, length: int, turn: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values, [S * R, heads, L, C]."""
    qkv = linear(normed_SMD, layer.qkv, layer.qkv_bias)
    rows = qkv.view(-1, length, shape.num_heads + 2 * shape.num_kv_heads, shape.head_size)
    q, k, v = rows.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 2)
    if layer.query_norm is not None and layer.key_norm is not None:
        _, q = add_norm(q, None, layer.query_norm, shape.eps, qkv.dtype)
        _, k = add_norm(k, None, layer.key_norm, shape.eps, qkv.dtype)
    q, k = rotate(q, k, *turn, qkv.dtype)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
