"""A model with adapters (peft), read as the plain model under them: each weight with what its
adapters add.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


def under_adapters(model: Any) -> PreTrainedModel:
    """The causal LM that adapters were put into; a model without any is its own."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def is_low_rank(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer with low-rank adapters and nothing else: no DoRA, no
    bias of theirs, no quantised weight.
    """
    kind = type(module)
    if (kind.__module__, kind.__name__) != ("peft.tuners.lora.layer", "Linear"):
        return False
    layer: Any = module
    return (
        type(layer.base_layer) is nn.Linear
        and not layer.lora_variant
        and not any(layer.lora_bias.values())
        and not layer.fan_in_fan_out
    )


def merged_weight(linear: Any) -> Tensor:
    """``W + (alpha / r) B A`` with the adapters that are switched on; W of a plain layer itself."""
    if not hasattr(linear, "base_layer"):
        return linear.weight.detach()
    weight = linear.base_layer.weight.detach()
    if linear.disable_adapters or linear.merged:
        return weight
    for name in linear.active_adapters:
        if name in linear.lora_A:
            weight = weight + linear.get_delta_weight(name).detach()
    return weight
