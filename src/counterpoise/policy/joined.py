"""The projections of a decoder's layers in autocast's precision, those that read the same states
joined: all of them are cast together, instead of one by one as autocast does.

Products are those of autocast, up to the order of their sums, and gradients are cast back likewise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from counterpoise.policy.split import MOST_NUMBERS, parts_product, split_product, split_weights


class Product(NamedTuple):
    """One or more projections: ``x W^T + b``, results one after the other; ``multiply`` is another
    way to it, for a weight made for it.
    """

    weight: Tensor
    bias: Tensor | None
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear

    def of(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.weight, self.bias)


class Joined(NamedTuple):
    """Of one layer."""

    qkv: Product
    out: Product
    gate_up: Product
    down: Product


def projections(layer: Any) -> tuple[tuple[nn.Module, ...], ...]:
    """Of one layer, those that read the same states together."""
    attention, mlp = layer.self_attn, layer.mlp
    return (
        (attention.q_proj, attention.k_proj, attention.v_proj),
        (attention.o_proj,),
        (mlp.gate_proj, mlp.up_proj),
        (mlp.down_proj,),
    )


def can_join(layers: Sequence[Any]) -> bool:
    """Whether every projection is no more than its float32 weight and bias (adapters are)."""
    groups = [group for layer in layers for group in projections(layer)]
    return all(
        type(linear) is nn.Linear
        and not linear._forward_hooks
        and not linear._forward_pre_hooks
        and linear._parameters["weight"].dtype == torch.float32  # pyright: ignore[reportOptionalMemberAccess]
        and (linear._parameters["bias"] is None) == (group[0]._parameters["bias"] is None)
        for group in groups
        for linear in group
    )


def join_projections(layers: Sequence[Any], dtype: torch.dtype) -> list[Joined]:
    """The projections of every layer as they are now, in ``dtype``; differentiable."""
    groups = [group for layer in layers for group in projections(layer)]
    kinds: list[list[Any]] = [
        [linear._parameters[kind] for linear in group]
        for group in groups
        for kind in ("weight", "bias")
        if group[0]._parameters[kind] is not None
    ]
    sizes = tuple(tuple(part.shape[0] for part in parts) for parts in kinds)
    cast = iter(_Join.apply(dtype, sizes, *(part for parts in kinds for part in parts)))
    products = iter(
        [
            Product(next(cast), None if group[0]._parameters["bias"] is None else next(cast))
            for group in groups
        ]
    )
    return [Joined(*(next(products) for _ in Joined._fields)) for _ in layers]


def split_together(layers: Sequence[Any]) -> list[list[Any]]:
    """Layers whose projections are split at once: neighbours of the same sizes, as many as
    ``MOST_NUMBERS`` allow.
    """
    out: list[list[Any]] = []
    shapes: list[torch.Size] | None = None
    for layer in layers:
        weights: list[Any] = [one.weight for group in projections(layer) for one in group]
        here = [weight.shape for weight in weights]
        most = MOST_NUMBERS // sum(weight.numel() for weight in weights)
        if out and here == shapes and len(out[-1]) < most:
            out[-1].append(layer)
        else:
            out.append([layer])
        shapes = here
    return out


@torch.no_grad()
def split_projections(layers: Sequence[Any]) -> list[Joined]:
    """The projections of layers that are ``split_together``, in float32, for products on tensor
    cores; no gradient. Those of a layer too large to have in parts are split where they multiply.
    """
    kinds = list(zip(*(projections(layer) for layer in layers)))  # each of every layer
    biases = [[_bias(group) for group in groups] for groups in kinds]
    if len(layers) == 1:
        weights = [[_cat(group, "weight") for group in groups] for groups in kinds]
        multiply = split_product
    else:
        weights = [
            split_weights([[linear.weight for linear in group] for group in groups])
            for groups in kinds
        ]
        multiply = parts_product
    products = [
        [Product(weight, bias, multiply) for weight, bias in zip(*both)]
        for both in zip(weights, biases)
    ]
    return [Joined(*of_layer) for of_layer in zip(*products)]


def _bias(group: Sequence[nn.Module]) -> Tensor | None:
    return None if group[0].bias is None else _cat(group, "bias")


def _cat(group: Sequence[nn.Module], kind: str) -> Tensor:
    return torch.cat([getattr(linear, kind) for linear in group])


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, sizes: tuple[tuple[int, ...], ...], *parts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sizes, ctx.dtype = sizes, parts[0].dtype
        first = itertools.accumulate((len(lengths) for lengths in sizes), initial=0)
        outs = [
            parts[at].new_empty(sum(lengths), *parts[at].shape[1:], dtype=dtype)
            for at, lengths in zip(first, sizes)
        ]
        pieces = _pieces(outs, sizes)
        torch._foreach_copy_(pieces, parts)  # pyright: ignore[reportPrivateImportUsage]
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Any, ...]:
        pieces = _pieces(d_outs, ctx.sizes)
        grads = [torch.empty_like(piece, dtype=ctx.dtype) for piece in pieces]
        torch._foreach_copy_(grads, pieces)  # pyright: ignore[reportPrivateImportUsage]
        return None, None, *grads


def _pieces(joined: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The parts of each; one that is alone is the whole."""
    return [
        piece
        for whole, lengths in zip(joined, sizes)
        for piece in (whole.split(lengths) if len(lengths) > 1 else (whole,))
    ]
