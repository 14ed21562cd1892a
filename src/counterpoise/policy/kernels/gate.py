"""``silu(gate) * up`` and its backward, whoever computes them: the kernels of a device give two
functions, and get what autograd calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def differentiable(
    opened: Callable[[Tensor, Tensor], Tensor],
    open_back: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None],
) -> tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """``open_gate(gate, up)``, and the same of one tensor whose rows are gate and up, one after the
    other.

    Args:
        opened: ``silu(gate) * up``; both have the same steps, which need not be those of a tensor
            of their own.
        open_back: writes the gradients of gate and up, the last two, from them and that of the
            result.
    """

    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
            gate, up = gate.contiguous(), up.contiguous()
            ctx.save_for_backward(gate, up)
            return opened(gate, up)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
            gate, up = ctx.saved_tensors
            d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
            open_back(gate, up, d_out.contiguous(), d_gate, d_up)
            return d_gate, d_up

    class JoinedGate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate_up: Tensor) -> Tensor:
            gate_up = gate_up.contiguous()
            ctx.save_for_backward(gate_up)
            return opened(*gate_up.chunk(2, -1))

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, d_out: Tensor) -> Tensor:
            (gate_up,) = ctx.saved_tensors
            d_gate_up = torch.empty_like(gate_up)
            (gate, up), (d_gate, d_up) = gate_up.chunk(2, -1), d_gate_up.chunk(2, -1)
            open_back(gate, up, d_out.contiguous(), d_gate, d_up)
            return d_gate_up

    return Gate.apply, JoinedGate.apply  # pyright: ignore[reportReturnType]
