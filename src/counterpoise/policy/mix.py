"""The kernels between the products of a decoder layer, Triton's and C's, and how each mixes tokens:
rotation and attention.

Axes: B rows, L tokens, H query heads, K key-value heads, C head size.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from counterpoise.policy.prefix import attend_prompts


class Kernels(NamedTuple):
    """``mix(attention, heads, position_embeddings, attention_mask, **kwargs)`` takes what
    ``split_heads`` takes, and gives [L, H C] or [B, L, H, C].
    """

    add_norm: Callable[..., tuple[Tensor, ...]]
    open_gate: Callable[[Tensor, Tensor], Tensor]
    open_joined_gate: Callable[[Tensor], Tensor]
    mix: Callable[..., Tensor]
    joins_always: bool  # projections that read the same states; else under autocast alone
    reads_masks: bool
    is_triton: bool


@functools.cache
def triton_kernels() -> Kernels:
    """Half precision and float32."""
    from counterpoise.policy.kernels.triton_gate import open_gate, open_joined_gate
    from counterpoise.policy.kernels.triton_norm import add_norm

    return Kernels(
        add_norm,
        open_gate,
        open_joined_gate,
        _mix_in_triton,
        joins_always=False,
        reads_masks=True,
        is_triton=True,
    )


@functools.cache
def c_kernels() -> Kernels:
    """Float32 alone."""
    from counterpoise.policy.kernels.cpu import add_norm, open_gate, open_joined_gate

    return Kernels(
        add_norm,
        open_gate,
        open_joined_gate,
        _mix_in_c,
        joins_always=True,
        reads_masks=False,
        is_triton=False,
    )


def why_not_c(decoder: Any) -> str | None:
    """Why the C kernels cannot take the place of a decoder's layers on a CPU; None if they can."""
    from counterpoise.policy.kernels import cpu
    from counterpoise.policy.kernels.check import agrees

    config = decoder.config
    if any(weight.dtype != torch.float32 for weight in decoder.parameters()):
        return "on a CPU all weights have to be float32"
    if config._attn_implementation != "sdpa":
        return f"on a CPU attention has to be sdpa, not {config._attn_implementation}"
    if getattr(config, "use_sliding_window", False):
        return "on a CPU attention may have no sliding window"
    if config.attention_dropout:
        return "on a CPU attention may have no dropout"
    if cpu.library() is None:
        return "there is no C compiler, or it could not build the kernels"
    sizes = config.num_attention_heads, config.num_key_value_heads, _head_size(decoder)
    if not agrees(*sizes, config.hidden_size, config.intermediate_size):
        return "the C kernels give other numbers than torch on this machine"
    return None


def split_heads(attention: Any, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, [B, L, heads, C], of three tensors [B, L, heads C] or of one in
    which they lie side by side.
    """
    if len(parts) == 1:
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        parts = parts[0].split([linear.out_features for linear in projections], -1)
    query, key, value = (part.unflatten(-1, (-1, attention.head_dim)) for part in parts)
    return query, key, value


def product_dtype(*parts: Tensor) -> torch.dtype:
    """What autocast would make of the parts' product, or torch without it."""
    device = parts[0].device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(parts[0].dtype, parts[1].dtype)


def _head_size(decoder: Any) -> int:
    return decoder.layers[0].self_attn.head_dim


def _mix_in_c(
    attention: Any,
    parts: tuple[Tensor, ...],
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Tensor:
    from counterpoise.policy.kernels.cpu_attention import Rows, whole_rows
    from counterpoise.policy.kernels.cpu_attention import attention as attend

    num_rows, length = parts[0].shape[:2]
    if "prefix_shape" in kwargs:
        order_N, start_P1 = kwargs["prefix_rows"]
        num_prompts, width, num_responses, longest = kwargs["prefix_shape"]
        length_P = kwargs["prefix_length_P"]
        rows = Rows(num_prompts, width, num_responses, longest, length_P, order_N, start_P1)
    else:
        assert attention_mask is None
        rows = whole_rows(num_rows, length)
    cos, sin = (part.expand(num_rows, -1, -1).flatten(0, 1) for part in position_embeddings)
    config = attention.config
    sizes = config.num_attention_heads, config.num_key_value_heads, attention.head_dim
    flat = tuple(part.flatten(0, 1) for part in parts)
    return attend(flat, cos, sin, rows, sizes, attention.scaling)


def _mix_in_triton(
    attention: Any,
    parts: tuple[Tensor, ...],
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Tensor:
    mix = _mix_prefixes if "prefix_shape" in kwargs else _mix_rows
    heads = split_heads(attention, parts)
    return mix(attention, heads, position_embeddings, attention_mask, **kwargs)


def _mix_rows(
    attention: Any,
    heads: tuple[Tensor, Tensor, Tensor],
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Tensor:
    """Attention as the model has it, of rotated heads."""
    from counterpoise.policy.kernels.triton_rotate import rotate

    query, key, value = heads
    dtype = product_dtype(query, position_embeddings[0])
    query, key = rotate(query, key, *position_embeddings, dtype)
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
    placed = place(query, key, value, cos, sin, layout, product_dtype(query, cos))
    query, key, value = (part.transpose(1, 2) for part in placed[:3])
    first = attend_prompts(query, key, value, attention.scaling)
    query, key, value = (part.transpose(1, 2) for part in placed[3:])
    second = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=attention.scaling
    )
    return join(first.transpose(1, 2), second.transpose(1, 2), layout)


def _attention_of(attention: Any) -> Any:
    own = sys.modules[type(attention).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, own)
