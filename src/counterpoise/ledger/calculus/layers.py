"""The layers of a Llama-like decoder on values and their changes, for ``tangents``: each with its
derivative written out.

Axes as in ``tangents``: M tokens laid flat, A = 1 + C slots (the value, then its changes), D hidden
size, F features, H query heads, K key-value heads, G = H / K, E head size, B rows of an attention,
Q queries and L keys of a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from counterpoise.maths import many
from counterpoise.policy.pack import Whole
from counterpoise.policy.prefix import Prefixes, is_seen


class Moving(NamedTuple):
    """A parameter and its changes, [C, ...]; None where it stays."""

    value: Tensor
    change: Tensor | None


Lookup = Callable[[Tensor], Moving]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def embed(weight: Moving, ids_M: Tensor, num: int) -> Tensor:
    value_MD = F.embedding(ids_M, weight.value)
    x_MAD = value_MD.new_zeros(len(ids_M), 1 + num, value_MD.shape[1])
    x_MAD[:, 0] = value_MD
    if weight.change is not None:
        x_MAD[:, 1:] = weight.change[:, ids_M].transpose(0, 1)
    return x_MAD


def linear(x_MAD: Tensor, of: Lookup, *layers: nn.Linear) -> Tensor:
    """``[x, dx_c] W^T + [0, x dW_c^T]`` of layers side by side, biases likewise, [M, A, F] in the
    dtype of x.
    """
    weight_FD, change_CFD = _join([of(layer.weight) for layer in layers], x_MAD.dtype)
    out_MAF = (x_MAD.flatten(0, 1) @ weight_FD.T).view(*x_MAD.shape[:2], -1)
    if change_CFD is not None:
        _add_product(
            out_MAF.flatten(1)[:, len(weight_FD) :], x_MAD[:, 0], change_CFD.flatten(0, 1).T
        )
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if biases:
        bias_F, change_CF = _join([of(bias) for bias in biases], x_MAD.dtype)
        out_MAF[:, 0] += bias_F
        if change_CF is not None:
            out_MAF[:, 1:] += change_CF
    return out_MAF


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``out += left @ right``, of matrices or batches of them."""
    if not out.is_cuda:  # its libraries are slow at adding to rows that lie apart, and copy
        return out.add_(left @ right)
    return out.addmm_(left, right) if out.ndim == 2 else out.baddbmm_(left, right)


def _join(parts: Sequence[Moving], dtype: torch.dtype) -> Moving:
    changes = [part.change for part in parts]
    moving = [change for change in changes if change is not None]
    if len(moving) == len(parts) > 1 and moving[0].is_cuda:
        return join_at_once(parts, dtype)
    values = [part.value.to(dtype) for part in parts]
    if not moving:
        return Moving(_cat(values, 0), None)
    filled = [
        value.new_zeros(len(moving[0]), *value.shape) if change is None else change.to(dtype)
        for value, change in zip(values, changes)
    ]
    return Moving(_cat(values, 0), _cat(filled, 1))


def join_at_once(parts: Sequence[Moving], dtype: torch.dtype) -> Moving:
    """Values and changes that all move, cast and joined in one call."""
    pieces = [[part.value, *cast(Tensor, part.change)] for part in parts]
    sizes, shape = [len(part.value) for part in parts], parts[0].value.shape[1:]
    out = parts[0].value.new_empty(len(pieces[0]), sum(sizes), *shape, dtype=dtype)
    targets = [piece for slot in out for piece in slot.split(sizes)]
    many.copy_(targets, [piece for slot in zip(*pieces) for piece in slot])
    return Moving(out[0], out[1:])


def _cat(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def add_norm(
    x_MAD: Tensor, more_MAD: Tensor | None, module: Any, of: Lookup, dtype: torch.dtype
) -> Tensor:
    """``x += more`` in place, and the norm of x in ``dtype``."""
    if more_MAD is not None:
        x_MAD += more_MAD
    return norm(x_MAD, module, of).to(dtype)


def norm(x_MAD: Tensor, module: Any, of: Lookup) -> Tensor:
    """y = w n with n = x r, r = (mean x^2 + eps)^-1/2: dy = w r (dx - n mean(n dx)) + n dw.

    Axes between A and D are heads.
    """
    wide_MAD = x_MAD.to(torch.promote_types(x_MAD.dtype, torch.float32))
    value_M1D, change_MCD = wide_MAD[:, :1], wide_MAD[:, 1:]
    rate_M11 = torch.rsqrt(value_M1D.square().mean(-1, keepdim=True) + module.variance_epsilon)
    unit_M1D, weight = value_M1D * rate_M11, of(module.weight)
    out_MAD = torch.empty_like(wide_MAD)
    torch.mul(unit_M1D, weight.value, out=out_MAD[:, :1])
    mean_MC1 = (unit_M1D * change_MCD).mean(-1, keepdim=True)
    moved_MCD = torch.addcmul(change_MCD, unit_M1D, mean_MC1, value=-1, out=out_MAD[:, 1:]).mul_(
        rate_M11 * weight.value
    )
    if weight.change is not None:
        moved_MCD.addcmul_(unit_M1D, weight.change.unflatten(0, (-1, *[1] * (x_MAD.ndim - 3))))
    return out_MAD.to(x_MAD.dtype)


def heads(
    attention: Any, x_MAD: Tensor, of: Lookup, turn: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [M, A, H, E], scaled, and keys, and values [M, A, K, E]."""
    query, key, value = split_heads(attention, project_heads(attention, x_MAD, of))
    return _rotate(query, *turn) * attention.scaling, _rotate(key, *turn), value


def project_heads(attention: Any, x_MAD: Tensor, of: Lookup) -> Tensor:
    """Queries, keys and values before rotation, [M, A, H + 2 K, E]."""
    qkv = linear(x_MAD, of, attention.q_proj, attention.k_proj, attention.v_proj).unflatten(
        -1, (-1, attention.head_dim)
    )
    if hasattr(attention, "q_norm"):
        query, key, value = split_heads(attention, qkv)
        query, key = norm(query, attention.q_norm, of), norm(key, attention.k_norm, of)
        return torch.cat([query, key, value], 2)
    return qkv


def split_heads(attention: Any, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_keys = attention.k_proj.out_features // attention.head_dim
    return (qkv[:, :, : -2 * num_keys], qkv[:, :, -2 * num_keys : -num_keys], qkv[:, :, -num_keys:])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Linear in x: values and changes alike."""
    wide = x.to(cos.dtype)
    out = wide * cos
    left, right = wide.chunk(2, -1)
    low, high = sin.chunk(2, -1)
    out_left, out_right = out.chunk(2, -1)
    out_left.addcmul_(right, low, value=-1)
    out_right.addcmul_(left, high)
    return out.to(x.dtype)


def gate(gate_up_MAF: Tensor) -> Tensor:
    """y = silu(g) u: dy = silu'(g) u dg + silu(g) du."""
    gate_MAF, up_MAF = gate_up_MAF.chunk(2, -1)
    wide = torch.promote_types(gate_MAF.dtype, torch.float32)
    gate, up = gate_MAF[:, :1].to(wide), up_MAF[:, :1].to(wide)
    open_M1F = torch.sigmoid(gate)
    silu_M1F = gate * open_M1F
    slope_M1F = (open_M1F + silu_M1F * (1 - open_M1F)) * up
    out_MAF = torch.empty_like(gate_MAF, memory_format=torch.contiguous_format)
    out_MAF[:, :1] = silu_M1F * up
    torch.mul(gate_MAF[:, 1:], slope_M1F.to(gate_MAF.dtype), out=out_MAF[:, 1:]).addcmul_(
        up_MAF[:, 1:], silu_M1F.to(gate_MAF.dtype)
    )
    return out_MAF


def attention_of(layout: Prefixes | Whole) -> Attention:
    """Of queries [M, A, H, E], scaled, and keys and values [M, A, K, E], over what a token sees,
    [M, A, H E].
    """
    return _of_prompts(layout) if isinstance(layout, Prefixes) else _of_rows(layout)


def _of_rows(layout: Whole) -> Attention:
    num_rows, length = layout.ids_NL.shape
    seen_1LL = torch.ones(1, length, length, dtype=torch.bool, device=layout.ids_NL.device).tril()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.unflatten(0, (num_rows, length)) for part in (q, k, v))
        return _attend(q, k, v, seen_1LL).flatten(0, 1)

    return attention


def _of_prompts(layout: Prefixes) -> Attention:
    (num_prompts, width), num_rows = layout.ids_PW.shape, len(layout.ids_NS)
    cut = num_prompts * width
    seen_1WW = torch.ones(1, width, width, dtype=torch.bool, device=layout.ids_PW.device).tril()
    seen_NSL = is_seen(layout)[:, 0]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own_q, own_k, own_v = (part[:cut].unflatten(0, (num_prompts, width)) for part in (q, k, v))
        q, k, v = (part[cut:].unflatten(0, (num_rows, -1)) for part in (q, k, v))
        first = _attend(own_q, own_k, own_v, seen_1WW)
        k, v = (
            torch.cat([own.index_select(0, layout.prompt_N), part], 1)
            for own, part in ((own_k, k), (own_v, v))
        )
        second = _attend(q, k, v, seen_NSL)
        return torch.cat([part.flatten(0, 1) for part in (first, second)])

    return attention


def _masked_softmax(scores_BHQL: Tensor, is_seen_BQL: Tensor) -> Tensor:
    """Over the keys that are seen, in the dtype of the scores."""
    wide = scores_BHQL.to(torch.promote_types(scores_BHQL.dtype, torch.float32))
    wide = wide.masked_fill_(~is_seen_BQL[:, None], float("-inf"))
    return torch.softmax(wide, -1).to(scores_BHQL.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, is_seen_BQL: Tensor) -> Tensor:
    """o = P v with P = softmax(s): do = sum_l u_l (v_l - o) + P dv with u = P ds, ds = dq k + q dk.

    Args:
        q: [B, Q, A, H, E], scaled.
        k, v: [B, L, A, K, E].

    Returns [B, Q, A, H E]. The G query heads of a key-value head are taken as more queries of it.
    """
    (num_rows, num_queries, num_slots, num_heads, size), num_keys = q.shape, k.shape[3]
    batch, grouped = num_rows * num_keys, (num_keys, num_heads // num_keys)
    q = q.unflatten(3, grouped).permute(0, 3, 4, 1, 2, 5).reshape(batch, -1, num_slots, size)
    # [B K, G Q, A, E]
    # keys lie as the right side of a product: OpenBLAS takes five times as long for batches of
    # transposed ones
    k = k.permute(0, 3, 4, 2, 1).reshape(batch, size, num_slots, -1)  # [B K, E, A, L]
    v = v.permute(0, 3, 1, 2, 4).reshape(batch, -1, num_slots, size)  # [B K, L, A, E]
    q_value, k_value, v_value = q[:, :, 0], k[:, :, 0], v[:, :, 0]
    scores = (q_value @ k_value).view(num_rows, num_heads, num_queries, -1)
    share = _masked_softmax(scores, is_seen_BQL).view(batch, q.shape[1], -1)
    change = (q[:, :, 1:].flatten(1, 2) @ k_value).view(batch, q.shape[1], -1)
    change = _add_product(change, q_value, k[:, :, 1:].flatten(2))
    change = change.view(batch, q.shape[1], num_slots - 1, -1).mul_(share[:, :, None])
    out = q.new_empty(q.shape)
    out[:, :, 0] = share @ v_value
    moved = (change.flatten(1, 2) @ v_value).view(batch, q.shape[1], -1)
    moved = _add_product(moved, share, v[:, :, 1:].flatten(2)).view(
        batch, q.shape[1], num_slots - 1, size
    )
    out[:, :, 1:] = moved.addcmul_(change.sum(-1, keepdim=True), out[:, :, :1], value=-1)
    out = out.view(num_rows, *grouped, num_queries, num_slots, size)
    return out.permute(0, 3, 4, 1, 2, 5).reshape(num_rows, num_queries, num_slots, num_heads * size)
