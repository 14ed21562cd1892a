"""float32 as two numbers of 11 bits, for products on tensor cores.

``x = high + low`` with ``high`` rounded to TF32; ``low`` is exact, and tensor cores read 11 bits of
it. ``low W_high + high W_low + high W_high`` is then a product of 22 bits, in one product of three
times the length.

Axes: R rows, D size of a row.
"""

# pyright: reportIndexIssue=false, reportMissingImports=false, reportArgumentType=false, reportUnusedExpression=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def left_parts(x: Tensor) -> Tensor:
    """``[low, high, high]`` of the last axis, for the left side of a product."""
    return _parts(x, is_left=True)


def right_parts(x: Tensor) -> Tensor:
    """``[high, low, high]`` of the last axis, for the right side."""
    return _parts(x, is_left=False)


def _parts(x: Tensor, *, is_left: bool) -> Tensor:
    x, size = x.contiguous(), x.shape[-1]
    out = torch.empty(*x.shape[:-1], 3 * size, dtype=x.dtype, device=x.device)
    grid = (x.numel() // size, triton.cdiv(size, BLOCK))
    if x.numel():
        _split[grid](x, out, size, is_left, BLOCK)
    return out


@triton.jit
def _split(x_ptr, out_ptr, size, IS_LEFT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = d < size
    x = tl.load(x_ptr + row * size + d, mask=here, other=0.0)
    # 13 bits less, rounded to nearest
    high = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
    low = x - high
    at = out_ptr + row * 3 * size + d
    tl.store(at, low if IS_LEFT else high, mask=here)
    tl.store(at + size, high if IS_LEFT else low, mask=here)
    tl.store(at + 2 * size, high, mask=here)
