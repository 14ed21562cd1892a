"""Forward mode written out for Llama, Qwen2 and Qwen3: how every log-prob changes along C directions, in one walk through the layers.

A tensor [M, A, ...] with A = 1 + C slots holds a token's value in slot 0 and its changes behind it. A weight W that moves by dW_c takes it
to ``[x, dx_c] W^T``, and ``x dW_c^T`` is added in place: two products whatever C. Norm, rotation, gate and softmax have their derivative
written out. ``torch.func.jvp`` takes the same model apart into several times as many operations; the tests hold one against the other.

Axes: M tokens laid flat, A = 1 + C slots, D hidden size, F features, H query heads, K key-value heads, G = H / K, E head size, B rows of
an attention, Q queries and L keys of a row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from counterpoise.numerics_head import Head, head_logp_change
from counterpoise.rollouts import logp_function
from counterpoise.rollouts.backbone import backbone
from counterpoise.rollouts.decoder import why_not
from counterpoise.rollouts.pack import Packed, Whole, packed, shares_prompts
from counterpoise.rollouts.prefix import Prefixes, flat_ids, flat_index, flat_positions, is_seen


class Moving(NamedTuple):
    """A parameter and its changes, [C, ...]; None where it stays."""

    value: Tensor
    change: Tensor | None


Lookup = Callable[[Tensor], Moving]
log = logging.getLogger("counterpoise.ledger")
_AGREES: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # tried once a model


def can_walk(model: Any) -> bool:
    """Whether the layers are those that are written out here; adapters and a head with a bias are not.

    It is not taken on trust: the first time a model is seen two short rows go along a random direction here and through forward mode.
    """
    head = backbone(model).head if why_not(model) is None else None
    if head is None or head.bias_V is not None:
        return False
    if model not in _AGREES:
        _AGREES[model] = _agrees(model)
    return _AGREES[model]


@torch.no_grad()
def _agrees(model: Any) -> bool:
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    generators = {name: torch.Generator(p.device).manual_seed(number) for number, (name, p) in enumerate(params.items())}
    direction_C = {
        name: (p.square().mean().sqrt() + 0.01)
        * torch.randn(1, *p.shape, generator=generators[name], device=p.device, dtype=p.dtype)
        for name, p in params.items()
    }
    ids_NT = torch.arange(8, device=model.device).view(2, 4) % model.config.vocab_size
    columns = [[0, 1, 2]] * 2, ids_NT, torch.ones_like(ids_NT).bool()
    rows, head = packed(*columns, model.device, share=shares_prompts(backbone(model))), backbone(model).head
    expected_M = torch.func.jvp(logp_function(model, *columns), (params,), ({name: d[0] for name, d in direction_C.items()},))[1]
    assert head is not None
    error = (logp_change(model, params, direction_C, rows, head)[0] - expected_M.flatten()).norm() / expected_M.norm()
    agrees = bool(error < (0.5 if torch.is_autocast_enabled(model.device.type) else 1e-2))
    if not agrees:
        log.warning("%s: forward mode written out is off by %.2g; it is differentiated instead.", type(model).__name__, error)
    return agrees


@torch.no_grad()
def logp_change(
    model: Any,
    params: Mapping[str, Tensor],
    direction_C: Mapping[str, Tensor],
    rows: Packed,
    head: Head,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """d/ds log-prob(params + s direction) at s = 0 of the rows' response tokens, [C, M].

    Products are in autocast's dtype where it is on, all else in float32 or wider, as in the model's own forward.

    Args:
        model: a causal LM that ``can_walk``.
        params: trainable parameters by name; the others are the model's.
        direction_C: a change for each of them, directions stacked along a first axis.
        rows: laid out by ``packed``.
        head: the model's; its weight is looked up in ``params``.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    num = len(next(iter(direction_C.values())))
    device = rows.target_M.device.type

    def of(parameter: Tensor) -> Moving:
        name = names[id(parameter)]
        return Moving(params.get(name, parameter.detach()), direction_C.get(name))

    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype
    weight = of(model.lm_head.weight)
    with torch.autocast(device, enabled=False):
        hidden_MAD = _hidden(model.model, rows, of, num, dtype)
        here = head._replace(weight_VD=weight.value.to(dtype))
        return head_logp_change(hidden_MAD, rows.target_M, here, weight.change, temperature=temperature)


class Flat(NamedTuple):
    """Rows as one string of tokens: ids, positions, where the response tokens are predicted, and who attends to whom."""

    ids_M: Tensor
    position_1M: Tensor
    index_M: Tensor
    attention: Callable[[Tensor, Tensor, Tensor, float], Tensor]


def _flat(rows: Packed) -> Flat:
    layout = rows.layout
    if isinstance(layout, Prefixes):
        index_M = flat_index(layout, rows.row_M, rows.column_M)
        return Flat(flat_ids(layout), flat_positions(layout), index_M, _attention_of_prompts(layout))
    num_rows, length = layout.ids_NL.shape
    position_1M = torch.arange(length, device=layout.ids_NL.device).repeat(num_rows)[None]
    return Flat(layout.ids_NL.flatten(), position_1M, rows.row_M * length + layout.position_M, _attention_of_rows(layout))


def _hidden(decoder: Any, rows: Packed, of: Lookup, num: int, dtype: torch.dtype) -> Tensor:
    """What feeds the head at the response tokens and its changes, [M, A, D]."""
    flat = _flat(rows)
    x_MAD = _embedded(of(decoder.embed_tokens.weight), flat.ids_M, num)
    cos_1ME, sin_1ME = decoder.rotary_emb(x_MAD[:, 0], flat.position_1M)
    turn = cos_1ME[0][:, None, None], sin_1ME[0][:, None, None]
    for layer in decoder.layers:
        heads = _heads(layer, _norm(x_MAD, layer.input_layernorm, of).to(dtype), of, turn)
        x_MAD += _linear(flat.attention(*heads, layer.self_attn.scaling), of, layer.self_attn.o_proj)
        gate_up_MAF = _linear(
            _norm(x_MAD, layer.post_attention_layernorm, of).to(dtype), of, layer.mlp.gate_proj, layer.mlp.up_proj
        )
        x_MAD += _linear(_gated(gate_up_MAF), of, layer.mlp.down_proj)
    return _norm(x_MAD[flat.index_M], decoder.norm, of)


def _embedded(weight: Moving, ids_M: Tensor, num: int) -> Tensor:
    value_MD = F.embedding(ids_M, weight.value)
    x_MAD = value_MD.new_zeros(len(ids_M), 1 + num, value_MD.shape[1])
    x_MAD[:, 0] = value_MD
    if weight.change is not None:
        x_MAD[:, 1:] = weight.change[:, ids_M].transpose(0, 1)
    return x_MAD


def _linear(x_MAD: Tensor, of: Lookup, *layers: nn.Linear) -> Tensor:
    """``[x, dx_c] W^T + [0, x dW_c^T]`` of layers side by side, biases likewise, [M, A, F] in the dtype of x."""
    weight_FD, change_CFD = _joined([of(layer.weight) for layer in layers])
    out_MAF = (x_MAD.flatten(0, 1) @ weight_FD.to(x_MAD.dtype).T).view(*x_MAD.shape[:2], -1)
    if change_CFD is not None:
        by_weight_DF = change_CFD.to(x_MAD.dtype).flatten(0, 1).T
        _add_product(out_MAF.flatten(1)[:, len(weight_FD) :], x_MAD[:, 0], by_weight_DF)
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if biases:
        bias_F, change_CF = _joined([of(bias) for bias in biases])
        out_MAF[:, 0] += bias_F
        if change_CF is not None:
            out_MAF[:, 1:] += change_CF
    return out_MAF


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``out += left @ right``, of matrices or batches of them."""
    if not out.is_cuda:  # its libraries are slow at adding to rows that lie apart, and copy
        return out.add_(left @ right)
    return out.addmm_(left, right) if out.ndim == 2 else out.baddbmm_(left, right)


def _joined(parts: Sequence[Moving]) -> Moving:
    if all(part.change is None for part in parts):
        return Moving(torch.cat([part.value for part in parts]), None)
    num = next(len(part.change) for part in parts if part.change is not None)
    changes = [part.value.new_zeros(num, *part.value.shape) if part.change is None else part.change for part in parts]
    return Moving(torch.cat([part.value for part in parts]), torch.cat(changes, 1))


def _norm(x_MAD: Tensor, norm: Any, of: Lookup) -> Tensor:
    """y = w n with n = x r, r = (mean x^2 + eps)^-1/2: dy = w r (dx - n mean(n dx)) + n dw. Axes between A and D are heads."""
    wide_MAD = x_MAD.to(torch.promote_types(x_MAD.dtype, torch.float32))
    value_M1D, change_MCD = wide_MAD[:, :1], wide_MAD[:, 1:]
    rate_M11 = torch.rsqrt(value_M1D.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    unit_M1D, weight = value_M1D * rate_M11, of(norm.weight)
    out_MAD = torch.empty_like(wide_MAD)
    torch.mul(unit_M1D, weight.value, out=out_MAD[:, :1])
    mean_MC1 = (unit_M1D * change_MCD).mean(-1, keepdim=True)
    moved_MCD = torch.addcmul(change_MCD, unit_M1D, mean_MC1, value=-1, out=out_MAD[:, 1:]).mul_(rate_M11 * weight.value)
    if weight.change is not None:
        moved_MCD.addcmul_(unit_M1D, weight.change.unflatten(0, (-1, *[1] * (x_MAD.ndim - 3))))
    return out_MAD.to(x_MAD.dtype)


def _heads(layer: Any, x_MAD: Tensor, of: Lookup, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [M, A, H, E] and keys, and values [M, A, K, E]."""
    attention = layer.self_attn
    qkv = _linear(x_MAD, of, attention.q_proj, attention.k_proj, attention.v_proj).unflatten(-1, (-1, attention.head_dim))
    num_keys = attention.k_proj.out_features // attention.head_dim
    query, key, value = qkv[:, :, : -2 * num_keys], qkv[:, :, -2 * num_keys : -num_keys], qkv[:, :, -num_keys:]
    if hasattr(attention, "q_norm"):
        query, key = _norm(query, attention.q_norm, of), _norm(key, attention.k_norm, of)
    return _rotated(query, *turn), _rotated(key, *turn), value


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Linear in x: values and changes alike."""
    wide = x.to(cos.dtype)
    out = wide * cos
    left, right = wide.chunk(2, -1)
    low, high = sin.chunk(2, -1)
    out_left, out_right = out.chunk(2, -1)
    out_left.addcmul_(right, low, value=-1)
    out_right.addcmul_(left, high)
    return out.to(x.dtype)


def _gated(gate_up_MAF: Tensor) -> Tensor:
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


def _attention_of_rows(layout: Whole) -> Callable[..., Tensor]:
    num_rows, length = layout.ids_NL.shape
    seen_1LL = torch.ones(1, length, length, dtype=torch.bool, device=layout.ids_NL.device).tril()

    def attention(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        q, k, v = (part.unflatten(0, (num_rows, length)) for part in (q, k, v))
        return _attended(q, k, v, seen_1LL, scaling).flatten(0, 1)

    return attention


def _attention_of_prompts(layout: Prefixes) -> Callable[..., Tensor]:
    (num_prompts, width), num_rows = layout.ids_PW.shape, len(layout.ids_NS)
    cut = num_prompts * width
    seen_1WW = torch.ones(1, width, width, dtype=torch.bool, device=layout.ids_PW.device).tril()
    seen_NSL = is_seen(layout)[:, 0]

    def attention(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        own_q, own_k, own_v = (part[:cut].unflatten(0, (num_prompts, width)) for part in (q, k, v))
        q, k, v = (part[cut:].unflatten(0, (num_rows, -1)) for part in (q, k, v))
        first = _attended(own_q, own_k, own_v, seen_1WW, scaling)
        k, v = (torch.cat([own.index_select(0, layout.prompt_N), part], 1) for own, part in ((own_k, k), (own_v, v)))
        return torch.cat([part.flatten(0, 1) for part in (first, _attended(q, k, v, seen_NSL, scaling))])

    return attention


def _attended(q: Tensor, k: Tensor, v: Tensor, is_seen_BQL: Tensor, scaling: float) -> Tensor:
    """o = P v with P = softmax(s): do = sum_l u_l (v_l - o) + P dv with u = P ds, ds = scaling (dq k + q dk).

    Args:
        q: [B, Q, A, H, E].
        k, v: [B, L, A, K, E].

    Returns [B, Q, A, H E]. The G query heads of a key-value head are taken as more queries of it.
    """
    (num_rows, num_queries, num_slots, num_heads, size), num_keys = q.shape, k.shape[3]
    batch, grouped = num_rows * num_keys, (num_keys, num_heads // num_keys)
    q = q.unflatten(3, grouped).permute(0, 3, 4, 1, 2, 5).reshape(batch, -1, num_slots, size) * scaling  # [B K, G Q, A, E]
    k = k.permute(0, 3, 2, 1, 4).reshape(batch, num_slots, -1, size)  # [B K, A, L, E]
    v = v.permute(0, 3, 1, 2, 4).reshape(batch, -1, num_slots, size)  # [B K, L, A, E]
    q_value, k_value, v_value = q[:, :, 0], k[:, 0], v[:, :, 0]
    scores = (q_value @ k_value.mT).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores.view(num_rows, *grouped, num_queries, -1).masked_fill_(~is_seen_BQL[:, None, None], float("-inf"))
    share = torch.softmax(scores, -1).to(q.dtype).view(batch, q.shape[1], -1)
    change = (q[:, :, 1:].flatten(1, 2) @ k_value.mT).view(batch, q.shape[1], -1)
    change = _add_product(change, q_value, k[:, 1:].flatten(1, 2).mT)
    change = change.view(batch, q.shape[1], num_slots - 1, -1).mul_(share[:, :, None])
    out = q.new_empty(q.shape)
    out[:, :, 0] = share @ v_value
    moved = (change.flatten(1, 2) @ v_value).view(batch, q.shape[1], -1)
    moved = _add_product(moved, share, v[:, :, 1:].flatten(2)).view(batch, q.shape[1], num_slots - 1, size)
    out[:, :, 1:] = moved.addcmul_(change.sum(-1, keepdim=True), out[:, :, :1], value=-1)
    out = out.view(num_rows, *grouped, num_queries, num_slots, size)
    return out.permute(0, 3, 4, 1, 2, 5).reshape(num_rows, num_queries, num_slots, num_heads * size)
