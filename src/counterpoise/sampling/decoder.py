"""A bare decoder for Llama, Qwen2 and Qwen3: fused matmuls over a static key-value cache whose
grouped heads are never expanded.

A row's keys live at their own positions (slot p holds position p), so prompts need no left padding
and rows of any age share a batch. Weights are copied from the model into fused buffers at fixed
addresses, so that a captured graph sees every update. They are held
[in, out]: views of the model's own on an accelerator where the dtype is equal, contiguous copies on
a CPU, whose libraries would otherwise turn a weight around at every call. Adapters (LoRA) are added
to the weights they belong to.

Axes: B rows, L cache slots, W prompt width, H query heads, K key-value heads, G = H / K, C head
    size, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from counterpoise.policy.adapters import merged_weight


class Layer(NamedTuple):
    """One decoder layer with q, k, v and gate, up joined.

    Norms stay float32 where the residual stream is.
    """

    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    input_norm: Tensor
    middle_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None


class Weights(NamedTuple):
    """All a decode step reads."""

    embed_VD: Tensor
    layers: tuple[Layer, ...]
    norm_D: Tensor
    head_DV: Tensor


class Shape(NamedTuple):
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    eps: float
    scaling: float


def shape_of(model: PreTrainedModel) -> Shape:
    config, attention = model.config, model.model.layers[0].self_attn
    return Shape(
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        attention.head_dim,
        config.rms_norm_eps,
        attention.scaling,
    )


def fuse_weights(model: PreTrainedModel, dtype: torch.dtype) -> Weights:
    """The model's weights in fused buffers of ``dtype``; norms and the embedding keep the model's
    dtype (the residual stream's).
    """
    layers = tuple(_fused_layer(layer, dtype) for layer in model.model.layers)
    embed_VD, norm_D = model.model.embed_tokens.weight.detach(), model.model.norm.weight.detach()
    return Weights(embed_VD, layers, norm_D, _joined(dtype, model.lm_head)[0])


def refresh(weights: Weights, model: PreTrainedModel) -> None:
    """Copy the model's present weights into the same buffers; views of the model's own tensors need
    no copy.
    """
    dtype = weights.head_DV.dtype
    for buffers, layer in zip(weights.layers, model.model.layers):
        for buffer, value in zip(buffers, _fused_layer(layer, dtype)):
            if buffer is not None and value is not None and buffer.data_ptr() != value.data_ptr():
                buffer.copy_(value)
    head_VD = merged_weight(model.lm_head)
    if weights.head_DV.data_ptr() != head_VD.data_ptr():
        weights.head_DV.copy_(head_VD.T)


def _fused_layer(layer: Any, dtype: torch.dtype) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return Layer(
        *_joined(dtype, attention.q_proj, attention.k_proj, attention.v_proj),
        *_joined(dtype, attention.o_proj),
        *_joined(dtype, mlp.gate_proj, mlp.up_proj),
        *_joined(dtype, mlp.down_proj),
        layer.input_layernorm.weight.detach(),
        layer.post_attention_layernorm.weight.detach(),
        *(None if norm is None else norm.weight.detach() for norm in norms),
    )


def _joined(dtype: torch.dtype, *parts: Any) -> tuple[Tensor, Tensor | None]:
    """Weight [in, out] and bias of linear layers side by side."""
    weights = [merged_weight(part) for part in parts]
    weight = (torch.cat(weights) if len(weights) > 1 else weights[0]).to(dtype).T
    bias = (
        None
        if parts[0].bias is None
        else torch.cat([part.bias.detach() for part in parts]).to(dtype)
    )
    return weight.contiguous() if weight.device.type == "cpu" else weight, bias


def embed(weight: Tensor, ids: Tensor) -> Tensor:
    """The embedding of token ids; where the weight has a first axis of members, ids have it too and
    each reads its own.
    """
    if weight.ndim == 2:
        return F.embedding(ids, weight)
    num_members, size, width = weight.shape
    start_S1 = torch.arange(num_members, device=ids.device)[:, None] * size
    return F.embedding(ids + start_S1, weight.reshape(-1, width))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W + b`` with a weight held [in, out]."""
    return x @ weight if bias is None else x @ weight + bias


def rotary(model: PreTrainedModel, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, [L, C]."""
    embed_VD = model.model.embed_tokens.weight
    position_1L = torch.arange(num_positions, device=embed_VD.device)[None]
    cos_1LC, sin_1LC = model.model.rotary_emb(embed_VD[:1], position_1L)
    return cos_1LC[0], sin_1LC[0]


def prefill(
    weights: Weights, shape: Shape, ids_PW: Tensor, cos_LC: Tensor, sin_LC: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values of right-padded prompts, [layers, P, K, W, C] each.

    What stands on padding is overwritten or masked later.
    """
    width = ids_PW.shape[1]
    cos, sin = cos_LC[:width], sin_LC[:width]
    x_PWD, keys, values = F.embedding(ids_PW, weights.embed_VD), [], []
    for layer in weights.layers:
        q, k, v = heads(layer, shape, x_PWD, cos[:, None], sin[:, None])
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        keys.append(k)
        values.append(v)
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=shape.scaling, enable_gqa=True
        )
        x_PWD = rest(layer, shape, x_PWD, mixed.transpose(1, 2).flatten(2))
    return torch.stack(keys), torch.stack(values)


def decode(
    weights: Weights,
    shape: Shape,
    token_B: Tensor,
    position_B: Tensor,
    keys: Tensor,
    values: Tensor,
    cos_LC: Tensor,
    sin_LC: Tensor,
) -> Tensor:
    """The final normed hidden states after one more token a row, [B, D] in the matmuls' dtype; keys
    and values go into the cache.

    The G query heads of a key-value head are taken as G query rows of one attention, so that keys
    are read once and never expanded.

    Args:
        keys, values: [layers, B, K, L, C], written in place at ``position_B``, which is under L.
    """
    x_BD, row_B = (
        F.embedding(token_B, weights.embed_VD),
        torch.arange(len(token_B), device=token_B.device),
    )
    grouped = (
        len(token_B),
        shape.num_kv_heads,
        shape.num_heads // shape.num_kv_heads,
        shape.head_size,
    )
    is_seen_BL = torch.arange(keys.shape[3], device=token_B.device) <= position_B[:, None]
    bias_B11L = torch.zeros_like(is_seen_BL, dtype=keys.dtype).masked_fill_(
        ~is_seen_BL, float("-inf")
    )[:, None, None]
    cos_B1C, sin_B1C = cos_LC[position_B][:, None], sin_LC[position_B][:, None]
    for number, layer in enumerate(weights.layers):
        q, k, v = heads(layer, shape, x_BD, cos_B1C, sin_B1C)
        keys[number][row_B, :, position_B] = k
        values[number][row_B, :, position_B] = v
        mixed = F.scaled_dot_product_attention(
            q.reshape(grouped),
            keys[number],
            values[number],
            attn_mask=bias_B11L,
            scale=shape.scaling,
        )
        x_BD = rest(layer, shape, x_BD, mixed.reshape(len(token_B), -1))
    return norm(x_BD, weights.norm_D, shape.eps).to(weights.head_DV.dtype)


def heads(
    layer: Layer, shape: Shape, x: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values: [..., heads, C].

    Weights may have a first axis of their own (members of an arena's stack), as ``x`` then has.
    """
    h, k, size = shape.num_heads, shape.num_kv_heads, shape.head_size
    qkv = linear(
        norm(x, layer.input_norm, shape.eps).to(layer.qkv.dtype), layer.qkv, layer.qkv_bias
    )
    qkv = qkv.unflatten(-1, (h + 2 * k, size))
    query, key, value = qkv[..., :h, :], qkv[..., h : h + k, :], qkv[..., h + k :, :]
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = (
            norm(query, layer.query_norm, shape.eps),
            norm(key, layer.key_norm, shape.eps),
        )
    return _rotated(query, cos, sin).to(qkv.dtype), _rotated(key, cos, sin).to(qkv.dtype), value


def rest(layer: Layer, shape: Shape, x: Tensor, mixed: Tensor) -> Tensor:
    """The residual stream behind a layer, from what its attention mixed."""
    x = x + linear(mixed, layer.out, layer.out_bias)
    gate, up = linear(
        norm(x, layer.middle_norm, shape.eps).to(layer.down.dtype),
        layer.gate_up,
        layer.gate_up_bias,
    ).chunk(2, -1)
    return x + linear(F.silu(gate) * up, layer.down, layer.down_bias)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The root-mean-square norm, in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return weight * F.rms_norm(x.to(wide), (x.shape[-1],), eps=eps).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin
