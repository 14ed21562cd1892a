"""Measure: one forward without gradient over finished rollouts, for the columns that rules need and
no others.

Log-probs here are of ``softmax(z / temperature)``: the sampling distribution before truncation. A
sampler that also truncated
(top-k, top-p) renormalised over the tokens it kept, so its ``sampler_logp_NT`` is higher than
``trainer_logp_NT`` of the same weights.

Axes: N rollouts, T response tokens, M response tokens of one forward laid end to end, D hidden
    size, K candidates kept of V.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from counterpoise.maths.head import head_kl, head_logits, head_scores, logits_kl, logits_scores
from counterpoise.maths.transfer import fetch, send_all
from counterpoise.policy.backbone import Backbone, backbone, evaluating
from counterpoise.policy.pack import (
    Packed,
    hidden_of,
    own_logits,
    pack_rows,
    response_lengths,
    row_buckets,
    shares_prompts,
)

MEASURED = frozenset(
    {
        "trainer_logp_NT",
        "entropy_NT",
        "hidden_NTD",
        "topk_ids_NTK",
        "topk_logp_NTK",
        "ref_logp_NT",
        "ref_kl_NT",
        "head_VD",
    }
)
REFERENCE = frozenset({"ref_logp_NT", "ref_kl_NT"})  # columns that need a reference model
TOKEN_BUDGET = 16384


class _Settings(NamedTuple):
    temperature: float
    token_budget: int
    topk: int
    chunk: int | None


@torch.no_grad()
def measure(
    model: PreTrainedModel,
    prompt_ids: Sequence[Sequence[int]],
    token_ids_NT: Tensor,
    mask_NT: Tensor,
    needs: frozenset[str] | set[str],
    *,
    temperature: float = 1.0,
    token_budget: int = TOKEN_BUDGET,
    topk: int = 20,
    chunk: int | None = None,
    ref_model: PreTrainedModel | None = None,
) -> dict[str, Tensor]:
    """One forward over all rollouts for the columns in ``needs``, and nothing else; dropout off, no
    gradient.

    ``trainer_logp_NT``, ``entropy_NT``, ``hidden_NTD`` (what feeds the head), ``topk_ids_NTK`` and
    ``topk_logp_NTK`` (largest first),
    ``ref_logp_NT`` (a forward of ``ref_model``), ``ref_kl_NT`` (KL(model || reference) over the
    whole vocabulary, a forward of each), ``head_VD`` (the head's weight, not a copy).
    Padding is 0. Log-probs and entropy are of
    ``softmax(z / temperature)``, untruncated, float32 or wider.

    Args:
        model: the causal LM being trained.
        prompt_ids: the prompt's token ids of every row (N lists).
        token_ids_NT: the responses, right-padded.
        mask_NT: True on response tokens.
        needs: column names; ``MEASURED`` lists them.
        token_budget: tokens of one forward, prompt and padding included.
        topk: K.
        chunk: response tokens whose logits are alive at once (default: 64 MiB of them).
        ref_model: the frozen reference, for ``ref_logp_NT`` and ``ref_kl_NT``.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=16,
    ...     hidden_size=8,
    ...     intermediate_size=16,
    ...     num_hidden_layers=1,
    ...     num_attention_heads=2,
    ... )
    >>> ids_NT = torch.tensor([[4, 5], [6, 0]])
    >>> out = measure(
    ...     LlamaForCausalLM(config),
    ...     [[1, 2], [3]],
    ...     ids_NT,
    ...     ids_NT > 0,
    ...     {"entropy_NT", "hidden_NTD"},
    ... )
    >>> sorted((name, tuple(column.shape)) for name, column in out.items())
    [('entropy_NT', (2, 2)), ('hidden_NTD', (2, 2, 8))]
    """
    _check(prompt_ids, token_ids_NT, mask_NT, needs, ref_model)
    settings = _Settings(temperature, token_budget, topk, chunk)
    columns: dict[str, Tensor] = {}
    own = set(needs) - REFERENCE - {"head_VD"}
    if own:
        columns |= _forward(model, prompt_ids, token_ids_NT, mask_NT, own, settings)
    if "ref_kl_NT" in needs:
        columns |= _forward(
            model, prompt_ids, token_ids_NT, mask_NT, {"ref_kl_NT"}, settings, ref_model
        )
    if "ref_logp_NT" in needs and ref_model is not None:
        ref = _forward(ref_model, prompt_ids, token_ids_NT, mask_NT, {"trainer_logp_NT"}, settings)
        columns["ref_logp_NT"] = ref["trainer_logp_NT"]
    if "head_VD" in needs:
        head: Any = model.get_output_embeddings()
        columns["head_VD"] = head.weight.detach()
    return columns


def _forward(
    model: PreTrainedModel,
    prompt_ids: Sequence[Sequence[int]],
    token_ids_NT: Tensor,
    mask_NT: Tensor,
    names: set[str],
    settings: _Settings,
    ref_model: PreTrainedModel | None = None,
) -> dict[str, Tensor]:
    columns: dict[str, Tensor] = {}
    token_ids_NT, mask_NT = fetch([token_ids_NT, mask_NT])
    with evaluating(model), nullcontext() if ref_model is None else evaluating(ref_model):
        parts = backbone(model)
        ref = None if ref_model is None else (ref_model, backbone(ref_model))
        share = shares_prompts(parts) and (ref is None or shares_prompts(ref[1]))
        buckets = [
            torch.tensor(bucket)
            for bucket in row_buckets(
                prompt_ids, response_lengths(mask_NT), settings.token_budget, share=share
            )
        ]
        for row_B, sent_B in zip(buckets, send_all(buckets, model.device)):
            rows = pack_rows(
                [prompt_ids[row] for row in row_B.tolist()],
                token_ids_NT[row_B],
                mask_NT[row_B],
                model.device,
                share=share,
            )
            if ref is not None:
                bucket = {"ref_kl_NT": _kl((model, parts), ref, rows, settings)}
            else:
                bucket = _bucket(model, parts, rows, names, settings)
            for name, value in bucket.items():
                if name not in columns:
                    columns[name] = value.new_zeros(*mask_NT.shape, *value.shape[1:])
                columns[name][sent_B[rows.row_M], rows.column_M] = value
    return columns


def _bucket(
    model: PreTrainedModel, parts: Backbone, rows: Packed, names: set[str], settings: _Settings
) -> dict[str, Tensor]:
    """The named columns of one forward, one row a response token."""
    options: dict[str, Any] = {
        "with_entropy": "entropy_NT" in names,
        "topk": settings.topk if names & {"topk_ids_NTK", "topk_logp_NTK"} else 0,
    }
    columns: dict[str, Any] = {}
    if parts.head is None:
        _check_hidden(model, names)
        scores = logits_scores(
            own_logits(model, rows, settings.temperature), rows.target_M, **options
        )
    else:
        hidden_MD = hidden_of(parts, rows)
        columns["hidden_NTD"] = hidden_MD.to(torch.promote_types(hidden_MD.dtype, torch.float32))
        if names == {"hidden_NTD"}:
            return columns
        scores = head_scores(
            hidden_MD,
            rows.target_M,
            parts.head,
            temperature=settings.temperature,
            chunk=settings.chunk,
            **options,
        )
    columns |= {"trainer_logp_NT": scores.logp_M, "entropy_NT": scores.entropy_M}
    columns |= {"topk_ids_NTK": scores.topk_ids_MK, "topk_logp_NTK": scores.topk_logp_MK}
    return {name: columns[name] for name in names}


def _kl(
    own: tuple[PreTrainedModel, Backbone],
    ref: tuple[PreTrainedModel, Backbone],
    rows: Packed,
    settings: _Settings,
) -> Tensor:
    """KL(own || reference) over the vocabulary at each response token of one forward, [M]."""
    if own[1].head is not None and ref[1].head is not None:
        return head_kl(
            hidden_of(own[1], rows),
            own[1].head,
            hidden_of(ref[1], rows),
            ref[1].head,
            temperature=settings.temperature,
            chunk=settings.chunk,
        )
    logits = [
        own_logits(model, rows, settings.temperature)
        if parts.head is None
        else head_logits(hidden_of(parts, rows), parts.head, temperature=settings.temperature)
        for model, parts in (own, ref)
    ]
    return logits_kl(*logits)


def _check_hidden(model: PreTrainedModel, names: set[str]) -> None:
    if "hidden_NTD" in names:
        raise ValueError(
            f"measure: hidden_NTD is not known for {type(model).__name__}: its logits are not head"
            " weight x last hidden state. Choose a method that does not need hidden_NTD."
        )


def _check(
    prompt_ids: Sequence[Sequence[int]],
    token_ids_NT: Tensor,
    mask_NT: Tensor,
    needs: set[str] | frozenset[str],
    ref_model: PreTrainedModel | None,
) -> None:
    unknown = sorted(set(needs) - MEASURED)
    if unknown:
        raise ValueError(
            f"measure: cannot measure {unknown[0]!r}. Known: {', '.join(sorted(MEASURED))}."
        )
    if len(prompt_ids) != len(mask_NT) or token_ids_NT.shape != mask_NT.shape:
        raise ValueError(
            f"measure: {len(prompt_ids)} prompts, token_ids_NT {list(token_ids_NT.shape)}, mask_NT"
            f" {list(mask_NT.shape)}; expected one prompt a row and equal shapes."
        )
    if REFERENCE & needs and ref_model is None:
        raise ValueError(
            f"measure: {max(REFERENCE & needs)} is needed and there is no reference model. Pass"
            " ref_model."
        )
