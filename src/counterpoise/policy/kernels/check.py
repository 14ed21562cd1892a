"""Whether the C kernels compute on this machine what torch computes: compilers and processors are
many, and a wrong gradient is silent.

Axes: as in ``cpu_attention``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoise.policy.kernels.cpu import add_norm, open_gate
from counterpoise.policy.kernels.cpu_attention import Rows, attention

log = logging.getLogger("counterpoise.policy")
TOLERANCE = 1e-4  # of the largest number
EPS = 1e-6


@functools.cache
def agrees(num_heads: int, num_kv: int, head_size: int, hidden_size: int, width: int) -> bool:
    """Whether norm, gate and attention of a model's sizes are torch's, and so are their gradients;
    a line in the log where they are not.
    """
    generator = torch.Generator().manual_seed(0)
    rows = Rows(*(2, 4, 3, 7), *(torch.tensor(value) for value in ([4, 3], [1, 0, 2], [0, 1, 3])))
    num_tokens = rows.num_prompts * rows.width + rows.num_rows * rows.length
    heads, sizes = (num_heads + 2 * num_kv) * head_size, (num_heads, num_kv, head_size)
    turns = torch.randn(num_tokens, head_size // 2, generator=generator).repeat(1, 2)
    cos, sin = turns.cos(), turns.sin()
    pairs: list[tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = [
        (
            lambda x, change, weight: sum_and_norm(*add_norm(x, change, weight, EPS)),
            plain_norm,
            [(num_tokens, hidden_size)] * 2 + [(hidden_size,)],
        ),
        (open_gate, lambda gate, up: F.silu(gate) * up, [(num_tokens, width)] * 2),
        (
            lambda qkv: attention((qkv,), cos, sin, rows, sizes, head_size**-0.5),
            lambda qkv: plain_attention(qkv, cos, sin, rows, sizes),
            [(num_tokens, heads)],
        ),
    ]
    for ours, plain, shapes in pairs:
        inputs = [torch.randn(shape, generator=generator) for shape in shapes]
        with not_a_number_where_unwritten():
            values = with_gradients(ours, inputs)
        if not all(map(is_close, values, with_gradients(plain, inputs))):
            log.warning(
                "update: the C kernels give other numbers than torch on this machine and are left"
                " aside; please report it."
            )
            return False
    return True


@contextmanager
def not_a_number_where_unwritten() -> Iterator[None]:
    """Tensors made empty hold NaN: memory used before may hold the right numbers, and would hide a
    kernel that leaves some of them out.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The function's value, and the gradient of its sum with fixed weights."""
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in inputs]
        out = function(*leaves)
        weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def is_close(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) <= TOLERANCE * float(other.abs().max())


def sum_and_norm(hidden: Tensor, normed: Tensor) -> Tensor:
    """Both results of ``add_norm`` in one tensor."""
    return torch.cat([hidden, normed])


def plain_norm(x: Tensor, change: Tensor, weight_D: Tensor) -> Tensor:
    hidden = x + change
    scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + EPS)
    return sum_and_norm(hidden, weight_D * (hidden * scale))


def plain_attention(
    qkv: Tensor, cos_LC: Tensor, sin_LC: Tensor, rows: Rows, sizes: tuple[int, int, int]
) -> Tensor:
    """Attention over all flat tokens at once, 0 where a prompt is padded."""
    num_heads, num_kv, size = sizes
    parts = qkv.unflatten(1, (-1, size)).transpose(0, 1).split([num_heads, num_kv, num_kv])
    query, key = (
        part * cos_LC + torch.cat([-part[..., size // 2 :], part[..., : size // 2]], -1) * sin_LC
        for part in parts[:2]
    )
    key, value = (part.repeat_interleave(num_heads // num_kv, 0) for part in (key, parts[2]))
    seen_LL = seen_tokens(rows)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen_LL, scale=size**-0.5)
    is_real_L = seen_LL.diagonal()[:, None]
    return torch.where(is_real_L, out.transpose(0, 1).flatten(1), 0)


def seen_tokens(rows: Rows) -> Tensor:
    """Which flat tokens each of them sees, [L, L]; a token that pads sees only the first."""
    num_prompts, width, num_rows, length = rows[:4]
    cut = num_prompts * width
    seen_LL = torch.zeros(cut + num_rows * length, cut + num_rows * length, dtype=torch.bool)
    for p in range(num_prompts):
        start, end = p * width, p * width + int(rows.length_P[p])
        seen_LL[start:end, start:end] = True
        for n in rows.order_N[rows.start_P1[p] : rows.start_P1[p + 1]].tolist():
            own = slice(cut + n * length, cut + (n + 1) * length)
            seen_LL[own, start:end] = seen_LL[own, own] = True
    seen_LL &= torch.ones_like(seen_LL).tril()
    seen_LL[~seen_LL.any(1), 0] = True
    return seen_LL
