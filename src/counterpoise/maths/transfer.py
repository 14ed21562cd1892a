"""Copies between the host and an accelerator. A host that waits for the accelerator gives it
nothing to do: ``send`` does not wait, ``fetch`` waits once for many tensors.

Tensors that travel together travel as one block of bytes: a copy and a block of pinned memory take
the host longer than the few numbers in them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

# bytes at which each tensor of a block starts: kernels are compiled anew for tensors that start at
# other places
GRAIN = 16


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, without a wait.

    >>> send(torch.tensor([1, 2]), torch.device("cpu")).tolist()
    [1, 2]
    """
    return send_all([tensor], device)[0]


def send_all(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on a device, without a wait.

    To CUDA as one block of pinned memory: from other memory a copy may wait for the work before it.
    The block is filled once; torch gives its memory to nobody before the copy is over.

    >>> [part.tolist() for part in send_all([torch.ones(2), torch.arange(2)], torch.device("cpu"))]
    [[1.0, 1.0], [0, 1]]
    """
    here = [one for one in tensors if one.device.type == "cpu" and device.type == "cuda"]
    there: list[Tensor] = []
    if here:
        there = unpack_bytes(pack_bytes(here, pinned=True).to(device, non_blocking=True), here)
    sent = dict(zip(map(id, here), there))
    return [sent[id(one)] if id(one) in sent else one.to(device) for one in tensors]


def fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU: one block and one wait for each device that they come from.

    >>> fetch([torch.tensor([1, 2])])[0].tolist()
    [1, 2]
    """
    out = list(tensors)
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        places = [k for k, tensor in enumerate(tensors) if tensor.device == device]
        parts = [tensors[k].detach() for k in places]
        block = join_bytes(parts).to("cpu", non_blocking=True)
        torch.cuda.current_stream(device).synchronize()
        for k, part in zip(places, split_bytes(block, parts)):
            out[k] = part
    return [tensor.to("cpu") for tensor in out]


def pack_bytes(tensors: Sequence[Tensor], *, pinned: bool = False) -> Tensor:
    """Tensors of the CPU as one block of bytes; each starts at a multiple of ``GRAIN``.

    >>> pack_bytes([torch.ones(3).bool(), torch.zeros(1)]).shape
    torch.Size([20])
    """
    starts, total = _starts(tensors)
    block = torch.empty(total, dtype=torch.uint8, pin_memory=pinned)
    for start, tensor in zip(starts, tensors):
        _part(block, start, tensor).copy_(tensor)
    return block


def unpack_bytes(block: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of ``pack_bytes``, in the block's memory; ``like`` has their shapes and dtypes.

    >>> parts = [torch.tensor([True]), torch.tensor([[2.5]]), torch.tensor(7)]
    >>> [part.tolist() for part in unpack_bytes(pack_bytes(parts), parts)]
    [[True], [[2.5]], 7]
    """
    return [_part(block, start, tensor) for start, tensor in zip(_starts(like)[0], like)]


def join_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one device as one block of bytes, in one operation: the widest numbers first, so
    that each starts at a multiple of its size.
    """
    return torch.cat(
        [tensors[k].contiguous().view(-1).view(torch.uint8) for k in _by_width(tensors)]
    )


def split_bytes(block: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of ``join_bytes``, in the block's memory; ``like`` has their shapes and dtypes.

    >>> parts = [torch.tensor([True]), torch.tensor([[2.5]]), torch.tensor(7)]
    >>> [part.tolist() for part in split_bytes(join_bytes(parts), parts)]
    [[True], [[2.5]], 7]
    """
    order = _by_width(like)
    ends = itertools.accumulate((like[k].nbytes for k in order), initial=0)
    part_of = {k: _part(block, start, like[k]) for k, start in zip(order, ends)}
    return [part_of[k] for k in range(len(like))]


def _by_width(tensors: Sequence[Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda k: -tensors[k].itemsize)


def _starts(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each begins, and the bytes of all."""
    starts, end = [], 0
    for tensor in tensors:
        start = -(-end // GRAIN) * GRAIN
        starts.append(start)
        end = start + tensor.nbytes
    return starts, end


def _part(block: Tensor, start: int, like: Tensor) -> Tensor:
    return block[start : start + like.nbytes].view(like.dtype).view(like.shape)
