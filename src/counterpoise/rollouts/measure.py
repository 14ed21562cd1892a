"""Scoring finished rollouts: the columns that rules need (no gradient), and the differentiable log-probs of training.

Rows are prompt + response, right-padded: with causal attention nothing after a token reaches it, so no attention mask is needed and the
fastest kernels apply. Only response positions go through the head, a chunk of tokens at a time.

Log-probs here are of ``softmax(z / temperature)``: the sampling distribution before truncation. A sampler that also truncated
(top-k, top-p) renormalised over the tokens it kept, so its ``sampler_logp_NT`` is higher than ``trainer_logp_NT`` of the same weights.

Axes: N rollouts, T response tokens, B rows of one forward, L tokens of prompt + response, M response tokens laid end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from counterpoise.numerics_head import head_logp, head_scores, logits_scores
from counterpoise.rollouts.backbone import Backbone, backbone, evaluating

MEASURED = frozenset({"trainer_logp_NT", "entropy_NT", "hidden_NTD", "topk_ids_NTK", "topk_logp_NTK", "ref_logp_NT", "head_VD"})
TOKEN_BUDGET = 16384  # prompt + response tokens, padding included, of one forward


class TokenScores(NamedTuple):
    """Differentiable log-prob and entropy of each response token, 0 on padding; float32 or wider."""

    logp_NT: Tensor
    entropy_NT: Tensor


class _Packed(NamedTuple):
    """Rows ready for one forward, and where their response tokens are."""

    ids_BL: Tensor
    row_M: Tensor
    column_M: Tensor
    position_M: Tensor
    target_M: Tensor


def length_buckets(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Rows cut into batches of similar length with at most ``token_budget`` tokens each, padding included.

    A row longer than the budget is a batch of its own.

    >>> length_buckets([5, 1, 4, 2], token_budget=8)
    [[1, 3], [2], [0]]
    """
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        if batches and (len(batches[-1]) + 1) * lengths[row] <= token_budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


@torch.no_grad()
def measure(
    model: Any,
    prompt_ids: Sequence[Sequence[int]],
    token_ids_NT: Tensor,
    mask_NT: Tensor,
    needs: frozenset[str] | set[str],
    *,
    temperature: float = 1.0,
    token_budget: int = TOKEN_BUDGET,
    topk: int = 20,
    chunk: int | None = None,
    ref_model: Any = None,
) -> dict[str, Tensor]:
    """One forward over all rollouts for the columns in ``needs``, and nothing else; dropout off, no gradient.

    ``trainer_logp_NT``, ``entropy_NT``, ``hidden_NTD`` (what feeds the head), ``topk_ids_NTK`` and ``topk_logp_NTK`` (largest first),
    ``ref_logp_NT`` (a forward of ``ref_model``), ``head_VD`` (the head's weight, not a copy). Padding is 0. Log-probs and entropy are of
    ``softmax(z / temperature)``, untruncated, float32 or wider.

    Args:
        model: the causal LM being trained.
        prompt_ids: the prompt's token ids of every row (N lists).
        token_ids_NT, mask_NT: the responses, right-padded.
        needs: column names; ``MEASURED`` lists them.
        token_budget: tokens of one forward, padding included.
        topk: K.
        chunk: response tokens whose logits are alive at once (default: 64 MiB of them).

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> ids_NT = torch.tensor([[4, 5], [6, 0]])
    >>> out = measure(LlamaForCausalLM(config), [[1, 2], [3]], ids_NT, ids_NT > 0, {"entropy_NT", "hidden_NTD"})
    >>> sorted((name, tuple(column.shape)) for name, column in out.items())
    [('entropy_NT', (2, 2)), ('hidden_NTD', (2, 2, 8))]
    """
    _check(prompt_ids, token_ids_NT, mask_NT, needs, ref_model)
    columns: dict[str, Tensor] = {}
    own = set(needs) - {"ref_logp_NT", "head_VD"}
    if own:
        columns |= _forward(model, prompt_ids, token_ids_NT, mask_NT, own, temperature, token_budget, topk, chunk)
    if "ref_logp_NT" in needs:
        ref = _forward(ref_model, prompt_ids, token_ids_NT, mask_NT, {"trainer_logp_NT"}, temperature, token_budget, 0, chunk)
        columns["ref_logp_NT"] = ref["trainer_logp_NT"]
    if "head_VD" in needs:
        columns["head_VD"] = model.get_output_embeddings().weight.detach()
    return {name: columns[name] for name in needs}


def _forward(
    model: Any,
    prompt_ids: Sequence[Sequence[int]],
    token_ids_NT: Tensor,
    mask_NT: Tensor,
    names: set[str],
    temperature: float,
    token_budget: int,
    topk: int,
    chunk: int | None,
) -> dict[str, Tensor]:
    columns: dict[str, Tensor] = {}
    lengths = [len(prompt) + length for prompt, length in zip(prompt_ids, _lengths(mask_NT))]
    with evaluating(model):
        parts = backbone(model)
        for rows in length_buckets(lengths, token_budget):
            row_B = torch.tensor(rows, device=token_ids_NT.device)
            packed = _packed([prompt_ids[row] for row in rows], token_ids_NT[row_B], mask_NT[row_B], model.device)
            values = _bucket(model, parts, packed, names, temperature, topk, chunk)
            for name, value in values.items():
                shape = (*mask_NT.shape, *value.shape[1:])
                column = columns.setdefault(name, torch.zeros(shape, dtype=value.dtype, device=value.device))
                column[row_B.to(value.device)[packed.row_M], packed.column_M] = value
    return columns


def _bucket(
    model: Any, parts: Backbone, packed: _Packed, names: set[str], temperature: float, topk: int, chunk: int | None
) -> dict[str, Tensor]:
    """The named columns of one forward, one row a response token."""
    options = {"with_entropy": "entropy_NT" in names, "topk": topk if names & {"topk_ids_NTK", "topk_logp_NTK"} else 0}
    if parts.head is None:
        if "hidden_NTD" in names:
            raise ValueError(
                f"measure: hidden_NTD is not known for {type(model).__name__}: its logits are not head weight x last hidden state. "
                "Choose a method that does not need hidden_NTD."
            )
        hidden_MD, scores = None, logits_scores(_own_logits(model, packed, temperature), packed.target_M, **options)
    else:
        hidden_MD = _hidden(parts, packed)
        is_head_needed = names != {"hidden_NTD"}
        scores = head_scores(hidden_MD, packed.target_M, parts.head, temperature=temperature, chunk=chunk, **options) if is_head_needed else None
    found = {"hidden_NTD": None if hidden_MD is None else hidden_MD.to(torch.promote_types(hidden_MD.dtype, torch.float32))}
    if scores is not None:
        found |= {"trainer_logp_NT": scores.logp_M, "entropy_NT": scores.entropy_M}
        found |= {"topk_ids_NTK": scores.topk_ids_MK, "topk_logp_NTK": scores.topk_logp_MK}
    return {name: found[name] for name in names}


@overload
def token_logp(
    model: Any,
    prompt_ids: Sequence[Sequence[int]],
    token_ids_NT: Tensor,
    mask_NT: Tensor,
    *,
    temperature: float = ...,
    chunk: int | None = ...,
    with_entropy: Literal[False] = ...,
    fused: bool = ...,
) -> Tensor: ...
@overload
def token_logp(
    model: Any,
    prompt_ids: Sequence[Sequence[int]],
    token_ids_NT: Tensor,
    mask_NT: Tensor,
    *,
    temperature: float = ...,
    chunk: int | None = ...,
    with_entropy: Literal[True],
    fused: bool = ...,
) -> TokenScores: ...
def token_logp(
    model: Any,
    prompt_ids: Sequence[Sequence[int]],
    token_ids_NT: Tensor,
    mask_NT: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    with_entropy: bool = False,
    fused: bool = True,
) -> Tensor | TokenScores:
    """Differentiable trainer log-probs of the response tokens: ``log softmax(z / temperature)[token]``, 0 on padding.

    One forward of the rows given (the caller cuts micro-batches). Neither direction holds more than ``chunk`` rows of logits.

    Args:
        prompt_ids: the prompt's token ids of every row.
        token_ids_NT, mask_NT: the responses, right-padded; positions where the mask is False inside a response are read, not scored.
        chunk: response tokens whose logits are alive at once (default: 64 MiB of them).
        with_entropy: return ``TokenScores(logp_NT, entropy_NT)``, both differentiable.
        fused: False uses plain operations, for forward-mode differentiation (see ``logp_function``).

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> ids_NT = torch.tensor([[4, 5], [6, 0]])
    >>> token_logp(LlamaForCausalLM(config), [[1, 2], [3]], ids_NT, ids_NT > 0).shape
    torch.Size([2, 2])
    """
    packed, parts = _packed(prompt_ids, token_ids_NT, mask_NT, model.device), backbone(model)
    if parts.head is None:
        scores = logits_scores(_own_logits(model, packed, temperature), packed.target_M, with_entropy=True)
    else:
        scores = head_logp(
            _hidden(parts, packed), packed.target_M, parts.head, temperature=temperature, chunk=chunk, fused=fused
        )
    logp_NT = _placed(scores.logp_M, packed, mask_NT)
    return TokenScores(logp_NT, _placed(scores.entropy_M, packed, mask_NT)) if with_entropy else logp_NT


def logp_function(
    model: torch.nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    token_ids_NT: Tensor,
    mask_NT: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> Callable[[dict[str, Tensor]], Tensor]:
    """The log-probs as a function of the parameters, ``f(params) -> logp_NT``, for ``torch.func.jvp`` and its like.

    Attention takes the maths path while ``f`` runs (the other kernels have no forward mode). Parameters left out stay as they are;
    a tied weight is given once, under the name ``model.named_parameters()`` has for it.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> model, ids_NT = LlamaForCausalLM(config), torch.tensor([[4, 5], [6, 0]])
    >>> params = {name: value.detach() for name, value in model.named_parameters()}
    >>> step = {name: 0.01 * torch.randn_like(value) for name, value in params.items()}
    >>> logp_NT, change_NT = torch.func.jvp(logp_function(model, [[1, 2], [3]], ids_NT, ids_NT > 0), (params,), (step,))
    """
    scorer = _Scorer(model, prompt_ids, token_ids_NT, mask_NT, temperature, chunk)

    def logp_of(params: dict[str, Tensor]) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return torch.func.functional_call(scorer, {f"model.{name}": value for name, value in params.items()}, ())

    return logp_of


class _Scorer(torch.nn.Module):
    """``token_logp`` with its arguments bound, as a module: ``functional_call`` swaps parameters of modules only."""

    def __init__(self, model: torch.nn.Module, *columns: Any) -> None:
        super().__init__()
        self.model, self.columns = model, columns

    def forward(self) -> Tensor:
        *rollouts, temperature, chunk = self.columns
        return token_logp(self.model, *rollouts, temperature=temperature, chunk=chunk, fused=False)


def _hidden(parts: Backbone, packed: _Packed) -> Tensor:
    hidden_BLD = parts.decoder(input_ids=packed.ids_BL, use_cache=False).last_hidden_state
    return hidden_BLD[packed.row_M, packed.position_M]


def _own_logits(model: Any, packed: _Packed, temperature: float) -> Tensor:
    logits_MV = model(input_ids=packed.ids_BL, use_cache=False).logits[packed.row_M, packed.position_M]
    return logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)) / temperature


def _packed(prompt_ids: Sequence[Sequence[int]], token_ids_NT: Tensor, mask_NT: Tensor, device: torch.device) -> _Packed:
    token_ids_NT, mask_NT = token_ids_NT.to(device), mask_NT.to(device).bool()
    length_N = torch.tensor([len(prompt) for prompt in prompt_ids], device=device)
    width_T = mask_NT.shape[1]
    ids_BL = torch.zeros(len(prompt_ids), int(length_N.max()) + width_T, dtype=torch.long, device=device)
    padded = [list(prompt) + [0] * (int(length_N.max()) - len(prompt)) for prompt in prompt_ids]
    ids_BL[:, : int(length_N.max())] = torch.tensor(padded, device=device)
    ids_BL.scatter_(1, length_N[:, None] + torch.arange(width_T, device=device), token_ids_NT)
    last = int((length_N + torch.tensor(_lengths(mask_NT), device=device)).max())
    row_M, column_M = mask_NT.nonzero(as_tuple=True)
    return _Packed(ids_BL[:, :last], row_M, column_M, length_N[row_M] + column_M - 1, token_ids_NT[row_M, column_M])


def _placed(value_M: Tensor | None, packed: _Packed, mask_NT: Tensor) -> Tensor:
    assert value_M is not None
    flat_M = packed.row_M * mask_NT.shape[1] + packed.column_M
    return value_M.new_zeros(mask_NT.numel()).index_put((flat_M,), value_M).view(mask_NT.shape)


def _lengths(mask_NT: Tensor) -> list[int]:
    """Tokens up to the last one that counts."""
    number_T = torch.arange(1, mask_NT.shape[1] + 1, device=mask_NT.device)
    return (mask_NT * number_T).amax(1).tolist()


def _check(prompt_ids: Sequence[Sequence[int]], token_ids_NT: Tensor, mask_NT: Tensor, needs: set[str] | frozenset[str], ref: Any) -> None:
    unknown = sorted(set(needs) - MEASURED)
    if unknown:
        raise ValueError(f"measure: cannot measure {unknown[0]!r}. Known: {', '.join(sorted(MEASURED))}.")
    if len(prompt_ids) != len(mask_NT) or token_ids_NT.shape != mask_NT.shape:
        raise ValueError(
            f"measure: {len(prompt_ids)} prompts, token_ids_NT {list(token_ids_NT.shape)}, mask_NT {list(mask_NT.shape)}; "
            "expected one prompt a row and equal shapes."
        )
    if "ref_logp_NT" in needs and ref is None:
        raise ValueError("measure: ref_logp_NT is needed and there is no reference model. Pass ref_model.")
