"""The differentiable log-probs of training, and the same as a function of the parameters for
forward-mode differentiation.

Log-probs are of ``softmax(z / temperature)``, the sampling distribution before any truncation.

Axes: N rollouts, T response tokens, M response tokens laid end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from counterpoise.maths.head import head_logp, logits_scores
from counterpoise.policy.backbone import Backbone, backbone, eager
from counterpoise.policy.pack import hidden_of, own_logits, pack_rows, place_tokens, shares_prompts


def token_logp(
    model: PreTrainedModel,
    prompt_ids: Sequence[Sequence[int]],
    token_ids_NT: Tensor,
    mask_NT: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    fused: bool = True,
) -> Tensor:
    """Differentiable trainer log-probs of the response tokens: ``log softmax(z /
    temperature)[token]``, 0 on padding.

    One forward of the rows given (the caller cuts micro-batches). Neither direction holds more than
    ``chunk`` rows of logits.

    Args:
        model: a Hugging Face causal LM, in the mode (dropout on or off) the caller has put it in.
        prompt_ids: the prompt's token ids of every row.
        token_ids_NT: the responses, right-padded.
        mask_NT: True on response tokens; a gap inside a response is read by later tokens but not
            scored.
        chunk: response tokens whose logits are alive at once (default: 64 MiB of them).
        fused: False takes a form that forward mode can differentiate (see ``logp_function``).

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=16,
    ...     hidden_size=8,
    ...     intermediate_size=16,
    ...     num_hidden_layers=1,
    ...     num_attention_heads=2,
    ... )
    >>> ids_NT = torch.tensor([[4, 5], [6, 0]])
    >>> token_logp(LlamaForCausalLM(config), [[1, 2], [3]], ids_NT, ids_NT > 0).shape
    torch.Size([2, 2])
    """
    parts = backbone(model)
    share = reads_prompts_once(parts, fused=fused)
    rows = pack_rows(prompt_ids, token_ids_NT, mask_NT, model.device, share=share)
    if parts.head is None:
        logits_MV = own_logits(model, rows, temperature)
        logp_M = logits_scores(logits_MV, rows.target_M).logp_M
    else:
        logp_M = head_logp(
            hidden_of(parts, rows),
            rows.target_M,
            parts.head,
            temperature=temperature,
            chunk=chunk,
            fused=fused,
        )
    return place_tokens(logp_M, rows, mask_NT)


def reads_prompts_once(parts: Backbone, *, fused: bool = True) -> bool:
    """Whether ``token_logp`` does: forward mode on a CPU pays for every small operation, and one
    attention beats two.
    """
    return shares_prompts(parts) and (fused or parts.decoder.device.type != "cpu")


def logp_function(
    model: PreTrainedModel,
    prompt_ids: Sequence[Sequence[int]],
    token_ids_NT: Tensor,
    mask_NT: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> Callable[[dict[str, Tensor]], Tensor]:
    """The log-probs as a function of the parameters, ``f(params) -> logp_NT``, for
    ``torch.func.jvp`` and its like.

    Attention takes the maths path while ``f`` runs (the other kernels have no forward mode).
    Parameters left out stay as they are; a tied weight is given once, under the name that
    ``model.named_parameters()`` has for it.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=16,
    ...     hidden_size=8,
    ...     intermediate_size=16,
    ...     num_hidden_layers=1,
    ...     num_attention_heads=2,
    ... )
    >>> model, ids_NT = LlamaForCausalLM(config), torch.tensor([[4, 5], [6, 0]])
    >>> params = {name: value.detach() for name, value in model.named_parameters()}
    >>> step = {name: torch.zeros_like(value) for name, value in params.items()}
    >>> logp_NT, change_NT = torch.func.jvp(
    ...     logp_function(model, [[1, 2], [3]], ids_NT, ids_NT > 0), (params,), (step,)
    ... )
    >>> change_NT.tolist()
    [[0.0, 0.0], [0.0, 0.0]]
    """
    scorer = _Scorer(model, (prompt_ids, token_ids_NT, mask_NT), temperature, chunk)

    def logp_of(params: dict[str, Tensor]) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH), eager(model):
            return torch.func.functional_call(
                scorer, {f"model.{name}": value for name, value in params.items()}, ()
            )

    return logp_of


class _Scorer(torch.nn.Module):
    """``token_logp`` with its arguments bound, as a module: ``functional_call`` swaps parameters of
    modules only.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        columns: tuple[Any, Any, Any],
        temperature: float,
        chunk: int | None,
    ) -> None:
        super().__init__()
        self.model: PreTrainedModel = model
        self.columns, self.temperature, self.chunk = columns, temperature, chunk

    def forward(self) -> Tensor:
        return token_logp(
            self.model, *self.columns, temperature=self.temperature, chunk=self.chunk, fused=False
        )
