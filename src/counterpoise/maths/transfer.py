"""Copies between the host and an accelerator. A host that waits for the accelerator gives it
nothing to do: ``send`` does not wait, ``fetch`` waits once for many tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device.

    To CUDA by way of pinned memory: from other memory a copy may wait for the work before it.

    >>> send(torch.tensor([1, 2]), torch.device("cpu")).tolist()
    [1, 2]
    """
    if tensor.device.type != "cpu" or device.type != "cuda":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU.

    >>> fetch([torch.tensor([1, 2])])[0].tolist()
    [1, 2]
    """
    out = [tensor.to("cpu", non_blocking=tensor.is_cuda) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return out
