"""The gate of a decoder's MLP, ``silu(gate) * up``, in one pass, and its backward in another."""

# pyright: reportIndexIssue=false, reportMissingImports=false, reportArgumentType=false, reportUnusedExpression=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def open_gate(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``; the first factor is rounded to its dtype, as torch does."""
    return _Gate.apply(gate, up)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate, dtype=torch.promote_types(gate.dtype, up.dtype))
        _forward[(triton.cdiv(out.numel(), BLOCK),)](gate, up, out, out.numel(), BLOCK)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        _backward[(triton.cdiv(gate.numel(), BLOCK),)](
            gate, up, d_out.contiguous(), d_gate, d_up, gate.numel(), BLOCK
        )
        return d_gate, d_up


@triton.jit
def _forward(gate_ptr, up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    f = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = f < size
    gate = tl.load(gate_ptr + f, mask=here, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + f, mask=here, other=0.0).to(tl.float32)
    opened = (gate / (1 + tl.exp(-gate))).to(gate_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + f, (opened * up).to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def _backward(gate_ptr, up_ptr, d_out_ptr, d_gate_ptr, d_up_ptr, size, BLOCK: tl.constexpr):
    f = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = f < size
    gate = tl.load(gate_ptr + f, mask=here, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + f, mask=here, other=0.0).to(tl.float32)
    d_out = tl.load(d_out_ptr + f, mask=here, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-gate))
    opened = (gate * share).to(gate_ptr.dtype.element_ty).to(tl.float32)
    d_gate = d_out * up * share * (1 + gate * (1 - share))
    tl.store(d_gate_ptr + f, d_gate.to(d_gate_ptr.dtype.element_ty), mask=here)
    tl.store(d_up_ptr + f, (d_out * opened).to(d_up_ptr.dtype.element_ty), mask=here)
