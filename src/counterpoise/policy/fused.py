"""Decoder layers with fused kernels for the block of an update: fewer launches and fewer passes
over memory than Hugging Face's layers. The kernels are Triton's on CUDA, and C on a CPU.

Layers of one model instance run ``_layer`` in place of their own forward; other models of the
process are untouched, and outside the block the model is what it was: ``torch.func`` does not go
through these kernels. Adapters work: projections are called as modules, unless they only multiply,
autocast casts and multiplies (``joined``), or float32 without a gradient is multiplied in parts
(``split``).

Under autocast the norm and the rotation write the half-precision numbers that the next product
would round to anyway.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from counterpoise.policy.joined import (
    Joined,
    can_join,
    join_projections,
    projections,
    split_projections,
    split_together,
)
from counterpoise.policy.mix import (
    Kernels,
    c_kernels,
    product_dtype,
    split_heads,
    triton_kernels,
    why_not_c,
)
from counterpoise.policy.prefix import DECODERS, has_checkpointing, without_masks
from counterpoise.policy.split import can_split

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
See = Callable[[Sequence[nn.Module], Tensor, Tensor], None]


def why_not_fused(model: PreTrainedModel) -> str | None:
    """Why the fused kernels cannot take the place of the model's layers; None if they can.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> why_not_fused(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16)))
    'GPT2Model is none of LlamaModel, Qwen2Model, Qwen3Model'
    """
    decoder = model.get_decoder()
    if type(decoder).__name__ not in DECODERS:
        return f"{type(decoder).__name__} is none of {', '.join(DECODERS)}"
    if decoder.device.type not in ("cuda", "cpu"):
        return f"the model is on {decoder.device.type}, not on CUDA or a CPU"
    if decoder.device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    reason = _why_not_layers(decoder)
    return reason or (why_not_c(decoder) if decoder.device.type == "cpu" else None)


@contextmanager
def fused_layers(model: PreTrainedModel, kernels: Kernels | None = None) -> Iterator[None]:
    """The model's decoder layers and final norm use the fused kernels for the block; by default
    those of its device.

    A backward that computes layers again belongs inside.
    """
    decoder: Any = model.get_decoder()
    kernels = kernels or (triton_kernels() if decoder.device.type == "cuda" else c_kernels())
    weights = _Weights(decoder, kernels)
    forwards = {layer: partial(_layer, layer, weights, kernels) for layer in decoder.layers}
    forwards[decoder.norm] = partial(_norm, decoder.norm, kernels)
    for module, forward in forwards.items():
        module.forward = forward
    try:
        with nullcontext() if kernels.reads_masks else without_masks(decoder.config):
            yield
    finally:
        for module in forwards:
            del module.forward


def has_triton_layers(model: PreTrainedModel) -> bool:
    """Whether this runs inside the block of ``fused_layers`` with Triton's kernels."""
    layers = getattr(model.get_decoder(), "layers", ())
    forwards = (vars(layer).get("forward") for layer in layers)
    return any(getattr(f, "func", None) is _layer and f.args[2].is_triton for f in forwards)


@contextmanager
def seen(model: PreTrainedModel, see: See) -> Iterator[set[nn.Module]]:
    """Inside the block of ``fused_layers``: ``see(modules, what they read, what came out)`` for
    every norm and joined product of the layers. Gives their modules, which are not called; none
    outside such a block.
    """
    layers = getattr(model.get_decoder(), "layers", ())
    forwards = [vars(layer).get("forward") for layer in layers]
    weights = next((f.args[1] for f in forwards if getattr(f, "func", None) is _layer), None)
    if weights is None:
        yield set()
        return
    joins, weights.see = weights.joins(model.device.type), see
    try:
        yield {module for layer in layers for module in _not_called(layer, joins)}
    finally:
        weights.see = _look_away


def _look_away(*_: object) -> None:
    pass


def _not_called(layer: Any, joins: bool) -> Iterator[nn.Module]:
    yield from (layer.input_layernorm, layer.post_attention_layernorm)
    if hasattr(layer.self_attn, "q_norm"):
        yield from (layer.self_attn.q_norm, layer.self_attn.k_norm)
    if joins:
        yield from (linear for group in projections(layer) for linear in group)


class _Weights:
    """The joined projections of a forward: under autocast, or wherever the kernels join, made when
    its first layer asks (a thread has its own); in float32 without gradient split for tensor cores,
    of a few layers at a time.

    None where there are none: float32 with a gradient and kernels that join under autocast alone,
    adapters, or layers that the backward computes again, which has to find there what the forward
    had."""

    def __init__(self, decoder: Any, kernels: Kernels) -> None:
        self.layers, self.always = list(decoder.layers), kernels.joins_always
        self.can_join = not has_checkpointing(decoder) and can_join(self.layers)
        self.own, self.see = threading.local(), _look_away
        self._together: list[list[Any]] | None = None

    def joins(self, device: str) -> bool:
        """Whether projections that read the same states are one product, with a gradient."""
        return self.can_join and (torch.is_autocast_enabled(device) or self.always)

    def of(self, layer: Any, device: str) -> Joined | None:
        if not self.can_join:
            return None
        has_autocast = torch.is_autocast_enabled(device)
        if not self.joins(device):
            is_split = not torch.is_grad_enabled() and can_split(layer.mlp.down_proj.weight)
            return self._split(layer) if is_split else None
        if layer is self.layers[0]:
            dtype = torch.get_autocast_dtype(device) if has_autocast else torch.float32
            self.own.joined = dict(zip(self.layers, join_projections(self.layers, dtype)))
        return self.own.joined[layer]

    def _split(self, layer: Any) -> Joined:
        """Made when the first of the layers that are split together asks, and let go by each that
        was told: a forward goes through all layers in their order.
        """
        if layer is self.layers[0]:
            self.own.split = {}
        if layer not in self.own.split:
            together = next(group for group in self._groups() if layer in group)
            self.own.split |= zip(together, split_projections(together))
        return self.own.split.pop(layer)

    def _groups(self) -> list[list[Any]]:
        if self._together is None:
            self._together = split_together(self.layers)
        return self._together


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
    kernels: Kernels,
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
    norm = partial(_add_norm, kernels)
    hidden, *inputs = norm(layer.input_layernorm, hidden_states, None, 1 if joined else 3)
    for states in inputs:
        weights.see((layer.input_layernorm,), hidden, states)
    heads = _heads(attention, weights, kernels, inputs, joined)
    mixed = kernels.mix(attention, heads, position_embeddings, attention_mask, **kwargs)
    mixed = mixed.reshape(*hidden.shape[:-1], -1)
    change = joined.out.of(mixed) if joined else attention.o_proj(mixed)
    if joined:
        weights.see((attention.o_proj,), mixed, change)
    middle = layer.post_attention_layernorm
    hidden, *inputs = norm(middle, hidden, change, 1 if joined else 2)
    for states in inputs:
        weights.see((middle,), hidden, states)
    return hidden + _mlp(layer.mlp, weights, kernels, inputs, joined)


def _mlp(
    mlp: Any, weights: _Weights, kernels: Kernels, inputs: list[Tensor], joined: Joined | None
) -> Tensor:
    if joined:
        gate_up = joined.gate_up.of(inputs[0])
        weights.see((mlp.gate_proj, mlp.up_proj), inputs[0], gate_up)
        opened = kernels.open_joined_gate(gate_up)
        out = joined.down.of(opened)
        weights.see((mlp.down_proj,), opened, out)
        return out
    return mlp.down_proj(kernels.open_gate(mlp.gate_proj(inputs[0]), mlp.up_proj(inputs[1])))


def _heads(
    attention: Any, weights: _Weights, kernels: Kernels, inputs: list[Tensor], joined: Joined | None
) -> tuple[Tensor, ...]:
    """Queries, keys and values before rotation, [B, L, heads C]; in one tensor where they come
    from one product and have no norms.
    """
    linears = attention.q_proj, attention.k_proj, attention.v_proj
    if not joined:
        parts = tuple(project(states) for project, states in zip(linears, inputs))
    else:
        parts = (joined.qkv.of(inputs[0]),)
        weights.see(linears, inputs[0], parts[0])
    if not hasattr(attention, "q_norm"):
        return parts
    query, key, value = split_heads(attention, parts)
    normed = []
    for norm, part in ((attention.q_norm, query), (attention.k_norm, key)):
        normed.append(_norm(norm, kernels, part))
        weights.see((norm,), part, normed[-1])
    return *(part.flatten(-2) for part in normed), value.flatten(-2)


def _add_norm(
    kernels: Kernels, norm: Any, hidden: Tensor, change: Tensor | None, num_copies: int
) -> tuple[Tensor, ...]:
    """The sum, and its norm for each of the products that read it."""
    dtype = product_dtype(hidden, norm.weight)
    return kernels.add_norm(hidden, change, norm.weight, norm.variance_epsilon, dtype, num_copies)


def _norm(norm: Any, kernels: Kernels, hidden_states: Tensor) -> Tensor:
    """The norm in its own precision: what reads it may not be a product."""
    dtype = torch.promote_types(hidden_states.dtype, norm.weight.dtype)
    return kernels.add_norm(hidden_states, None, norm.weight, norm.variance_epsilon, dtype)[1]
