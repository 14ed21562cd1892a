"""A bit-exact snapshot of weights, optimizer and random state, and the way back: for updates that
are tried and undone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Snapshot(NamedTuple):
    """Copies; nothing in it shares memory with the model or the optimizer."""

    tensors: dict[str, Tensor]
    grads: dict[str, Tensor]
    slots: list[dict[str, Any] | None]
    settings: list[dict[str, Any]]
    modes: list[bool]
    cpu_rng: Tensor
    cuda_rng: list[Tensor]


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    """Everything a training update reads and changes: parameters, buffers, gradients, the
    optimizer's state and settings, torch's RNG.

    >>> layer = nn.Linear(1, 1)
    >>> optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    >>> saved = snapshot(layer, optimizer)
    >>> layer(torch.ones(1)).sum().backward()
    >>> optimizer.step()
    >>> restore(saved, layer, optimizer)
    >>> torch.equal(layer.weight, saved.tensors["weight"]), len(optimizer.state), layer.weight.grad
    (True, 0, None)
    """
    return Snapshot(
        tensors={name: value.detach().clone() for name, value in _tensors(model).items()},
        grads={name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        slots=[
            _copy(optimizer.state[p]) if p in optimizer.state else None
            for p in _parameters(optimizer)
        ],
        settings=[
            _copy({key: value for key, value in group.items() if key != "params"})
            for group in optimizer.param_groups
        ],
        modes=[module.training for module in model.modules()],
        cpu_rng=torch.get_rng_state(),
        cuda_rng=torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    )


@torch.no_grad()
def restore(saved: Snapshot, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put everything back, in place and bit for bit; the snapshot can be used again."""
    for name, value in _tensors(model).items():
        value.copy_(saved.tensors[name])
    for name, p in model.named_parameters():
        p.grad = saved.grads[name].clone() if name in saved.grads else None
    for p, slot in zip(_parameters(optimizer), saved.slots):
        if slot is None:
            optimizer.state.pop(p, None)
        else:
            optimizer.state[p] = _copy(slot)
    for group, settings in zip(optimizer.param_groups, saved.settings):
        group.update(_copy(settings))
    for module, mode in zip(model.modules(), saved.modes):
        module.training = mode
    torch.set_rng_state(saved.cpu_rng)
    if saved.cuda_rng:
        torch.cuda.set_rng_state_all(saved.cuda_rng)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _copy(slot: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in slot.items()
    }
