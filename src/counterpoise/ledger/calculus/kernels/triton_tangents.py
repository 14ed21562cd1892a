"""Norm, rotation and gate of ``layers`` on values and their changes, each in one pass.

Sums and products are float32; what is stored is rounded once. Axes as in ``layers``.
"""

# pyright: reportIndexIssue=false, reportMissingImports=false, reportArgumentType=false, reportUnusedExpression=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GATE_BLOCK = 512


def add_norm(
    x_MAD: Tensor,
    more_MAD: Tensor | None,
    weight_D: Tensor,
    change_CD: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """``x += more`` in place; the norm of x and its changes in ``dtype``."""
    num_tokens, num_slots, size = x_MAD.shape
    out_MAD = torch.empty_like(x_MAD, dtype=dtype)
    block = triton.next_power_of_2(size)
    _norm[(num_tokens,)](
        *(x_MAD, x_MAD if more_MAD is None else more_MAD, weight_D),
        *(weight_D if change_CD is None else change_CD.contiguous(), out_MAD),
        *(eps, size, num_slots, more_MAD is not None, change_CD is not None, block),
        num_warps=4 if block <= 2048 else 8,
    )
    return out_MAD


def turn_(
    heads_MAHE: Tensor, cos_ME: Tensor, sin_ME: Tensor, num_keys: int, scaling: float
) -> Tensor:
    """Queries and keys rotated in place, queries scaled too; ``num_keys`` keys and as many values
    come last.
    """
    num_tokens, num_slots, num_heads, size = heads_MAHE.shape
    num, num_queries = num_heads - num_keys, num_heads - 2 * num_keys
    _turn[(num_tokens * num_slots,)](
        *(heads_MAHE, cos_ME.contiguous(), sin_ME.contiguous(), scaling),
        *(num_slots, num_heads, num_queries, num, size),
        *(triton.next_power_of_2(num), triton.next_power_of_2(size // 2)),
    )
    return heads_MAHE


def gate(gate_up_MAF: Tensor) -> Tensor:
    """``silu(g) u`` of a token's two halves, and its changes."""
    num_tokens, num_slots, size = gate_up_MAF.shape
    out_MAF = gate_up_MAF.new_empty(num_tokens, num_slots, size // 2)
    grid = (num_tokens, triton.cdiv(size // 2, GATE_BLOCK))
    _gate[grid](gate_up_MAF, out_MAF, size // 2, num_slots, GATE_BLOCK)
    return out_MAF


@triton.jit
def _norm(
    x_ptr,
    more_ptr,
    weight_ptr,
    change_ptr,
    out_ptr,
    eps,
    size,
    num_slots,
    HAS_MORE: tl.constexpr,
    HAS_CHANGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    d = tl.arange(0, BLOCK)
    here = d < size
    at = tl.program_id(0).to(tl.int64) * num_slots * size + d
    weight = tl.load(weight_ptr + d, mask=here, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=here, other=0.0)
    if HAS_MORE:
        more = tl.load(more_ptr + at, mask=here, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + more).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + at, x, mask=here)
    wide = x.to(tl.float32)
    rate = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    unit = wide * rate
    tl.store(out_ptr + at, (unit * weight).to(out_ptr.dtype.element_ty), mask=here)
    for slot in range(1, num_slots):
        at += size
        x = tl.load(x_ptr + at, mask=here, other=0.0)
        if HAS_MORE:
            more = tl.load(more_ptr + at, mask=here, other=0.0).to(tl.float32)
            x = (x.to(tl.float32) + more).to(x_ptr.dtype.element_ty)
            tl.store(x_ptr + at, x, mask=here)
        wide = x.to(tl.float32)
        moved = (wide - unit * (tl.sum(unit * wide, 0) / size)) * (rate * weight)
        if HAS_CHANGE:
            change_at = change_ptr + (slot - 1) * size + d
            moved += unit * tl.load(change_at, mask=here, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, moved.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def _turn(
    heads_ptr,
    cos_ptr,
    sin_ptr,
    scaling,
    num_slots,
    num_heads,
    num_queries,
    num,
    size,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    e = tl.arange(0, HALF)[None, :]
    half = size // 2
    in_half = e < half
    here = (head < num) & in_half
    at = heads_ptr + (row * num_heads + head) * size + e
    turn_at = (row // num_slots) * size + e
    left = tl.load(at, mask=here, other=0.0).to(tl.float32)
    right = tl.load(at + half, mask=here, other=0.0).to(tl.float32)
    cos_left = tl.load(cos_ptr + turn_at, mask=in_half, other=0.0).to(tl.float32)
    cos_right = tl.load(cos_ptr + turn_at + half, mask=in_half, other=0.0).to(tl.float32)
    sin_left = tl.load(sin_ptr + turn_at, mask=in_half, other=0.0).to(tl.float32)
    sin_right = tl.load(sin_ptr + turn_at + half, mask=in_half, other=0.0).to(tl.float32)
    factor = tl.where(head < num_queries, scaling, 1.0)
    new_left = (left * cos_left - right * sin_left) * factor
    new_right = (right * cos_right + left * sin_right) * factor
    tl.store(at, new_left.to(heads_ptr.dtype.element_ty), mask=here)
    tl.store(at + half, new_right.to(heads_ptr.dtype.element_ty), mask=here)


@triton.jit
def _gate(gate_up_ptr, out_ptr, size, num_slots, BLOCK: tl.constexpr):
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = f < size
    row = tl.program_id(0).to(tl.int64) * num_slots
    gate_at = gate_up_ptr + row * 2 * size + f
    out_at = out_ptr + row * size + f
    gate = tl.load(gate_at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(gate_at + size, mask=here, other=0.0).to(tl.float32)
    is_open = 1 / (1 + tl.exp(-gate))
    silu = gate * is_open
    slope = (is_open + silu * (1 - is_open)) * up
    tl.store(out_at, (silu * up).to(out_ptr.dtype.element_ty), mask=here)
    for _ in range(1, num_slots):
        gate_at += 2 * size
        out_at += size
        d_gate = tl.load(gate_at, mask=here, other=0.0).to(tl.float32)
        d_up = tl.load(gate_at + size, mask=here, other=0.0).to(tl.float32)
        tl.store(out_at, (slope * d_gate + silu * d_up).to(out_ptr.dtype.element_ty), mask=here)
