"""Rotation and attention of flat tokens (``prefix``) or whole rows on a CPU, forward and backward.

A prompt attends to itself, a response to its prompt and to itself; whole rows are prompts without
responses. What is saved for the backward is of the size of the tokens; scores never are whole.

Axes: N rollouts, P distinct prompts, W prompt width, S response width, L = P W + N S flat tokens,
    H query heads, K key-value heads, J = H + 2 K, C head size.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoise.policy.kernels.build import address, structure
from counterpoise.policy.kernels.cpu import in_parts, library

HeadsStruct = structure(
    "HeadsStruct", pointer="query key value", whole="query_step key_step value_step"
)
LayoutStruct = structure("LayoutStruct", pointer="length order start", whole="P W N S H K C")


class Rows(NamedTuple):
    """Which tokens see each other; the rows of prompt p are ``order_N[start_P1[p] : start_P1[p +
    1]]``.
    """

    num_prompts: int
    width: int
    num_rows: int
    length: int
    length_P: Tensor
    order_N: Tensor
    start_P1: Tensor


def whole_rows(num_rows: int, length: int) -> Rows:
    """Rows of which every token sees those before it."""
    start_P1 = torch.zeros(num_rows + 1, dtype=torch.long)
    return Rows(num_rows, length, 0, 0, torch.full((num_rows,), length), start_P1[:0], start_P1)


def attention(
    parts: tuple[Tensor, ...],
    cos_LC: Tensor,
    sin_LC: Tensor,
    rows: Rows,
    sizes: tuple[int, int, int],
    scaling: float,
) -> Tensor:
    """``softmax(scaling * R q (R k)^T) v`` of flat tokens, [L, H C], with R the rotation.

    Args:
        parts: queries, keys and values, [L, heads C] each, or one tensor of them side by side.
        cos_LC: its two halves are equal, and those of ``sin_LC``.
        sizes: H, K and C.
    """
    return _Attention.apply(cos_LC, sin_LC, rows, sizes, scaling, *parts)  # pyright: ignore[reportReturnType]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        cos: Tensor,
        sin: Tensor,
        rows: Rows,
        sizes: tuple[int, int, int],
        scaling: float,
        *parts: Tensor,
    ) -> Tensor:
        (num_heads, num_kv, size), length = sizes, len(parts[0])
        cos, sin = cos.contiguous(), sin.contiguous()
        turned_JLC = cos.new_empty(num_heads + 2 * num_kv, length, size)
        dense = [_dense(part) for part in parts]
        heads = _heads(dense, sizes)
        places, number = (address(cos), address(sin), address(turned_JLC)), turned_JLC.numel()
        in_parts(
            *(length, number),
            lambda _, *span: library().turn_heads(
                ctypes.byref(heads), *places, scaling, length, *sizes, *span
            ),
        )
        out, log_sum_LH = (
            cos.new_empty(length, num_heads * size),
            cos.new_empty(length, num_heads),
        )
        layout = _layout(rows, sizes)
        goals = tuple(map(address, (turned_JLC, out, log_sum_LH)))
        in_parts(
            *(rows.num_prompts * num_kv, number),
            lambda _, *span: library().attention(ctypes.byref(layout), *goals, *span),
        )
        ctx.save_for_backward(cos, sin, turned_JLC, out, log_sum_LH)
        ctx.rows, ctx.sizes, ctx.scaling = rows, sizes, scaling
        ctx.widths = [part.shape[1] for part in parts]
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        cos, sin, turned_JLC, out, log_sum_LH = ctx.saved_tensors
        sizes, scaling, d_out = ctx.sizes, ctx.scaling, d_out.contiguous()
        d_turned_JLC, number = torch.empty_like(turned_JLC), turned_JLC.numel()
        layout = _layout(ctx.rows, sizes)
        goals = tuple(map(address, (turned_JLC, out, log_sum_LH, d_out, d_turned_JLC)))
        in_parts(
            *(ctx.rows.num_prompts * sizes[1], number),
            lambda _, *span: library().attention_back(ctypes.byref(layout), *goals, *span),
        )
        grads = [out.new_empty(len(out), width) for width in ctx.widths]
        heads = _heads(grads, sizes)
        places = tuple(map(address, (d_turned_JLC, cos, sin)))
        in_parts(
            *(len(out), number),
            lambda _, *span: library().turn_heads_back(
                *places, ctypes.byref(heads), scaling, len(out), *sizes, *span
            ),
        )
        return None, None, None, None, None, *grads


def _heads(parts: list[Tensor], sizes: tuple[int, int, int]) -> Any:
    """Where queries, keys and values lie, in three tensors or in one."""
    num_heads, num_kv, size = sizes
    if len(parts) == 1:
        parts = list(parts[0].split([num_heads * size, num_kv * size, num_kv * size], 1))
    return HeadsStruct(*(part.data_ptr() for part in parts), *(part.stride(0) for part in parts))


def _layout(rows: Rows, sizes: tuple[int, int, int]) -> Any:
    shape = rows.num_prompts, rows.width, rows.num_rows, rows.length
    return LayoutStruct(*map(address, rows[4:]), *shape, *sizes)


def _dense(part: Tensor) -> Tensor:
    """The tensor, if its rows are whole in memory."""
    return part if part.stride(1) == 1 else part.contiguous()
