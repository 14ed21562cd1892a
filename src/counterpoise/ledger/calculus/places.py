"""Where a model keeps its parameters, and the model with other ones.

A walk through all modules takes the host about as long as a layer's forward; one account asks for
the places several times, and walks once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn


class Place(NamedTuple):
    """``module._parameters[key]``, by the first name that ``named_parameters`` has for it."""

    module: nn.Module
    key: str
    name: str
    own: nn.Parameter


_PLACES: WeakKeyDictionary[nn.Module, list[Place]] = WeakKeyDictionary()  # inside ``walked_once``


def places(model: nn.Module) -> list[Place]:
    """Every place of every parameter; a tied weight has several.

    >>> [place.name for place in places(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))]
    ['0.weight', '0.bias']
    """
    return _PLACES[model] if model in _PLACES else _walk(model)


def _walk(model: nn.Module) -> list[Place]:
    names: dict[int, str] = {}
    return [
        Place(module, key, names.setdefault(id(own), f"{prefix}.{key}".lstrip(".")), own)
        for prefix, module in model.named_modules()
        for key, own in module._parameters.items()
        if own is not None
    ]


@contextmanager
def walked_once(model: nn.Module) -> Iterator[None]:
    """For a block in which the model gets no other modules and parameters: its places are looked
    up once.
    """
    if model in _PLACES:
        yield
        return
    _PLACES[model] = _walk(model)
    try:
        yield
    finally:
        del _PLACES[model]


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's own parameters by name, as ``named_parameters`` gives them."""
    return {place.name: place.own for place in places(model)}


def at(model: nn.Module, params: dict[str, Tensor], fn: Callable[[Any], Any]) -> Any:
    """``fn(model)`` as if the model had other parameters; the model itself is not touched.

    >>> import torch
    >>> layer = nn.Linear(1, 1, bias=False)
    >>> at(layer, {"weight": torch.tensor([[3.0]])}, lambda m: m(torch.tensor([2.0]))).item()
    6.0
    """
    with swapped(model, params):
        return fn(model)


@contextmanager
def swapped(model: nn.Module, params: dict[str, Tensor]) -> Iterator[None]:
    """The model has other parameters for the block, a tied weight at all its places;
    ``torch.func.functional_call`` does the same and walks through the modules several times.
    """
    here = places(model)
    if unknown := params.keys() - {place.name for place in here}:
        raise KeyError(f"{type(model).__name__} has no parameters {sorted(unknown)}")
    held: list[tuple[dict[str, Any], Place]] = [(place.module._parameters, place) for place in here]
    try:
        for holder, place in held:
            holder[place.key] = params.get(place.name, place.own)
        yield
    finally:
        for holder, place in held:
            holder[place.key] = place.own
