"""Rotary embedding of queries and keys in one pass; its backward is the rotation back.

Axes: B rows, L tokens of a row, H query heads, K key-value heads, C head size.
"""

# pyright: reportIndexIssue=false, reportMissingImports=false, reportArgumentType=false, reportUnusedExpression=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotate(
    query_BLHC: Tensor, key_BLKC: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by their positions, in ``dtype``.

    Args:
        cos: [B, L, C], or [1, L, C] for all rows; its two halves are equal.
        sin: likewise.
    """
    return _Rotate.apply(query_BLHC, key_BLKC, cos.contiguous(), sin.contiguous(), dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.dtypes = query.dtype, key.dtype
        return _turned(query, key, cos, sin, (dtype, dtype), back=False)

    @staticmethod
    def backward(ctx: Any, d_query: Tensor, d_key: Tensor) -> tuple[Tensor | None, ...]:
        return *_turned(d_query, d_key, *ctx.saved_tensors, ctx.dtypes, back=True), None, None, None


def _turned(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    back: bool,
) -> tuple[Tensor, Tensor]:
    (num_rows, length, num_heads, size), num_kv = query.shape, key.shape[2]
    query, key = _dense_heads(query), _dense_heads(key)
    outs = [
        torch.empty(part.shape, dtype=dtype, device=part.device)
        for part, dtype in zip((query, key), dtypes)
    ]
    blocks = [triton.next_power_of_2(number) for number in (num_heads, num_kv, size // 2)]
    _rotate[(num_rows * length,)](
        *(query, key, cos, sin, *outs),
        *(stride // size for part in (query, key) for stride in part.stride()[:3]),
        *(length, cos.shape[0] * cos.shape[1]),
        *(num_heads, num_kv, size, back),
        *blocks,
        num_warps=max(1, min(4, blocks[0] * blocks[2] // 64)),  # a token of small heads needs one
    )
    return outs[0], outs[1]


def _dense_heads(part: Tensor) -> Tensor:
    """The tensor, if its heads are whole in memory and begin at multiples of their size."""
    *strides, last = part.stride()
    is_dense = last == 1 and all(stride % part.shape[-1] == 0 for stride in strides)
    return part if is_dense else part.contiguous()


STRIDES = [f"{name}_{axis}" for name in ("query", "key") for axis in ("row", "token", "head")]


@triton.jit(do_not_specialize=[*STRIDES, "length", "num_turns"])
def _rotate(
    query_ptr,
    key_ptr,
    cos_ptr,
    sin_ptr,
    query_out_ptr,
    key_out_ptr,
    query_row,
    query_token,
    query_head,
    key_row,
    key_token,
    key_head,
    length,
    num_turns,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Strides are counted in heads: a multiple of C is what memory is read by in long words."""
    token = tl.program_id(0).to(tl.int64)
    row, at = token // length, token % length
    half: tl.constexpr = C // 2
    c = tl.arange(0, HALF)[None, :]
    turn = (token % num_turns) * C + c
    cos = tl.load(cos_ptr + turn, mask=c < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + turn, mask=c < half, other=0.0).to(tl.float32)
    if BACK:
        sin = -sin
    h = tl.arange(0, HEADS)[:, None]
    here = (h < H) & (c < half)
    source = query_ptr + (row * query_row + at * query_token + h * query_head) * C + c
    left = tl.load(source, mask=here, other=0.0).to(tl.float32)
    right = tl.load(source + half, mask=here, other=0.0).to(tl.float32)
    goal = query_out_ptr + (token * H + h) * C + c
    kind = query_out_ptr.dtype.element_ty
    tl.store(goal, (left * cos - right * sin).to(kind), mask=here)
    tl.store(goal + half, (right * cos + left * sin).to(kind), mask=here)
    k = tl.arange(0, KV_HEADS)[:, None]
    here = (k < K) & (c < half)
    source = key_ptr + (row * key_row + at * key_token + k * key_head) * C + c
    left = tl.load(source, mask=here, other=0.0).to(tl.float32)
    right = tl.load(source + half, mask=here, other=0.0).to(tl.float32)
    goal = key_out_ptr + (token * K + k) * C + c
    kind = key_out_ptr.dtype.element_ty
    tl.store(goal, (left * cos - right * sin).to(kind), mask=here)
    tl.store(goal + half, (right * cos + left * sin).to(kind), mask=here)
