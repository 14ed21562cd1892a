"""``sum_p P_p g_p^2`` of single rows, g the gradient that each row alone brings to a weight: in
closed form for the layers that a decoder has many of, by ``vmap`` for others.

Weights of one shape are taken together, so that a deep model costs few and large operations. The
gradients of head and embedding are never laid out: the one is an outer product, the other has no
more rows than the text has tokens.

Axes: K weights of one shape, S rows, L tokens of a row, D hidden size, V vocabulary, U distinct
tokens of each row, one row after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from counterpoise.ledger.calculus.optimizers import Response


class CannotBatch(ValueError):
    """A layer whose output does not tell the rows apart, or a weight that is used in two ways."""


class Call(NamedTuple):
    """One weight of a layer that was called: what the layer read, and the gradient at its
    output.
    """

    layer: nn.Module
    local: str
    name: str
    value: Tensor
    delta: Tensor


class HeadCall(NamedTuple):
    """The head: names of its weights where they are trained, what it read, and the gradient at its
    output.
    """

    weight: str | None
    bias: str | None
    hidden_SD: Tensor
    slope_SV: Tensor


def row_norms(calls: Sequence[Call], head: HeadCall, response: Response, most: int) -> Tensor:
    """The sum over all weights, [S].

    Args:
        calls: those of every layer but the head.
        response: P of every weight.
        most: numbers of gradients by row that may be alive.
    """
    by_name: dict[str, list[Call]] = {}
    for call in calls:
        by_name.setdefault(call.name, []).append(call)
    tables = {name: of[0] for name, of in by_name.items() if is_embedding(of[0].layer)}
    if any(len(by_name[name]) > 1 for name in tables) or head.weight in by_name.keys() - tables:
        raise CannotBatch("its embedding or head is used in two ways")
    out_S = _head_norm(head, response)
    for name, call in tables.items():
        out_S += _table_norm(call, head if name == head.weight else None, response[name])
    for name in by_name.keys() - tables:
        if len(by_name[name]) > 1:
            gradient_1S = torch.stack([_gradients([call]) for call in by_name[name]]).sum(0)
            out_S += _norm(gradient_1S, [response[name]])
    single = [of[0] for name, of in by_name.items() if name not in tables and len(of) == 1]
    for some in _of_one_shape(single, most):
        out_S += _norm(_gradients(some), [response[call.name] for call in some])
    return out_S


def is_embedding(layer: nn.Module | None) -> bool:
    """Whether it looks rows up and does nothing else."""
    return type(layer) is nn.Embedding and layer.max_norm is None and not layer.scale_grad_by_freq


def _head_norm(head: HeadCall, response: Response) -> Tensor:
    """The gradient of a row is ``slope^T hidden``."""
    square_SV, square_SD = head.slope_SV.square(), head.hidden_SD.to(head.slope_SV).square()
    out_S = torch.zeros_like(square_SV[:, 0])
    if head.weight is not None:
        rate = response[head.weight]
        out_S += (
            (square_SV @ rate.to(square_SV) * square_SD).sum(1)
            if isinstance(rate, Tensor)
            else rate * square_SV.sum(1) * square_SD.sum(1)
        )
    return out_S if head.bias is None else out_S + (square_SV * response[head.bias]).sum(1)


def _table_norm(call: Call, head: HeadCall | None, rate: Tensor | float) -> Tensor:
    """What an embedding adds: e^2 over the rows that were looked up, and 2 e (slope hidden) where
    it is the head's weight too.
    """
    assert isinstance(call.layer, nn.Embedding)
    num_rows, num_entries = len(call.value), call.layer.num_embeddings
    first_S1 = num_entries * torch.arange(num_rows, device=call.value.device)[:, None]
    place_U, index = distinct((first_S1 + call.value).flatten())
    row_U, token_U = place_U // num_entries, place_U % num_entries
    wide = torch.promote_types(call.delta.dtype, torch.float32)
    grad_UD = call.delta.new_zeros(len(place_U), call.delta.shape[-1], dtype=wide)
    grad_UD.index_add_(0, index, call.delta.flatten(0, -2).to(wide))
    if call.layer.padding_idx is not None:
        grad_UD.masked_fill_((token_U == call.layer.padding_idx)[:, None], 0)
    part_UD = grad_UD.square()
    if head is not None:
        slope_U1 = head.slope_SV[row_U, token_U, None]
        part_UD += 2 * grad_UD * (slope_U1 * head.hidden_SD[row_U].to(wide))
    part_UD = part_UD * (rate[token_U] if isinstance(rate, Tensor) else rate)
    return part_UD.new_zeros(num_rows).index_add_(0, row_U, part_UD.sum(1))


def distinct(value_M: Tensor) -> tuple[Tensor, Tensor]:
    """The different values, sorted, then 0 up to M of them; and which of them each is.

    As ``torch.unique`` without its wait: how many there are is known to the accelerator alone.

    >>> [part.tolist() for part in distinct(torch.tensor([7, 5, 7]))]
    [[5, 7, 0], [1, 0, 1]]
    """
    sorted_M, order_M = value_M.sort()
    number_M = (sorted_M[1:] != sorted_M[:-1]).long().cumsum(0)
    number_M = torch.nn.functional.pad(number_M, (1, 0))
    return (
        torch.zeros_like(value_M).scatter_(0, number_M, sorted_M),
        torch.empty_like(order_M).scatter_(0, order_M, number_M),
    )


def _of_one_shape(calls: Sequence[Call], most: int) -> Iterator[list[Call]]:
    """Calls whose gradients can be computed together, as many as ``most`` numbers allow."""
    groups: dict[Any, list[Call]] = {}
    for call in calls:
        weight = call.layer._parameters[call.local]
        assert weight is not None
        kind = _kind(call)
        alone = id(call.layer) if kind == "other" else None
        shapes = (weight.shape, call.value.shape, call.delta.shape)
        key = (kind, call.local, alone, weight.dtype, call.delta.dtype, *shapes)
        groups.setdefault(key, []).append(call)
    for (_, _, _, _, _, shape, *_), group in groups.items():
        size = max(1, most // (len(group[0].value) * shape.numel()))
        yield from (group[k : k + size] for k in range(0, len(group), size))


def _kind(call: Call) -> str:
    if isinstance(call.layer, nn.Linear):
        return "linear" if call.local == "weight" else "bias"
    is_norm = type(call.layer).__name__.endswith("RMSNorm") and call.local == "weight"
    return "norm" if is_norm and hasattr(call.layer, "variance_epsilon") else "other"


def _gradients(calls: Sequence[Call]) -> Tensor:
    """The gradients of the weights from each row alone, [K, S, ...]."""
    weight, kind = calls[0].layer._parameters[calls[0].local], _kind(calls[0])
    assert weight is not None
    if kind == "other":
        return torch.stack([_differentiate(call, weight) for call in calls])
    delta, value = (
        torch.stack(parts).flatten(2, -2)
        for parts in ([call.delta for call in calls], [call.value for call in calls])
    )
    if kind == "bias":
        return delta.to(weight.dtype).sum(2)
    if kind == "linear":
        return (delta.mT @ value.to(delta.dtype)).to(weight.dtype)
    wide = value.to(torch.promote_types(value.dtype, torch.float32))
    eps: Any = calls[0].layer.variance_epsilon
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (delta * unit.to(value.dtype)).sum(2)


def _differentiate(call: Call, weight: Tensor) -> Tensor:
    def of_row(value: Tensor, delta: Tensor) -> Tensor:
        def output(weight: Tensor) -> Tensor:
            named = {call.local: weight}
            return torch.func.functional_call(call.layer, named, (value[None],))[0]

        return torch.func.vjp(output, weight.detach())[1](delta)[0]

    return torch.vmap(of_row)(call.value, call.delta)


def _norm(gradient_KS: Tensor, rates: Sequence[Tensor | float]) -> Tensor:
    """sum_p P_p g_p^2 of each row, over all weights; in the gradient's memory."""
    square_KSP = gradient_KS.square_().flatten(2)
    if all(isinstance(rate, Tensor) for rate in rates):
        square_KSP *= torch.stack(rates).flatten(1)[:, None]  # pyright: ignore[reportArgumentType]
        return square_KSP.sum((0, 2))
    return torch.stack(
        [(square_SP * _flat(rate)).sum(1) for square_SP, rate in zip(square_KSP, rates)]
    ).sum(0)


def _flat(rate: Tensor | float) -> Tensor | float:
    return rate.flatten() if isinstance(rate, Tensor) else rate
