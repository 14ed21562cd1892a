"""float32 products on tensor cores, without gradient: each factor is split into two numbers of TF32
(``kernels/triton_split``), which keeps 22 of its 24 bits; the sums are float32.

An H200 multiplies so at about twice the speed of float32 units. Attention of float32 does the same
inside torch's own kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_NUMBERS = 1 << 25  # of a weight that are split at once: 384 MiB of parts


def can_split(weight: Tensor) -> bool:
    """Whether a product with this weight is faster in parts: float32, on a GPU with TF32."""
    is_it = weight.is_cuda and weight.dtype == torch.float32 and torch.version.hip is None
    return is_it and torch.cuda.get_device_capability(weight.device)[0] >= 8


@torch.no_grad()
def split_product(x: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """``x W^T + b``, 22 bits of each factor, float32 sums; no gradient."""
    from counterpoise.policy.kernels.triton_split import left_parts, right_parts

    parts = left_parts(x)
    size = max(1, MOST_NUMBERS // weight_ND.shape[1])
    with tensor_cores():
        outs = [F.linear(parts, right_parts(some)) for some in weight_ND.split(size)]
    out = outs[0] if len(outs) == 1 else torch.cat(outs, -1)
    return out if bias_N is None else out.add_(bias_N)


@torch.no_grad()
def parts_product(x: Tensor, parts_NE: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """``split_product`` with a weight that is split already."""
    from counterpoise.policy.kernels.triton_split import left_parts

    with tensor_cores():
        out = F.linear(left_parts(x), parts_NE)
    return out if bias_N is None else out.add_(bias_N)


def product_by(weight_ND: Tensor) -> Callable[[Tensor], Tensor]:
    """``x -> x W^T`` as ``split_product`` has it, for many x: the weight is split once, where its
    parts may stay.
    """
    if weight_ND.numel() > MOST_NUMBERS:
        return partial(split_product, weight_ND=weight_ND)
    return partial(parts_product, parts_NE=split_weights([[weight_ND]])[0])


@torch.no_grad()
def split_weights(weights: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Weights of one input size for ``parts_product``: those of each list joined, all of them split
    at once.
    """
    from counterpoise.policy.kernels.triton_split import right_parts

    sizes = [sum(map(len, group)) for group in weights]
    parts = [part for group in weights for part in group]
    return list(right_parts(torch.cat(parts) if len(parts) > 1 else parts[0]).split(sizes))


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Products of float32 are those of TF32 for the block."""
    was_on = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = was_on
