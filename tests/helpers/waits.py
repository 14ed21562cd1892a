"""An accelerator that is not there: tensors of a CPU are taken to lie on it, and what would make
the host wait for it is written down.

A tensor lies on the accelerator, on the host, or is new (made from numbers): then it lies where it
is used. What is computed from a tensor lies where the tensor does; only ``send`` and ``fetch`` move
one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from counterpoise.maths import transfer

aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
READERS = ("tolist", "cpu", "numpy")  # on a CPU they read memory, or do nothing


class Accelerator(TorchDispatchMode):
    """``sends`` and ``fetches``: how often something was sent to it and fetched from it, many
    tensors at a time or one; ``faults``: other waits, and operations whose tensors lie apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sends, self.fetches, self.faults = 0, 0, []
        self._is_here: dict[int, bool] = {}  # storage -> on the accelerator, or on the host
        self._alive: list[Tensor] = []  # an address is not given twice

    def put(self, tensors: Iterable[Tensor], *, is_here: bool = True) -> None:
        for tensor in tensors:
            self._is_here[tensor.untyped_storage()._cdata] = is_here
            self._alive.append(tensor)

    def holds(self, tensor: Tensor) -> bool | None:
        return self._is_here.get(tensor.untyped_storage()._cdata)

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        return self.send_all([tensor], device)[0]

    def send_all(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        self.sends += 1
        out = [tensor.clone() for tensor in tensors]
        self.put(out)
        return out

    def fetch(self, tensors: list[Tensor]) -> list[Tensor]:
        self.fetches += any(map(self.holds, tensors))
        out = [tensor.clone() for tensor in tensors]
        self.put(out, is_here=False)
        return out

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        places = {self.holds(tensor) for tensor in inputs}
        if True in places and (func in WAITING or (func in INDEXING and _has_mask(args[1]))):
            self.faults.append(f"{func} waits")
        if {True, False} <= {self.holds(tensor) for tensor in inputs if tensor.ndim}:
            self.faults.append(f"{func} of tensors that lie apart")
        out = func(*args, **(kwargs or {}))
        if True in places or False in places:
            outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            self.put(outputs, is_here=True in places)
        return out


def _has_mask(indices: Iterable[Tensor | None]) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in indices)


@contextmanager
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """The package sends to it and fetches from it for the block."""
    mode = Accelerator()
    for name in ("send", "send_all", "fetch"):
        own = getattr(transfer, name)
        for key, module in list(sys.modules.items()):
            if key.startswith("counterpoise.") and getattr(module, name, None) is own:
                monkeypatch.setattr(module, name, getattr(mode, name))
    for name in READERS:
        monkeypatch.setattr(Tensor, name, _reader(mode, name))
    with mode:
        yield mode
    monkeypatch.undo()


def _reader(mode: Accelerator, name: str) -> Any:
    own = getattr(Tensor, name)

    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if mode.holds(tensor):
            mode.faults.append(f"{name} waits")
        return own(tensor, *args, **kwargs)

    return read
