"""Residual addition and root-mean-square norm in one pass, with their backward in another.

Every consumer of the norm has a copy of its own, so that their gradients are added in float32 by
the backward kernel rather than one by one in the consumers' precision.

Axes: R rows (tokens, or heads of tokens), D normed size, S members of an arena's stack (1
elsewhere), R / S rows of each, P programs per member.
"""

# pyright: reportIndexIssue=false, reportMissingImports=false, reportArgumentType=false, reportUnusedExpression=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # numbers that a program holds at a time, if a row is not longer
PROGRAMS_PER_PROCESSOR = 4  # of the backward: each has a row of the weight's gradient


def add_norm(
    x: Tensor,
    change: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    num_copies: int = 1,
) -> tuple[Tensor, ...]:
    """``hidden = x + change`` and ``num_copies`` times ``weight * hidden / rms(hidden)``, in
    ``dtype``; what is normed is rounded to hidden's own dtype before the weight, as Hugging Face
    does.

    Args:
        weight: D numbers, or S times as many: then x is S members one after the other, and each has
            its own.
    """
    return _AddNorm.apply(x, change, weight, eps, dtype, num_copies)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        change: Tensor | None,
        weight: Tensor,
        eps: float,
        dtype: torch.dtype,
        num_copies: int,
    ) -> tuple[Tensor, ...]:
        x = x.contiguous()
        has_change, size = change is not None, x.shape[-1]
        hidden, change = (
            (torch.empty_like(x, dtype=torch.promote_types(x.dtype, change.dtype)), change)
            if change is not None
            else (x, x)
        )
        out, tile, num_members = torch.empty_like(x, dtype=dtype), _tile(size), _members(weight, x)
        num_rows, weight = x.numel() // size // num_members, weight.contiguous()
        _forward[(triton.cdiv(num_rows, tile["ROWS"]), num_members)](
            *(x, change.contiguous(), weight, hidden, out, eps, num_rows, size, has_change), **tile
        )
        ctx.save_for_backward(hidden, weight)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.dtypes = eps, (x.dtype, change.dtype if has_change else None)
        return hidden, out, *(out.detach() for _ in range(num_copies - 1))

    @staticmethod
    def backward(ctx: Any, d_hidden: Tensor | None, *d_outs: Tensor | None) -> tuple[Any, ...]:
        hidden, weight = ctx.saved_tensors
        x_dtype, change_dtype = ctx.dtypes
        grads = [grad.contiguous() for grad in d_outs if grad is not None]
        size, needs_weight = hidden.shape[-1], ctx.needs_input_grad[2]
        tile, num_members = _tile(size), _members(weight, hidden)
        num_rows = hidden.numel() // size // num_members
        most = max(1, _most_programs(hidden.device) // num_members)
        num_programs = min(triton.cdiv(num_rows, tile["ROWS"]), most)
        d_x = torch.empty_like(hidden, dtype=x_dtype)
        has_own = change_dtype not in (None, x_dtype)
        d_change = torch.empty_like(hidden, dtype=change_dtype) if has_own else d_x
        parts_SPD = hidden.new_empty(num_members, num_programs, size, dtype=torch.float32)
        d_hidden = None if d_hidden is None else d_hidden.contiguous()
        _backward[(num_programs, num_members)](
            *(hidden, weight, *(grads + [hidden] * 3)[:3]),
            *(hidden if d_hidden is None else d_hidden, d_x, d_change, parts_SPD),
            *(ctx.eps, num_rows, size),
            *(len(grads), d_hidden is not None, has_own, needs_weight),
            **tile,
        )
        d_weight = parts_SPD.sum(1).view_as(weight).to(weight.dtype) if needs_weight else None
        return d_x, None if change_dtype is None else d_change, d_weight, None, None, None


@triton.jit(do_not_specialize=["num_rows"])
def _forward(
    x_ptr,
    change_ptr,
    weight_ptr,
    hidden_ptr,
    out_ptr,
    eps,
    num_rows,
    size,
    HAS_CHANGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program has rows of one member, ``num_rows`` each."""
    own = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    member = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK)[None, :]
    here = (own < num_rows) & (d < size)
    at = (member * num_rows + own) * size + d
    x = tl.load(x_ptr + at, mask=here, other=0.0)
    if HAS_CHANGE:
        change = tl.load(change_ptr + at, mask=here, other=0.0)
        x = (x.to(tl.float32) + change.to(tl.float32)).to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + at, x, mask=here)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / size + eps)[:, None]
    normed = (wide * scale).to(hidden_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + member * size + d, mask=d < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (weight * normed).to(out_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["num_rows"])
def _backward(
    hidden_ptr,
    weight_ptr,
    grad_ptr,
    grad2_ptr,
    grad3_ptr,
    d_hidden_ptr,
    d_x_ptr,
    d_change_ptr,
    parts_ptr,
    eps,
    num_rows,
    size,
    NUM_GRADS: tl.constexpr,
    HAS_D_HIDDEN: tl.constexpr,
    HAS_OWN: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    d = tl.arange(0, BLOCK)[None, :]
    in_row, member = d < size, tl.program_id(1).to(tl.int64)
    weight = tl.load(weight_ptr + member * size + d, mask=in_row, other=0.0).to(tl.float32)
    d_weight = tl.zeros((1, BLOCK), tl.float32)
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        own = start + tl.arange(0, ROWS)[:, None].to(tl.int64)
        here = (own < num_rows) & in_row
        at = (member * num_rows + own) * size + d
        x = tl.load(hidden_ptr + at, mask=here, other=0.0).to(tl.float32)
        d_out = tl.zeros((ROWS, BLOCK), tl.float32)
        if NUM_GRADS > 0:
            d_out += tl.load(grad_ptr + at, mask=here, other=0.0).to(tl.float32)
        if NUM_GRADS > 1:
            d_out += tl.load(grad2_ptr + at, mask=here, other=0.0).to(tl.float32)
        if NUM_GRADS > 2:
            d_out += tl.load(grad3_ptr + at, mask=here, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / size + eps)[:, None]
        normed = x * scale
        if NEEDS_WEIGHT:
            rounded = normed.to(hidden_ptr.dtype.element_ty).to(tl.float32)
            d_weight += tl.sum(d_out * rounded, 0)[None, :]
        d_normed = d_out * weight
        along = tl.sum(d_normed * normed, 1)[:, None] / size
        d_x = scale * (d_normed - normed * along)
        if HAS_D_HIDDEN:
            d_x += tl.load(d_hidden_ptr + at, mask=here, other=0.0).to(tl.float32)
        tl.store(d_x_ptr + at, d_x.to(d_x_ptr.dtype.element_ty), mask=here)
        if HAS_OWN:
            tl.store(d_change_ptr + at, d_x.to(d_change_ptr.dtype.element_ty), mask=here)
    if NEEDS_WEIGHT:
        part = member * tl.num_programs(0) + tl.program_id(0)
        tl.store(parts_ptr + part * size + d, d_weight, mask=in_row)


def _members(weight: Tensor, x: Tensor) -> int:
    """How many members have a weight of their own."""
    return weight.numel() // x.shape[-1]


@functools.cache
def _tile(size: int) -> dict[str, int]:
    block = int(triton.next_power_of_2(size))
    warps = 4 if block <= 2048 else 8 if block <= 4096 else 16
    return {"ROWS": max(1, TILE // block), "BLOCK": block, "num_warps": warps}


@functools.cache
def _most_programs(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 4
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
