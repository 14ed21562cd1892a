"""What architecture a model is: asked by all that write its layers out by hand."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from transformers import PreTrainedModel

LLAMA_LIKE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def why_not_llama_like(
    model: PreTrainedModel, is_known: Callable[[nn.Module], bool] = lambda module: False
) -> str | None:
    """Why a decoder written for Llama, Qwen2 and Qwen3 does not compute what the model computes;
    None if it does. ``is_known``: modules of others that the caller reads too.
    """
    name, config = type(model).__name__, model.config
    if name not in LLAMA_LIKE:
        return f"{name} is none of {', '.join(LLAMA_LIKE)}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act}"
    if getattr(config, "use_sliding_window", False):
        return "sliding-window attention"
    if rotates_by_length(model.get_decoder()):
        return "rotary embedding that depends on the longest row"
    if any(
        not type(module).__module__.startswith(("transformers.", "torch.nn."))
        and not is_known(module)
        for module in model.modules()
    ):
        return "modules put into the model (adapters, quantised layers)"
    return None


def rotates_by_length(decoder: nn.Module) -> bool:
    """Whether a token is rotated by its position and by the longest row of the forward too."""
    return getattr(decoder.rotary_emb, "rope_type", None) in ("dynamic", "longrope")
