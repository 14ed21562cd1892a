"""Attention of ``layers`` on values and their changes in one kernel: scores stay on the chip.

With e = exp(s - m) for a running top m, z = sum e, w_c = e ds_c and ds_c = dq_c k + q dk_c:
o = (sum e v) / z and do_c = (sum w_c v + e dv_c - (sum w_c) o) / z; what is summed fades by
exp(earlier m - new m). Sums are float32; e and w_c are rounded to the dtype of v before products
and sums alike. Axes as in ``layers``.
"""

# pyright: reportIndexIssue=false, reportMissingImports=false, reportArgumentType=false, reportUnusedExpression=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from counterpoise.ledger.calculus.layers import Attention
from counterpoise.policy.pack import Whole
from counterpoise.policy.prefix import Prefixes

COUNTS = ["num_prompts", "width", "length", "num_slots"]


class Blocks(NamedTuple):
    """Changes, queries and keys of one program, whose sums are in registers, and how it is
    compiled.
    """

    changes: int
    queries: int
    keys: int
    num_warps: int
    num_stages: int


def _blocks(dtype: torch.dtype, size: int) -> Blocks:
    if dtype.itemsize > 2 or size > 128:
        return Blocks(1, 16, 16, 8, 1)
    # three changes: 96 KiB of shared memory, which cards with 100 KiB have too
    return Blocks(3 if size <= 64 else 1, 64, 32, 4, 2)


class Rows(NamedTuple):
    """Of flat tokens: ``num_prompts`` rows of ``width`` tokens that see themselves alone, then
    ``num_rows`` of ``length`` tokens that see the first tokens of a prompt too.
    """

    num_prompts: int
    width: int
    num_rows: int
    length: int
    prompt_N: Tensor
    length_P: Tensor


def attention_of(layout: Prefixes | Whole) -> Attention:
    """As ``layers.attention_of``."""
    if isinstance(layout, Prefixes):
        rows = Rows(*layout.ids_PW.shape, *layout.ids_NS.shape, layout.prompt_N, layout.length_P)
    else:
        unread = torch.zeros(1, dtype=torch.long, device=layout.ids_NL.device)
        rows = Rows(*layout.ids_NL.shape, 0, 1, unread, unread)
    return lambda q, k, v: attend(q, k, v, rows)


def attend(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """Of queries [M, A, H, E], scaled, and keys and values [M, A, K, E] that are parts of one
    tensor, [M, A, H E].
    """
    (num_tokens, num_slots, num_heads, size), num_kv = q.shape, k.shape[2]
    assert q.stride() == k.stride() == v.stride() == (*q.stride()[:2], size, 1)
    out_MAF = q.new_empty(num_tokens, num_slots, num_heads * size)
    blocks = _blocks(q.dtype, size)
    num_groups = triton.cdiv(num_slots - 1, blocks.changes)
    per_prompt, per_row = (
        triton.cdiv(tokens * num_heads // num_kv, blocks.queries)
        for tokens in (rows.width, rows.length)
    )
    num_blocks = rows.num_prompts * per_prompt + rows.num_rows * per_row
    _attend[(num_blocks, num_kv, num_groups)](
        *(q, k, v, out_MAF, rows.prompt_N, rows.length_P),
        *(rows.num_prompts, rows.width, rows.length, num_slots, *q.stride()[:2]),
        *(num_heads // num_kv, num_heads, size, triton.cdiv(num_slots - 1, num_groups)),
        *(max(16, triton.next_power_of_2(size)), blocks.queries, blocks.keys),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )
    return out_MAF


@triton.jit(do_not_specialize=COUNTS)
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    prompt_ptr,
    length_ptr,
    num_prompts,
    width,
    length,
    num_slots,
    step,
    slot_step,
    G: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """A block of queries of a row's key-value head, the G heads of a token side by side, along C
    changes; the last group of changes begins early where it would be too short.
    """
    block, kv_head = tl.program_id(0), tl.program_id(1)
    first = tl.minimum(tl.program_id(2) * C, num_slots - 1 - C) + 1
    per_prompt, per_row = tl.cdiv(width * G, QUERIES), tl.cdiv(length * G, QUERIES)
    later = block - num_prompts * per_prompt  # >= 0 for those that continue a prompt
    continues = later >= 0
    row = tl.where(continues, later // per_row, block // per_prompt).to(tl.int64)
    part = tl.where(continues, later % per_row, block % per_prompt)
    prompt = tl.load(prompt_ptr + row, mask=continues, other=0)
    num_before = tl.load(length_ptr + prompt, mask=continues, other=0).to(tl.int32)
    before = prompt.to(tl.int64) * width
    own = tl.where(continues, num_prompts * width + row * length, row * width)
    num_own = tl.where(continues, length, width)

    query = part * QUERIES + tl.arange(0, QUERIES)
    column, head = query // G, kv_head * G + query % G
    e = tl.arange(0, SIZE)
    is_query = (column < num_own)[:, None] & (e < E)[None, :]
    q_at = ((own + column) * step + head * E)[:, None] + e[None, :]
    q = tl.load(q_ptr + q_at, mask=is_query, other=0.0)
    d_q, mixed_c, total_c = (), (), ()
    for c in tl.static_range(C):
        d_q += (tl.load(q_ptr + q_at + (first + c) * slot_step, mask=is_query, other=0.0),)
        mixed_c += (tl.zeros((QUERIES, SIZE), tl.float32),)
        total_c += (tl.zeros((QUERIES,), tl.float32),)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, SIZE), tl.float32)

    num_seen = num_before + tl.minimum((part * QUERIES + QUERIES - 1) // G + 1, num_own)
    for start in range(0, num_seen, KEYS):
        key = start + tl.arange(0, KEYS)
        token = tl.where(key < num_before, before + key, own + key - num_before)
        key_at = (token * step + kv_head * E)[:, None] + e[None, :]
        is_key = (key < num_seen)[:, None] & (e < E)[None, :]
        k = tl.trans(tl.load(k_ptr + key_at, mask=is_key, other=0.0))
        v = tl.load(v_ptr + key_at, mask=is_key, other=0.0)
        score = tl.dot(q, k, input_precision="ieee")
        is_seen = (key - num_before)[None, :] <= column[:, None]
        score = tl.where(is_seen, score, -float("inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        share = tl.exp(score - higher[:, None])
        fade = tl.exp(top - higher)
        top = higher
        rounded = share.to(v.dtype)
        total = total * fade + tl.sum(rounded.to(tl.float32), 1)
        mixed = tl.dot(rounded, v, mixed * fade[:, None], input_precision="ieee")
        new_mixed_c, new_total_c = (), ()
        for c in tl.static_range(C):
            at_c = key_at + (first + c) * slot_step
            d_k = tl.trans(tl.load(k_ptr + at_c, mask=is_key, other=0.0))
            d_v = tl.load(v_ptr + at_c, mask=is_key, other=0.0)
            d_score = tl.dot(d_q[c], k, input_precision="ieee")
            d_score = tl.dot(q, d_k, d_score, input_precision="ieee")
            weight = (share * d_score).to(v.dtype)
            new_total_c += (total_c[c] * fade + tl.sum(weight.to(tl.float32), 1),)
            moved = tl.dot(weight, v, mixed_c[c] * fade[:, None], input_precision="ieee")
            new_mixed_c += (tl.dot(rounded, d_v, moved, input_precision="ieee"),)
        mixed_c, total_c = new_mixed_c, new_total_c

    mixed = mixed / total[:, None]
    out_at = ((own + column) * num_slots * (H * E) + head * E)[:, None] + e[None, :]
    kind = out_ptr.dtype.element_ty
    if tl.program_id(2) == 0:
        tl.store(out_ptr + out_at, mixed.to(kind), mask=is_query)
    for c in tl.static_range(C):
        moved = (mixed_c[c] - total_c[c][:, None] * mixed) / total[:, None]
        tl.store(out_ptr + out_at + (first + c) * (H * E), moved.to(kind), mask=is_query)
