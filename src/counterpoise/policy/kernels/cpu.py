"""What lies between the products of a decoder layer on a CPU: ``cpu.c``, built once with the
system's C compiler. Norm and gate here, attention in ``cpu_attention``; float32 only.

A tensor is cut into as many parts as torch has threads, where it is large enough for that. In a
thread that has torch to itself (``trainer.threads``) there is one part.

Axes: R rows (tokens, or heads of tokens), D normed size, F MLP width.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from counterpoise.policy.kernels.build import address, load_library
from counterpoise.policy.kernels.gate import differentiable

log = logging.getLogger("counterpoise.policy")
ARGUMENTS = {
    "add_norm": "ppppppfnn",
    "add_norm_back": "pppppppppnn",
    "open_gate": "pppnnn",
    "open_gate_back": "pppppnnn",
    "turn_heads": "ppppfnnnnnn",
    "turn_heads_back": "ppppfnnnnnn",
    "attention": "ppppnn",
    "attention_back": "ppppppnn",
}
SMALLEST = 1 << 16  # numbers of a part: fewer are computed before another thread wakes up


@functools.cache
def library() -> Any:
    """The loaded kernels, built first if need be; None, with one line in the log, where they cannot
    be had.
    """
    source, instead = Path(__file__).with_suffix(".c"), "the update works with torch's layers"
    return load_library(source, ARGUMENTS, log, "update", instead)


def in_parts(num: int, num_numbers: int, run: Callable[[int, int, int], None]) -> int:
    """``run(part, first, last)`` for parts of ``num`` things, in as many threads as torch has;
    how many parts there were.
    """
    num_parts = max(1, min(num, torch.get_num_threads(), num_numbers // SMALLEST))
    cuts = [num * part // num_parts for part in range(num_parts + 1)]
    if num_parts == 1:
        run(0, 0, num)
        return 1
    pool = _pool(os.getpid(), torch.get_num_threads())
    list(pool.map(run, range(num_parts), cuts[:-1], cuts[1:]))
    return num_parts


@functools.cache
def _pool(pid: int, num_threads: int) -> ThreadPoolExecutor:
    """Of this process: a fork has no threads."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix=f"kernels-{pid}")


def add_norm(
    x: Tensor,
    change: Tensor | None,
    weight_D: Tensor,
    eps: float,
    dtype: torch.dtype = torch.float32,
    num_copies: int = 1,
) -> tuple[Tensor, ...]:
    """``hidden = x + change`` and ``num_copies`` times ``weight * hidden / rms(hidden)``."""
    assert dtype == torch.float32
    return _AddNorm.apply(x, change, weight_D, eps, num_copies)  # pyright: ignore[reportReturnType]


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, change: Tensor | None, weight_D: Tensor, eps: float, num_copies: int
    ) -> tuple[Tensor, ...]:
        x = x.contiguous()
        size, change = x.shape[-1], None if change is None else change.contiguous()
        hidden, out = x if change is None else torch.empty_like(x), torch.empty_like(x)
        scale_R = x.new_empty(x.numel() // size)
        whole = [x, change, hidden, out]

        def run(_: int, first: int, last: int) -> None:
            x_at, change_at, hidden_at, out_at = (_from(part, first * size) for part in whole)
            library().add_norm(
                *(x_at, change_at, address(weight_D), hidden_at, out_at, _from(scale_R, first)),
                *(eps, last - first, size),
            )

        in_parts(len(scale_R), x.numel(), run)
        ctx.save_for_backward(hidden, weight_D, scale_R)
        ctx.set_materialize_grads(False)
        ctx.has_change = change is not None
        return hidden, out, *(out.detach() for _ in range(num_copies - 1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_hidden: Tensor | None, *d_outs: Tensor | None) -> tuple[Any, ...]:
        hidden, weight_D, scale_R = ctx.saved_tensors
        size, d_x = hidden.shape[-1], torch.empty_like(hidden)
        grads = [grad.contiguous() for grad in d_outs if grad is not None]
        grads = grads or [torch.zeros_like(hidden)]
        d_hidden = None if d_hidden is None else d_hidden.contiguous()
        whole = [*grads, *[None] * (3 - len(grads)), d_hidden, d_x]
        d_weight_PD = weight_D.new_zeros(torch.get_num_threads(), size)

        def run(part: int, first: int, last: int) -> None:
            library().add_norm_back(
                *(_from(hidden, first * size), address(weight_D), _from(scale_R, first)),
                *(_from(grad, first * size) for grad in whole),
                *(_from(d_weight_PD, part * size), last - first, size),
            )

        num_parts = in_parts(len(scale_R), hidden.numel(), run)
        d_weight_D = d_weight_PD[:num_parts].sum(0) if ctx.needs_input_grad[2] else None
        return d_x, d_x if ctx.has_change else None, d_weight_D, None, None


def _opened(gate: Tensor, up: Tensor) -> Tensor:
    step, size = gate.stride(-2), gate.shape[-1]
    out = gate.new_empty(gate.shape)

    def run(_: int, first: int, last: int) -> None:
        inputs = (_from(part, first * step) for part in (gate, up))
        library().open_gate(*inputs, _from(out, first * size), step, last - first, size)

    in_parts(gate.numel() // size, gate.numel(), run)
    return out


def _open_back(gate: Tensor, up: Tensor, d_out: Tensor, d_gate: Tensor, d_up: Tensor) -> None:
    step, size = gate.stride(-2), gate.shape[-1]

    def run(_: int, first: int, last: int) -> None:
        gate_at, up_at, to_gate, to_up = (
            _from(part, first * step) for part in (gate, up, d_gate, d_up)
        )
        d_out_at = _from(d_out, first * size)
        library().open_gate_back(gate_at, up_at, d_out_at, to_gate, to_up, step, last - first, size)

    in_parts(gate.numel() // size, gate.numel(), run)


def _from(tensor: Tensor | None, place: int) -> int | None:
    """The address of a number of a float32 tensor."""
    return None if tensor is None else tensor.data_ptr() + 4 * place


open_gate, open_joined_gate = differentiable(_opened, _open_back)
