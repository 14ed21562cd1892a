"""Triton kernels of a decode step: what lies between its matmuls, each read and written once.

They compute what ``decoder`` computes with torch, to rounding; the tests hold them against each
other. Triton comes with PyTorch's CUDA builds and is imported here and in ``triton_draw`` alone.

Axes: B rows, L cache slots, J = H + 2 K heads of a fused projection, H query heads, K key-value
    heads, G = H / K, C head size,
D hidden size.
"""

# pyright: reportIndexIssue=false, reportMissingImports=false, reportArgumentType=false, reportUnusedExpression=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS_BLOCK = 64  # cache slots attention reads at a time
# the same where a key has one query: as many running softmaxes, joined at the end. On one H200
# 16,384 rows of 4 heads of 24 took 114 us with it and 269 us with products of matrices
ALONE_BLOCK = 16
ALONE_SIZE = 64  # the largest head that takes this way


def add_norm(
    x_BD: Tensor, change_BD: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """``x += change`` in place, then its root-mean-square norm in ``dtype``.

    The weight has D numbers, or as many for each of S members, B / S rows each.
    """
    out_BD = torch.empty_like(x_BD, dtype=dtype)
    size = x_BD.shape[1]
    block = triton.next_power_of_2(size)
    change = x_BD if change_BD is None else change_BD
    _add_norm[(len(x_BD),)](
        x_BD,
        change,
        weight.contiguous(),
        out_BD,
        eps,
        size,
        len(x_BD) * size // weight.numel(),
        change_BD is not None,
        block,
        num_warps=_warps(block),
    )
    return out_BD


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm(
    x_ptr,
    change_ptr,
    weight_ptr,
    out_ptr,
    eps,
    size,
    num_rows,
    HAS_CHANGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``num_rows`` are those of a member."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    here = d < size
    x = tl.load(x_ptr + row * size + d, mask=here, other=0.0)
    if HAS_CHANGE:
        change = tl.load(change_ptr + row * size + d, mask=here, other=0.0)
        x = (x.to(tl.float32) + change.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * size + d, x, mask=here)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    normed = (wide * scale).to(x_ptr.dtype.element_ty).to(tl.float32)
    weight_ptr += row // num_rows * size
    weight = tl.load(weight_ptr + d, mask=here, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + d, (weight * normed).to(out_ptr.dtype.element_ty), mask=here)


def rotate_and_store(
    qkv_BF: Tensor,
    position_B: Tensor,
    cos_LC: Tensor,
    sin_LC: Tensor,
    keys_BKLC: Tensor,
    values_BKLC: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    num_heads: int,
) -> Tensor:
    """Rotated queries [B, H, C]; keys (rotated) and values go into the cache at each row's
    position. Norms have C numbers, or as many for each member.
    """
    num_kv, room, size = keys_BKLC.shape[1:]
    out_BHC = qkv_BF.new_empty(len(qkv_BF), num_heads, size)
    has_norm = query_norm is not None
    num_members = query_norm.numel() // size if query_norm is not None else 1
    norms = (part.contiguous() for part in (query_norm, key_norm) if part is not None)
    query_norm, key_norm = norms if has_norm else (qkv_BF, qkv_BF)
    _rotate_and_store[(len(qkv_BF),)](
        *(qkv_BF, position_B, cos_LC, sin_LC, keys_BKLC, values_BKLC),
        *(query_norm, key_norm, out_BHC),
        *(keys_BKLC.stride(0), room, eps, len(qkv_BF) // num_members),
        *(num_heads, num_kv, size, has_norm),
        triton.next_power_of_2(num_heads + 2 * num_kv),
        triton.next_power_of_2(size // 2),
    )
    return out_BHC


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_and_store(
    qkv_ptr,
    position_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    query_norm_ptr,
    key_norm_ptr,
    out_ptr,
    row_stride,
    room,
    eps,
    num_rows,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + row)
    j = tl.arange(0, HEADS)[:, None]
    c = tl.arange(0, HALF)[None, :]
    half: tl.constexpr = C // 2
    here = (j < H + 2 * K) & (c < half)
    source = qkv_ptr + row * ((H + 2 * K) * C) + j * C + c
    left = tl.load(source, mask=here, other=0.0)
    right = tl.load(source + half, mask=here, other=0.0)
    is_query, is_key = j < H, (j >= H) & (j < H + K)
    a, b = left.to(tl.float32), right.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / C + eps)[:, None]
        a = (a * scale).to(qkv_ptr.dtype.element_ty).to(tl.float32)
        b = (b * scale).to(qkv_ptr.dtype.element_ty).to(tl.float32)
        in_half = c < half
        query_norm_ptr += row // num_rows * C
        key_norm_ptr += row // num_rows * C
        a *= tl.where(
            is_query,
            tl.load(query_norm_ptr + c, mask=in_half, other=0.0),
            tl.load(key_norm_ptr + c, mask=in_half, other=0.0),
        ).to(tl.float32)
        b *= tl.where(
            is_query,
            tl.load(query_norm_ptr + half + c, mask=in_half, other=0.0),
            tl.load(key_norm_ptr + half + c, mask=in_half, other=0.0),
        ).to(tl.float32)
    turn = position * C + c
    in_half = c < half
    cos_a = tl.load(cos_ptr + turn, mask=in_half, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + turn + half, mask=in_half, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + turn, mask=in_half, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + turn + half, mask=in_half, other=0.0).to(tl.float32)
    turned_a, turned_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    query = out_ptr + row * (H * C) + j * C + c
    dtype = out_ptr.dtype.element_ty
    tl.store(query, turned_a.to(dtype), mask=here & is_query)
    tl.store(query + half, turned_b.to(dtype), mask=here & is_query)
    key = keys_ptr + row * row_stride + ((j - H) * room + position) * C + c
    tl.store(key, turned_a.to(dtype), mask=here & is_key)
    tl.store(key + half, turned_b.to(dtype), mask=here & is_key)
    value = values_ptr + row * row_stride + ((j - H - K) * room + position) * C + c
    is_value = here & (j >= H + K)
    tl.store(value, left, mask=is_value)
    tl.store(value + half, right, mask=is_value)


def attend(
    q_BHC: Tensor, position_B: Tensor, keys_BKLC: Tensor, values_BKLC: Tensor, scaling: float
) -> Tensor:
    """Attention of one query a head over the row's own cache slots 0 .. position, [B, H * C]; later
    slots are never read.
    """
    num_rows, num_heads, size = q_BHC.shape
    num_kv, room = keys_BKLC.shape[1:3]
    out_BF = q_BHC.new_empty(num_rows, num_heads * size)
    group = num_heads // num_kv
    columns = (q_BHC, position_B, keys_BKLC, values_BKLC, out_BF)
    strides = (keys_BKLC.stride(0), room, scaling)
    if group == 1 and size <= ALONE_SIZE:
        block = triton.next_power_of_2(size)
        _attend_alone[(num_rows, num_kv)](
            *(*columns, *strides, num_kv, size, block, ALONE_BLOCK), num_warps=1
        )
        return out_BF
    _attend[(num_rows, num_kv)](
        *columns,
        *strides,
        *(num_kv, group, size),
        *(
            max(16, triton.next_power_of_2(group)),
            max(16, triton.next_power_of_2(size)),
            KEYS_BLOCK,
        ),
        num_warps=4,
        num_stages=3,
    )
    return out_BF


@triton.jit
def _attend(
    q_ptr,
    position_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    row_stride,
    room,
    scaling,
    K: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_seen = tl.load(position_ptr + row) + 1
    g, c, slot = tl.arange(0, ROWS), tl.arange(0, SIZE), tl.arange(0, BLOCK)
    queries = row * (K * G * C) + (head * G + g)[:, None] * C + c[None, :]
    is_query = (g < G)[:, None] & (c < C)[None, :]
    q = tl.load(q_ptr + queries, mask=is_query, other=0.0)
    base = row * row_stride + head * room * C
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, SIZE), tl.float32)
    for start in range(0, num_seen, BLOCK):
        at = start + slot
        is_here = (at < num_seen)[:, None] & (c < C)[None, :]
        spot = base + at[:, None] * C + c[None, :]
        k = tl.load(keys_ptr + spot, mask=is_here, other=0.0)
        v = tl.load(values_ptr + spot, mask=is_here, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        score = tl.where((at < num_seen)[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        share = tl.exp(score - higher[:, None])
        fade = tl.exp(top - higher)
        total = total * fade + tl.sum(share, 1)
        mixed = mixed * fade[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
        top = higher
    mixed = mixed / total[:, None]
    tl.store(out_ptr + queries, mixed.to(out_ptr.dtype.element_ty), mask=is_query)


@triton.jit
def _attend_alone(
    q_ptr,
    position_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    row_stride,
    room,
    scaling,
    K: tl.constexpr,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One query per key-value head: every BLOCK-th slot has a softmax of its own."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_seen = tl.load(position_ptr + row) + 1
    c, slot = tl.arange(0, SIZE), tl.arange(0, BLOCK)
    in_head = c < C
    query = row * (K * C) + head * C + c
    q = tl.load(q_ptr + query, mask=in_head, other=0.0).to(tl.float32) * scaling
    spot = row * row_stride + head * room * C + slot[:, None] * C + c[None, :]
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    mixed = tl.zeros((BLOCK, SIZE), tl.float32)
    for start in range(0, num_seen, BLOCK):
        is_seen = start + slot < num_seen
        here = is_seen[:, None] & in_head[None, :]
        k = tl.load(keys_ptr + spot + start * C, mask=here, other=0.0).to(tl.float32)
        v = tl.load(values_ptr + spot + start * C, mask=here, other=0.0).to(tl.float32)
        score = tl.where(is_seen, tl.sum(k * q[None, :], 1), float("-inf"))
        higher = tl.maximum(top, score)
        level = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
        fade, share = tl.exp(top - level), tl.exp(score - level)
        total = total * fade + share
        mixed = mixed * fade[:, None] + share[:, None] * v
        top = higher
    weight = tl.exp(top - tl.max(top, 0))
    out = tl.sum(mixed * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out_ptr + query, out.to(out_ptr.dtype.element_ty), mask=in_head)


def gate(gate_up_BF: Tensor) -> Tensor:
    """``silu(gate) * up`` of a joined projection."""
    num_rows, width = gate_up_BF.shape
    out = gate_up_BF.new_empty(num_rows, width // 2)
    block = min(2048, triton.next_power_of_2(width // 2))
    grid = (num_rows, triton.cdiv(width // 2, block))
    _gated[grid](gate_up_BF, out, width // 2, block, num_warps=_warps(block))
    return out


@triton.jit
def _gated(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = f < size
    gate = tl.load(gate_up_ptr + row * 2 * size + f, mask=here, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + f, mask=here, other=0.0).to(tl.float32)
    opened = (gate / (1 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * size + f, (opened * up).to(out_ptr.dtype.element_ty), mask=here)


def _warps(block: int) -> int:
    return 4 if block <= 1024 else 8
