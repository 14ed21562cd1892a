"""The precision in which a policy samples, is measured and is trained."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


def autocast(model: nn.Module) -> AbstractContextManager[object]:
    """bfloat16 matmuls on CUDA where the weights are float32; nothing elsewhere."""
    parameter = next(model.parameters())
    on = parameter.is_cuda and parameter.dtype == torch.float32
    return torch.autocast("cuda", torch.bfloat16) if on else nullcontext()
