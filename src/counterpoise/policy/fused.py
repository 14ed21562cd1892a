"""Decoder layers with fused kernels for the block of an update: fewer launches and fewer passes
over memory than Hugging Face's layers, without the wait for a compiler.

Layers of one model instance run ``_layer`` in place of their own forward; other models of the
process are untouched, and outside the block the model is what it was: forward mode and
``torch.func`` do not go through these kernels. Adapters work: projections are called as modules,
unless autocast would only cast and multiply (``joined``).

Under autocast the norm and the rotation write the half-precision numbers that the next product
would round to anyway.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from counterpoise.policy.joined import Joined, can_join, join_projections
from counterpoise.policy.prefix import DECODERS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not_fused(model: PreTrainedModel) -> str | None:
    """Why the fused kernels cannot take the place of the model's layers; None if they can.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> why_not_fused(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16)))
    'GPT2Model is none of LlamaModel, Qwen2Model, Qwen3Model'
    """
    decoder = model.get_decoder()
    if type(decoder).__name__ not in DECODERS:
        return f"{type(decoder).__name__} is none of {', '.join(DECODERS)}"
    if decoder.device.type != "cuda":
        return f"the model is on {decoder.device.type}, not on a CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return _why_not_layers(decoder)


@contextmanager
def fused_layers(model: PreTrainedModel) -> Iterator[None]:
    """The model's decoder layers and final norm use the fused kernels for the block.

    A backward that computes layers again belongs inside.
    """
    decoder: Any = model.get_decoder()
    weights = _Weights(decoder)
    forwards = {layer: partial(_layer, layer, weights) for layer in decoder.layers}
    forwards[decoder.norm] = partial(_norm, decoder.norm)
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.forward


class _Weights:
    """The joined projections of a forward under autocast, made when its first layer asks.

    None where there are none: no autocast, adapters, or layers that the backward computes again,
    which has to find there what the forward had."""

    def __init__(self, decoder: Any) -> None:
        self.layers = list(decoder.layers)
        self.can_join = not decoder.is_gradient_checkpointing and can_join(self.layers)
        self.joined: dict[Any, Joined] = {}

    def of(self, layer: Any, device: str) -> Joined | None:
        if not self.can_join or not torch.is_autocast_enabled(device):
            return None
        if layer is self.layers[0]:
            parts = join_projections(self.layers, torch.get_autocast_dtype(device))
            self.joined = dict(zip(self.layers, parts))
        return self.joined[layer]


def _why_not_layers(decoder: Any) -> str | None:
    """What somebody has put into the layers that the kernels would pass by."""
    if decoder.config.hidden_act != "silu":
        return f"activation {decoder.config.hidden_act}"
    for module in _passed_by(decoder):
        name = type(module).__name__
        if not type(module).__module__.startswith("transformers.models."):
            return f"{name} in place of a norm, an attention or an MLP"
        if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            return f"a hook on {name}"
        if any(weight.dtype not in DTYPES for weight in module.parameters(recurse=False)):
            return f"weights of {name} that are none of float32, bfloat16 and float16"
    return None


def _passed_by(decoder: Any) -> Iterator[nn.Module]:
    yield decoder.norm
    for layer in decoder.layers:
        yield from (layer, layer.self_attn, layer.mlp, layer.input_layernorm)
        yield layer.post_attention_layernorm
        if hasattr(layer.self_attn, "q_norm"):
            yield from (layer.self_attn.q_norm, layer.self_attn.k_norm)


def _layer(
    layer: Any,
    weights: _Weights,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: None = None,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    **kwargs: Any,
) -> Tensor:
    """A decoder layer of Llama, Qwen2 or Qwen3."""
    assert past_key_values is None
    attention, joined = layer.self_attn, weights.of(layer, hidden_states.device.type)
    hidden, *inputs = _add_norm(layer.input_layernorm, hidden_states, None, 1 if joined else 3)
    heads = _heads(attention, inputs, joined)
    mix = _mix_prefixes if "prefix_shape" in kwargs else _mix
    mixed = mix(attention, heads, position_embeddings, attention_mask, **kwargs)
    mixed = mixed.reshape(*hidden.shape[:-1], -1)
    change = F.linear(mixed, *joined.out) if joined else attention.o_proj(mixed)
    norm = layer.post_attention_layernorm
    hidden, *inputs = _add_norm(norm, hidden, change, 1 if joined else 2)
    return hidden + _mlp(layer.mlp, inputs, joined)


def _mlp(mlp: Any, inputs: list[Tensor], joined: Joined | None) -> Tensor:
    from counterpoise.policy.kernels.triton_gate import open_gate, open_joined_gate

    if joined:
        return F.linear(open_joined_gate(F.linear(inputs[0], *joined.gate_up)), *joined.down)
    return mlp.down_proj(open_gate(mlp.gate_proj(inputs[0]), mlp.up_proj(inputs[1])))


def _heads(
    attention: Any, inputs: list[Tensor], joined: Joined | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values before rotation, [B, L, heads, C]."""
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    if joined:
        sizes = [linear.out_features for linear in projections]
        parts = F.linear(inputs[0], *joined.qkv).split(sizes, -1)
    else:
        parts = (project(states) for project, states in zip(projections, inputs))
    query, key, value = (part.unflatten(-1, (-1, attention.head_dim)) for part in parts)
    if hasattr(attention, "q_norm"):
        query, key = _norm(attention.q_norm, query), _norm(attention.k_norm, key)
    return query, key, value


def _mix(
    attention: Any,
    heads: tuple[Tensor, Tensor, Tensor],
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Tensor:
    """Attention as the model has it, of rotated heads."""
    from counterpoise.policy.kernels.triton_rotate import rotate

    query, key, value = heads
    query, key = rotate(query, key, *position_embeddings, _dtype(query, position_embeddings[0]))
    return _attention_of(attention)(
        attention,
        *(part.transpose(1, 2) for part in (query, key, value)),
        attention_mask,
        dropout=attention.attention_dropout if attention.training else 0.0,
        scaling=attention.scaling,
        sliding_window=getattr(attention, "sliding_window", None),
        **kwargs,
    )[0]


def _mix_prefixes(
    attention: Any,
    heads: tuple[Tensor, Tensor, Tensor],
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Tensor:
    """What ``prefix.attend`` computes, with one pass before its two products and one after."""
    from counterpoise.policy.kernels.triton_prefix import Layout, join, place

    layout = Layout(*kwargs["prefix_shape"], *kwargs["prefix_rows"])
    query, key, value = (part.flatten(0, 1) for part in heads)
    cos, sin = (part[0] for part in position_embeddings)
    placed = place(query, key, value, cos, sin, layout, _dtype(query, cos))
    query, key, value = (part.transpose(1, 2) for part in placed[:3])
    first = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=attention.scaling, enable_gqa=True
    )
    query, key, value = (part.transpose(1, 2) for part in placed[3:])
    second = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=attention.scaling
    )
    return join(first.transpose(1, 2), second.transpose(1, 2), layout)


def _attention_of(attention: Any) -> Any:
    own = sys.modules[type(attention).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, own)


def _add_norm(
    norm: Any, hidden: Tensor, change: Tensor | None, num_copies: int
) -> tuple[Tensor, ...]:
    """The sum, and its norm for each of the products that read it."""
    from counterpoise.policy.kernels.triton_norm import add_norm

    dtype = _dtype(hidden, norm.weight)
    return add_norm(hidden, change, norm.weight, norm.variance_epsilon, dtype, num_copies)


def _norm(norm: Any, hidden_states: Tensor) -> Tensor:
    """The norm in its own precision: what reads it may not be a product."""
    from counterpoise.policy.kernels.triton_norm import add_norm

    dtype = torch.promote_types(hidden_states.dtype, norm.weight.dtype)
    return add_norm(hidden_states, None, norm.weight, norm.variance_epsilon, dtype)[1]


def _dtype(*parts: Tensor) -> torch.dtype:
    """What autocast would make of the parts' product, or torch without it."""
    device = parts[0].device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(parts[0].dtype, parts[1].dtype)
