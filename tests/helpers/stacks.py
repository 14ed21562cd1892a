"""One member of a stack as a model of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from counterpoise.arena.stack import Stack, restructure


@torch.no_grad()
def put_member(stack: Stack, member: int, model: PreTrainedModel) -> None:
    """Copy one member's weights into a model."""
    weights = restructure(stack, stack.theta_SP[member : member + 1])
    for layer, target in zip(weights.layers, model.model.layers):
        attention, mlp = target.self_attn, target.mlp
        _put([attention.q_proj, attention.k_proj, attention.v_proj], layer.qkv, layer.qkv_bias)
        _put([attention.o_proj], layer.out, layer.out_bias)
        _put([mlp.gate_proj, mlp.up_proj], layer.gate_up, layer.gate_up_bias)
        _put([mlp.down_proj], layer.down, layer.down_bias)
        target.input_layernorm.weight.copy_(layer.input_norm.flatten())
        target.post_attention_layernorm.weight.copy_(layer.middle_norm.flatten())
        for name, norm in (("q_norm", layer.query_norm), ("k_norm", layer.key_norm)):
            if norm is not None:
                getattr(attention, name).weight.copy_(norm.flatten())
    model.model.embed_tokens.weight.copy_(weights.embed_VD[0])
    model.model.norm.weight.copy_(weights.norm_D.flatten())
    if not stack.is_tied:
        model.lm_head.weight.copy_(weights.head_DV[0].T)


def _put(parts: Sequence[nn.Linear], weight: Tensor, bias: Tensor | None) -> None:
    sizes = [part.out_features for part in parts]
    for part, own in zip(parts, weight[0].split(sizes, 1)):
        part.weight.copy_(own.T)
    if bias is not None:
        for part, own in zip(parts, bias.flatten().split(sizes)):
            part.bias.copy_(own)
