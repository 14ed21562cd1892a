"""What attention of flat tokens (``prefix``) needs around its two products: tokens rotated and put
where they are read, and the results put back; one pass each way.

Gradients of a prompt's keys and values are added over its rollouts in float32, in a fixed order.

Axes: N rollouts, P distinct prompts, W prompt width, S response width, L = P W + N S flat tokens,
    H query heads, K key-value heads, G = H / K, C head size.
"""

# pyright: reportIndexIssue=false, reportMissingImports=false, reportArgumentType=false, reportUnusedExpression=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

COUNTS = ["cut", "width", "length"]


class Layout(NamedTuple):
    """Of flat tokens; the rows of prompt p are ``order_N[start_P1[p] : start_P1[p + 1]]``."""

    num_prompts: int
    width: int
    num_rows: int
    length: int
    order_N: Tensor
    start_P1: Tensor


def place(
    query_LHC: Tensor,
    key_LKC: Tensor,
    value_LKC: Tensor,
    cos_LC: Tensor,
    sin_LC: Tensor,
    layout: Layout,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Queries and keys rotated, and values, for both products, in ``dtype``: of the prompts
    [P, W, heads, C]; queries of the responses [N, G S, K, C], with keys and values of prompt and
    response [N, W + S, K, C].
    """
    return _Place.apply(query_LHC, key_LKC, value_LKC, cos_LC, sin_LC, layout, dtype)


def join(first_PWHC: Tensor, second_NMKC: Tensor, layout: Layout) -> Tensor:
    """Results of the two products as flat tokens, [L, H C]; M = G S."""
    return _Join.apply(first_PWHC, second_NMKC, layout)


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        layout: Layout,
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        sizes = query.shape[1], key.shape[1], query.shape[2]
        outs = _outs(layout, sizes, dtype, query.device)
        flat = [_dense_heads(part) for part in (query, key, value)]
        steps = (part.stride(0) // part.shape[2] for part in flat)
        _launch(_place, flat, outs, (cos, sin), layout, sizes, *steps)
        ctx.save_for_backward(cos, sin)
        ctx.layout, ctx.sizes = layout, sizes
        ctx.dtypes = query.dtype, key.dtype, value.dtype
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        num_heads, num_kv, size = ctx.sizes
        turns = ctx.saved_tensors  # once: layers that are computed again give them once
        length = turns[0].shape[0]
        flat = [
            torch.empty(length, heads, size, dtype=dtype, device=grads[0].device)
            for heads, dtype in zip((num_heads, num_kv, num_kv), ctx.dtypes)
        ]
        grads = tuple(grad.contiguous() for grad in grads)
        _launch(_gather, flat, grads, turns, ctx.layout, ctx.sizes)
        return *flat, None, None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, layout: Layout) -> Tensor:
        num_heads, num_kv, size = first.shape[2], second.shape[2], first.shape[3]
        ctx.layout, ctx.sizes, ctx.shapes = layout, (num_heads, num_kv, size), first.shape
        cut = layout.num_prompts * layout.width
        num_tokens = cut + layout.num_rows * layout.length
        out = torch.empty(num_tokens, num_heads * size, dtype=first.dtype, device=first.device)
        first, second = first.contiguous(), second.contiguous()
        _join[(num_tokens,)](*(first, second, out), *_constants(layout, ctx.sizes), False)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        (num_heads, num_kv, size), layout, d_out = ctx.sizes, ctx.layout, d_out.contiguous()
        cut, groups = layout.num_prompts * layout.width, num_heads // num_kv
        d_second = d_out.new_empty(layout.num_rows, groups * layout.length, num_kv, size)
        _join[(len(d_out),)](*(d_out, d_second, d_out), *_constants(layout, ctx.sizes), True)
        return d_out[:cut].view(ctx.shapes), d_second, None


def _outs(
    layout: Layout, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    num_heads, num_kv, size = sizes
    num_prompts, width, num_rows, length, *_ = layout
    shapes = [
        *((num_prompts, width, heads, size) for heads in (num_heads, num_kv, num_kv)),
        (num_rows, num_heads // num_kv * length, num_kv, size),
        *((num_rows, width + length, num_kv, size),) * 2,
    ]
    return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]


def _launch(
    kernel: Any,
    flat: Any,
    placed: Any,
    turns: Any,
    layout: Layout,
    sizes: tuple[int, int, int],
    *steps: int,
) -> None:
    kernel[(len(flat[0]),)](
        *(*flat, *placed, *turns, layout.order_N, layout.start_P1),
        *_constants(layout, sizes),
        *steps,
    )


def _dense_heads(part_LHC: Tensor) -> Tensor:
    """The tensor, if its heads lie one after the other, tokens at multiples of their size."""
    step, *rest = part_LHC.stride()
    is_dense = rest == [part_LHC.shape[2], 1] and step % part_LHC.shape[2] == 0
    return part_LHC if is_dense else part_LHC.contiguous()


def _constants(layout: Layout, sizes: tuple[int, int, int]) -> tuple[int, ...]:
    num_heads, num_kv, size = sizes
    blocks = (int(triton.next_power_of_2(n)) for n in (num_heads, num_kv, size // 2))
    return layout.num_prompts * layout.width, layout.width, layout.length, *sizes, *blocks


@triton.jit(do_not_specialize=COUNTS)
def _place(
    query_ptr,
    key_ptr,
    value_ptr,
    own_query_ptr,
    own_key_ptr,
    own_value_ptr,
    queries_ptr,
    keys_ptr,
    values_ptr,
    cos_ptr,
    sin_ptr,
    order_ptr,
    start_ptr,
    cut,
    width,
    length,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    QUERY_STEP: tl.constexpr,
    KEY_STEP: tl.constexpr,
    VALUE_STEP: tl.constexpr,
):
    """Steps from token to token are counted in heads."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = C // 2
    G: tl.constexpr = H // K
    kind = own_query_ptr.dtype.element_ty
    c = tl.arange(0, HALF)[None, :]
    h, k = tl.arange(0, HEADS)[:, None], tl.arange(0, KV_HEADS)[:, None]
    is_query, is_key = (h < H) & (c < half), (k < K) & (c < half)
    cos = tl.load(cos_ptr + token * C + c, mask=c < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * C + c, mask=c < half, other=0.0).to(tl.float32)
    source = query_ptr + (token * QUERY_STEP + h) * C + c
    a = tl.load(source, mask=is_query, other=0.0).to(tl.float32)
    b = tl.load(source + half, mask=is_query, other=0.0).to(tl.float32)
    query, query2 = (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)
    source = key_ptr + (token * KEY_STEP + k) * C + c
    a = tl.load(source, mask=is_key, other=0.0).to(tl.float32)
    b = tl.load(source + half, mask=is_key, other=0.0).to(tl.float32)
    key, key2 = (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)
    source = value_ptr + (token * VALUE_STEP + k) * C + c
    value = tl.load(source, mask=is_key, other=0.0).to(kind)
    value2 = tl.load(source + half, mask=is_key, other=0.0).to(kind)
    if token < cut:
        goal = own_query_ptr + (token * H + h) * C + c
        tl.store(goal, query, mask=is_query)
        tl.store(goal + half, query2, mask=is_query)
        own = (token * K + k) * C + c
        tl.store(own_key_ptr + own, key, mask=is_key)
        tl.store(own_key_ptr + own + half, key2, mask=is_key)
        tl.store(own_value_ptr + own, value, mask=is_key)
        tl.store(own_value_ptr + own + half, value2, mask=is_key)
        prompt = token // width
        for number in range(tl.load(start_ptr + prompt), tl.load(start_ptr + prompt + 1)):
            row = tl.load(order_ptr + number)
            at = ((row * (width + length) + token % width) * K + k) * C + c
            tl.store(keys_ptr + at, key, mask=is_key)
            tl.store(keys_ptr + at + half, key2, mask=is_key)
            tl.store(values_ptr + at, value, mask=is_key)
            tl.store(values_ptr + at + half, value2, mask=is_key)
    else:
        row, s = (token - cut) // length, (token - cut) % length
        goal = queries_ptr + (((row * G + h % G) * length + s) * K + h // G) * C + c
        tl.store(goal, query, mask=is_query)
        tl.store(goal + half, query2, mask=is_query)
        at = ((row * (width + length) + width + s) * K + k) * C + c
        tl.store(keys_ptr + at, key, mask=is_key)
        tl.store(keys_ptr + at + half, key2, mask=is_key)
        tl.store(values_ptr + at, value, mask=is_key)
        tl.store(values_ptr + at + half, value2, mask=is_key)


@triton.jit(do_not_specialize=COUNTS)
def _gather(
    query_ptr,
    key_ptr,
    value_ptr,
    own_query_ptr,
    own_key_ptr,
    own_value_ptr,
    queries_ptr,
    keys_ptr,
    values_ptr,
    cos_ptr,
    sin_ptr,
    order_ptr,
    start_ptr,
    cut,
    width,
    length,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """The backward of ``_place``: the first three are written, the six after them read."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = C // 2
    G: tl.constexpr = H // K
    c = tl.arange(0, HALF)[None, :]
    h, k = tl.arange(0, HEADS)[:, None], tl.arange(0, KV_HEADS)[:, None]
    is_query, is_key = (h < H) & (c < half), (k < K) & (c < half)
    cos = tl.load(cos_ptr + token * C + c, mask=c < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * C + c, mask=c < half, other=0.0).to(tl.float32)
    key, key2 = tl.zeros((KV_HEADS, HALF), tl.float32), tl.zeros((KV_HEADS, HALF), tl.float32)
    value, value2 = tl.zeros((KV_HEADS, HALF), tl.float32), tl.zeros((KV_HEADS, HALF), tl.float32)
    query, query2 = tl.zeros((HEADS, HALF), tl.float32), tl.zeros((HEADS, HALF), tl.float32)
    if token < cut:
        source = own_query_ptr + (token * H + h) * C + c
        query += tl.load(source, mask=is_query, other=0.0).to(tl.float32)
        query2 += tl.load(source + half, mask=is_query, other=0.0).to(tl.float32)
        own = (token * K + k) * C + c
        key += tl.load(own_key_ptr + own, mask=is_key, other=0.0).to(tl.float32)
        key2 += tl.load(own_key_ptr + own + half, mask=is_key, other=0.0).to(tl.float32)
        value += tl.load(own_value_ptr + own, mask=is_key, other=0.0).to(tl.float32)
        value2 += tl.load(own_value_ptr + own + half, mask=is_key, other=0.0).to(tl.float32)
        prompt = token // width
        for number in range(tl.load(start_ptr + prompt), tl.load(start_ptr + prompt + 1)):
            row = tl.load(order_ptr + number)
            at = ((row * (width + length) + token % width) * K + k) * C + c
            key += tl.load(keys_ptr + at, mask=is_key, other=0.0).to(tl.float32)
            key2 += tl.load(keys_ptr + at + half, mask=is_key, other=0.0).to(tl.float32)
            value += tl.load(values_ptr + at, mask=is_key, other=0.0).to(tl.float32)
            value2 += tl.load(values_ptr + at + half, mask=is_key, other=0.0).to(tl.float32)
    else:
        row, s = (token - cut) // length, (token - cut) % length
        source = queries_ptr + (((row * G + h % G) * length + s) * K + h // G) * C + c
        query += tl.load(source, mask=is_query, other=0.0).to(tl.float32)
        query2 += tl.load(source + half, mask=is_query, other=0.0).to(tl.float32)
        at = ((row * (width + length) + width + s) * K + k) * C + c
        key += tl.load(keys_ptr + at, mask=is_key, other=0.0).to(tl.float32)
        key2 += tl.load(keys_ptr + at + half, mask=is_key, other=0.0).to(tl.float32)
        value += tl.load(values_ptr + at, mask=is_key, other=0.0).to(tl.float32)
        value2 += tl.load(values_ptr + at + half, mask=is_key, other=0.0).to(tl.float32)
    kind = query_ptr.dtype.element_ty
    goal = query_ptr + (token * H + h) * C + c
    tl.store(goal, (query * cos + query2 * sin).to(kind), mask=is_query)
    tl.store(goal + half, (query2 * cos - query * sin).to(kind), mask=is_query)
    kind = key_ptr.dtype.element_ty
    goal = key_ptr + (token * K + k) * C + c
    tl.store(goal, (key * cos + key2 * sin).to(kind), mask=is_key)
    tl.store(goal + half, (key2 * cos - key * sin).to(kind), mask=is_key)
    kind = value_ptr.dtype.element_ty
    goal = value_ptr + (token * K + k) * C + c
    tl.store(goal, value.to(kind), mask=is_key)
    tl.store(goal + half, value2.to(kind), mask=is_key)


@triton.jit(do_not_specialize=COUNTS)
def _join(
    first_ptr,
    second_ptr,
    out_ptr,
    cut,
    width,
    length,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BACK: tl.constexpr,
):
    """Results of both products into ``out``, or, ``BACK``, ``out`` into those of the second."""
    token = tl.program_id(0).to(tl.int64)
    G: tl.constexpr = H // K
    c = tl.arange(0, 2 * HALF)[None, :]
    h = tl.arange(0, HEADS)[:, None]
    here = (h < H) & (c < C)
    flat = (token * H + h) * C + c
    if token < cut:
        if not BACK:
            tl.store(out_ptr + flat, tl.load(first_ptr + flat, mask=here), mask=here)
    else:
        row, s = (token - cut) // length, (token - cut) % length
        at = (((row * G + h % G) * length + s) * K + h // G) * C + c
        if BACK:
            tl.store(second_ptr + at, tl.load(out_ptr + flat, mask=here), mask=here)
        else:
            tl.store(out_ptr + flat, tl.load(second_ptr + at, mask=here), mask=here)
