"""The gate of a decoder's MLP, ``silu(gate) * up``, in one pass, and its backward in another."""

# pyright: reportIndexIssue=false, reportMissingImports=false, reportArgumentType=false, reportUnusedExpression=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from counterpoise.policy.kernels.gate import differentiable

BLOCK = 512


def _opened(gate: Tensor, up: Tensor) -> Tensor:
    """The first factor is rounded to its dtype, as torch does."""
    dtype = torch.promote_types(gate.dtype, up.dtype)
    out = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    _forward[_grid(gate)](gate, up, out, gate.stride(-2), gate.shape[-1], BLOCK)
    return out


def _open_back(gate: Tensor, up: Tensor, d_out: Tensor, d_gate: Tensor, d_up: Tensor) -> None:
    step, size = gate.stride(-2), gate.shape[-1]
    _backward[_grid(gate)](gate, up, d_out, d_gate, d_up, step, size, BLOCK)


def _grid(gate: Tensor) -> tuple[int, int]:
    size = gate.shape[-1]
    return gate.numel() // size, -(-size // BLOCK)


@triton.jit
def _forward(gate_ptr, up_ptr, out_ptr, step, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = f < size
    gate = tl.load(gate_ptr + row * step + f, mask=here, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * step + f, mask=here, other=0.0).to(tl.float32)
    opened = (gate / (1 + tl.exp(-gate))).to(gate_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * size + f, (opened * up).to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def _backward(gate_ptr, up_ptr, d_out_ptr, d_gate_ptr, d_up_ptr, step, size, BLOCK: tl.constexpr):
    """Gradients have the steps of what they are gradients of."""
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here, at = f < size, row * step + f
    gate = tl.load(gate_ptr + at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=here, other=0.0).to(tl.float32)
    d_out = tl.load(d_out_ptr + row * size + f, mask=here, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-gate))
    opened = (gate * share).to(gate_ptr.dtype.element_ty).to(tl.float32)
    d_gate = d_out * up * share * (1 + gate * (1 - share))
    tl.store(d_gate_ptr + at, d_gate.to(d_gate_ptr.dtype.element_ty), mask=here)
    tl.store(d_up_ptr + at, (d_out * opened).to(d_up_ptr.dtype.element_ty), mask=here)


open_gate, open_joined_gate = differentiable(_opened, _open_back)
