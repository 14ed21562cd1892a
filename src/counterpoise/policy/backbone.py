"""A causal LM as two parts: the decoder that gives hidden states, and the head that turns them into
logits.

Scoring only response tokens, a chunk at a time, needs the parts. Whether they make up the whole is
not taken on trust: the first time a model is seen, three tokens go through the parts and through
the model's own forward, and a model whose logits differ
(an unknown scaling, an adapter on the head) has ``head=None``: callers then run its own forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from counterpoise.maths.head import Head, head_logits

_IS_PLAIN: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


class Backbone(NamedTuple):
    """``head`` is None where the model's logits are not ``cap(scale * (h W^T + b))``."""

    decoder: PreTrainedModel
    head: Head | None


def backbone(model: PreTrainedModel) -> Backbone:
    """Decoder and head of a Hugging Face causal LM, with the weights it has at this moment."""
    decoder, head = model.get_decoder(), _head(model)
    if model not in _IS_PLAIN:
        _IS_PLAIN[model] = head is not None and _agrees(model, decoder, head)
    return Backbone(decoder, head if _IS_PLAIN[model] else None)


def eager(model: nn.Module) -> Any:
    """Compiled layers run uncompiled inside the block: forward mode does not go through them."""
    is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off for the block; the mode the model was in comes back."""
    was_training = model.training
    if was_training:
        model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()


def _head(model: PreTrainedModel) -> Head | None:
    layer = model.get_output_embeddings()
    # a subclass (an adapter, a quantised layer) computes something else than weight and bias say
    if type(layer) is not nn.Linear:
        return None
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
        getattr(config, "logits_scaling", None) or 1.0
    )
    return Head(layer.weight, layer.bias, scale, getattr(config, "final_logit_softcapping", None))


@torch.no_grad()
def _agrees(model: PreTrainedModel, decoder: PreTrainedModel, head: Head) -> bool:
    ids_BL = torch.arange(3, device=head.weight_VD.device)[None] % head.weight_VD.shape[0]
    with evaluating(model), eager(model), torch.autocast(head.weight_VD.device.type, enabled=False):
        expected_MV = model(input_ids=ids_BL, use_cache=False).logits[0].to(torch.float32)
        got_MV = head_logits(
            decoder(input_ids=ids_BL, use_cache=False).last_hidden_state[0], head
        ).to(torch.float32)
    # a wrong head is off by the size of the logits; half of the weights' digits is far above
    # rounding and far below that
    size = expected_MV.abs().max().clamp_min(1e-30)
    return bool(
        ((got_MV - expected_MV).abs().max() / size) < torch.finfo(head.weight_VD.dtype).eps ** 0.5
    )


def last_logits(
    model: PreTrainedModel, parts: Backbone, inputs: dict[str, Any], temperature: float
) -> Tensor:
    """Logits at the last position of each row, [N, V], divided by the temperature, float32 or
    wider.
    """
    if parts.head is None:
        logits_NV = model(**inputs, logits_to_keep=1).logits[:, -1]
        return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
    hidden_ND = parts.decoder(**inputs).last_hidden_state[:, -1]
    return head_logits(hidden_ND, parts.head, temperature=temperature)
