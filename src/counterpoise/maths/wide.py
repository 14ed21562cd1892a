"""The head's product without rounding its result: half-precision numbers, float32 sums.

Axes: M tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def wide_product(hidden_MD: Tensor, weight_VD: Tensor) -> Tensor:
    """``h W^T`` in float32 or wider, whatever autocast says.

    >>> wide_product(torch.ones(1, 2).bfloat16(), torch.ones(1, 2).bfloat16()).dtype
    torch.float32
    """
    with torch.autocast(hidden_MD.device.type, enabled=False):
        if weight_VD.dtype in (torch.float32, torch.float64):
            return hidden_MD @ weight_VD.T
        has_gradient = hidden_MD.requires_grad or weight_VD.requires_grad
        multiply = _WideProduct.apply if has_gradient and torch.is_grad_enabled() else _multiply
        return multiply(hidden_MD, weight_VD)


def _multiply(hidden_MD: Tensor, weight_VD: Tensor) -> Tensor:
    """``h W^T`` of half-precision numbers, in float32."""
    if weight_VD.is_cuda:
        return torch.mm(hidden_MD, weight_VD.T, out_dtype=torch.float32)
    return hidden_MD.float() @ weight_VD.float().T


class _WideProduct(torch.autograd.Function):
    """The same with the gradient that torch lacks for it: products in half precision, as autocast
    has them.
    """

    @staticmethod
    def forward(hidden_MD: Tensor, weight_VD: Tensor) -> Tensor:
        return _multiply(hidden_MD, weight_VD)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_MV: Tensor) -> tuple[Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_MD, weight_VD = ctx.saved_tensors
        grad_MV = grad_MV.to(weight_VD.dtype)
        return (
            grad_MV @ weight_VD if ctx.needs_input_grad[0] else None,
            grad_MV.T @ hidden_MD if ctx.needs_input_grad[1] else None,
        )
