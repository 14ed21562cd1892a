"""The own part of single tokens: how far a token's own gradient moves its own log-prob, over all
parameters.

With the optimizer's response P the part of token j for a unit coefficient is ``<g_j, P g_j> = sum_p
P_p g_jp^2``, g_j the gradient of its log-prob. It takes one gradient per token. S tokens share a
forward and a backward down to the layers' outputs: each layer is then differentiated by its own
weights row by row (``row_norms``). Layers that mix the rows, or say nothing of them, are found by
trying (``can_batch``); then it is one backward per token.

Axes: S tokens, one per row; D hidden size; V vocabulary.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from counterpoise.ledger.calculus.head_change import logit_slope
from counterpoise.ledger.calculus.logprobs import LogProbs, Params, Texts, of_model
from counterpoise.ledger.calculus.optimizers import Response
from counterpoise.ledger.calculus.places import parameters, places, swapped
from counterpoise.ledger.calculus.row_norms import (
    Call,
    CannotBatch,
    HeadCall,
    is_embedding,
    row_norms,
)
from counterpoise.maths.head import head_logits
from counterpoise.maths.transfer import send_all
from counterpoise.policy.backbone import backbone, eager, evaluating
from counterpoise.policy.fused import seen
from counterpoise.policy.mix import product_dtype
from counterpoise.policy.pack import Packed, hidden_of, pack_rows

log = logging.getLogger("counterpoise.ledger")
Token = tuple[int, int]  # row of the update, position in the response
MOST_NUMBERS = 1 << 27  # of gradients by row: 512 MiB in float32
TRIED = 4  # tokens
_AGREES: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # tried once per model


class Chosen(NamedTuple):
    """Tokens that share a backward, and a row per token that ends with it."""

    tokens: Sequence[Token]
    rows: Packed


class Use(NamedTuple):
    """One call of a layer that has trainable weights of its own.

    ``names``: its weights -> their names in the model; ``span``: which of the output's last axis
    are the layer's, where layers that read the same states share a product.
    """

    layer: nn.Module
    names: dict[str, str]
    value: Tensor
    output: Tensor
    span: slice = slice(None)


def own_parts(
    model: PreTrainedModel,
    texts: Texts,
    params: Params,
    response: Response,
    chosen: Sequence[Chosen],
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    kernels: Callable[[], AbstractContextManager] = nullcontext,
) -> Tensor:
    """<g_j, P g_j> of chosen tokens over all trainable parameters, [S].

    Args:
        texts: the rows of the update.
        params: the trainable parameters before the update.
        response: P, see ``optimizers.response``.
        chosen: see ``lay_out``.
        autocast, kernels: precision and layers of the training forward.
    """
    tokens = [token for some in chosen for token in some.tokens]
    if not tokens:
        return next(iter(params.values())).new_zeros(0)
    if len(tokens) > 1 and can_batch(model, texts, params, tokens[:TRIED], autocast, kernels):
        how = (texts.temperature, autocast, kernels)
        return torch.cat([own_by_rows(model, params, response, some.rows, *how) for some in chosen])
    return own_one_by_one(of_model(model, texts, autocast), params, response, tokens)


def lay_out(
    model: PreTrainedModel, texts: Texts, params: Params, tokens: Sequence[Token]
) -> list[Chosen]:
    """(row, position) of each token -> as many as fit a backward, laid out for it."""
    size = max(1, MOST_NUMBERS // largest_by_row(model, params))
    cuts = [tokens[k : k + size] for k in range(0, len(tokens), size)]
    return [Chosen(cut, one_token_rows(texts, cut, model.device)) for cut in cuts]


def largest_by_row(model: PreTrainedModel, params: Params) -> int:
    """Numbers of the largest weight whose gradients are laid out by row: not embedding and head."""
    table, head = model.get_input_embeddings(), backbone(model).head
    apart = {id(table.weight)} if is_embedding(table) else set()
    apart |= set() if head is None else {id(head.weight_VD)}
    live = parameters(model).items()
    return max((p.numel() for name, p in live if name in params and id(p) not in apart), default=1)


def draw_tokens(weight_NT: Tensor, num: int, generator: torch.Generator) -> list[Token]:
    """Up to ``num`` tokens drawn evenly from those whose gradient entered the update, by weights
    on the CPU.

    >>> draw_tokens(torch.tensor([[0.0, 2.0], [0.0, 0.0]]), 3, torch.Generator())
    [(0, 1)]
    """
    entered_K2 = (weight_NT != 0).nonzero()
    pick_S = torch.randperm(len(entered_K2), generator=generator)[:num].sort().values
    return [(row, position) for row, position in entered_K2[pick_S].tolist()]


def own_column(weight_NT: Tensor, tokens: Sequence[Token], part_S: Tensor) -> Tensor:
    """The own part of the chosen tokens on [N, T]; NaN elsewhere."""
    device, dtype = part_S.device, weight_NT.dtype
    out_NT = torch.full(weight_NT.shape, torch.nan, dtype=dtype, device=device)
    if tokens:
        row_S, position_S = torch.tensor(tokens).unbind(1)
        columns = (row_S, position_S, weight_NT[row_S, position_S])
        row_S, position_S, weight_S = send_all(columns, device)
        out_NT[row_S, position_S] = weight_S * part_S.to(dtype)
    return out_NT


def own_one_by_one(
    logprobs: LogProbs, params: Params, response: Response, tokens: Sequence[Token]
) -> Tensor:
    """The same for any function of named parameters: one forward and backward per token."""
    leaves = _leaves(params)
    parts = []
    for row, position in tokens:
        with torch.enable_grad():
            logp_1T = logprobs.reverse(leaves, torch.tensor([row]))
        grads = torch.autograd.grad(logp_1T[0, position], list(leaves.values()), allow_unused=True)
        squares = [
            (grad.square() * response[name]).sum()
            for name, grad in zip(leaves, grads)
            if grad is not None
        ]
        parts.append(torch.stack(squares).sum())
    return torch.stack(parts)


def own_by_rows(
    model: PreTrainedModel,
    params: Params,
    response: Response,
    rows: Packed,
    temperature: float = 1.0,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    kernels: Callable[[], AbstractContextManager] = nullcontext,
) -> Tensor:
    """The same in one forward and backward; ``CannotBatch`` where a layer does not allow it."""
    with evaluating(model), eager(model), autocast(), kernels(), torch.enable_grad():
        for leaves in _sources(model, params):
            with swapped(model, leaves):
                part_S = _own(model, leaves, rows, response, temperature)
            if part_S is not None:
                return part_S
    raise CannotBatch("a layer's output does not depend on its weights")


def _sources(model: PreTrainedModel, params: Params) -> Iterator[Params]:
    """Parameters of which enough require a gradient for every layer's output to have one: the
    embeddings, since all that follows them does too, or else all.

    Fewer are faster: what a layer multiplies by is then no part of the graph.
    """
    tables = {place.name for place in places(model) if is_embedding(place.module)}
    if first := _leaves({name: value for name, value in params.items() if name in tables}):
        yield params | first
    yield _leaves(params)


def one_token_rows(texts: Texts, tokens: Sequence[Token], device: torch.device) -> Packed:
    """A row per token that ends with it: its prompt and what was answered so far."""
    row_S, position_S = torch.tensor(tokens).unbind(1)
    ids_ST = texts.token_ids_NT[row_S]
    is_it_ST = torch.arange(ids_ST.shape[1]) == position_S[:, None]
    return pack_rows([texts.prompt_ids[row] for row, _ in tokens], ids_ST, is_it_ST, device)


def can_batch(
    model: PreTrainedModel,
    texts: Texts,
    params: Params,
    tokens: Sequence[Token],
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    kernels: Callable[[], AbstractContextManager] = nullcontext,
) -> bool:
    """Whether rows can share a backward: tried on a few tokens, the first time a model is seen."""
    if model not in _AGREES:
        why = _why_not_batch(model, texts, params, tokens, autocast, kernels)
        if why is not None:
            name = type(model).__name__
            log.warning("%s: own parts take a backward per token, which is slow: %s", name, why)
        _AGREES[model] = why is None
    return _AGREES[model]


def _why_not_batch(
    model: PreTrainedModel,
    texts: Texts,
    params: Params,
    tokens: Sequence[Token],
    autocast: Callable[[], AbstractContextManager],
    kernels: Callable[[], AbstractContextManager],
) -> str | None:
    """In the weights' own precision, where a wrong derivative cannot hide behind rounding, and in
    that of training: half-precision products move an own part by some 10%, so that a close match
    there would be luck.
    """
    unit: Response = dict.fromkeys(params, 1.0)
    rows = one_token_rows(texts, tokens, model.device)
    for precision in dict.fromkeys((nullcontext, autocast)):
        expected_S = own_one_by_one(of_model(model, texts, precision), params, unit, tokens)
        try:
            how = (texts.temperature, precision, kernels)
            part_S = own_by_rows(model, params, unit, rows, *how)
        except torch.OutOfMemoryError:
            raise
        except (CannotBatch, RuntimeError) as error:  # what lacks vmap has no narrower type
            return str(error)
        weight = next(iter(params.values()))
        with precision():
            most = 0.01 if product_dtype(weight, weight).itemsize >= 4 else 0.5
        error = float((part_S - expected_S).norm() / expected_S.norm())
        if not error <= most:
            return f"its rows together give other numbers, off by {error:.2g} of their size"
    return None


def _own(
    model: PreTrainedModel, leaves: Params, rows: Packed, response: Response, temperature: float
) -> Tensor | None:
    """None where the output of a layer has no gradient."""
    head = backbone(model).head
    if head is None:
        raise CannotBatch("its head is not a plain linear layer")
    names = {id(leaf): name for name, leaf in leaves.items()}
    with watch_layers(model, names, len(rows.target_M)) as uses:
        hidden_SD = hidden_of(backbone(model), rows)
    if not all(use.output.requires_grad for use in uses):
        return None
    still = head._replace(weight_VD=head.weight_VD.detach())  # only its input's gradient is asked
    logits_SV = head_logits(hidden_SD, still, temperature=temperature)
    logp_S = logits_SV.log_softmax(-1).gather(1, rows.target_M[:, None])[:, 0]
    deltas = torch.autograd.grad(logp_S.sum(), [use.output for use in uses], allow_unused=True)
    calls = [
        Call(use.layer, local, name, use.value, delta[..., use.span])
        for use, delta in zip(uses, deltas)
        for local, name in use.names.items()
        if delta is not None
    ]
    with torch.no_grad():
        slope_SV = logit_slope(logits_SV.detach(), rows.target_M[:, None], head, temperature)
        weight, bias = (names.get(id(part)) for part in (head.weight_VD, head.bias_V))
        last = HeadCall(weight, bias, hidden_SD.detach(), slope_SV)
        return row_norms(calls, last, response, MOST_NUMBERS)


@contextmanager
def watch_layers(
    model: PreTrainedModel, names: dict[int, str], num_rows: int
) -> Iterator[list[Use]]:
    """Every call of a layer with trainable weights of its own, while the block runs."""
    uses: list[Use] = []

    def own_names(layer: nn.Module) -> dict[str, str]:
        return {k: names[id(p)] for k, p in layer._parameters.items() if id(p) in names}

    def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tensors = [*args, output]
        if kwargs or len(args) != 1 or not all(_has_rows(value, num_rows) for value in tensors):
            raise CannotBatch(f"{type(layer).__name__} does not tell the rows apart")
        uses.append(Use(layer, own_names(layer), args[0].detach(), output))

    def see(layers: Sequence[nn.Module], value: Tensor, output: Tensor) -> None:
        if not (_has_rows(value, num_rows) and _has_rows(output, num_rows)):
            raise CannotBatch("fused layers do not tell the rows apart")
        sizes = [getattr(layer, "out_features", output.shape[-1]) for layer in layers]
        ends = itertools.accumulate(sizes, initial=0)
        for layer, first, size in zip(layers, ends, sizes):
            if own := own_names(layer):
                span = slice(first, first + size)
                uses.append(Use(layer, own, value.detach(), output, span))

    with seen(model, see) as told:
        called = (place.module for place in places(model) if place.module not in told)
        layers = [layer for layer in dict.fromkeys(called) if own_names(layer)]
        hooks = [layer.register_forward_hook(keep, with_kwargs=True) for layer in layers]
        try:
            yield uses
        finally:
            for hook in hooks:
                hook.remove()


def _has_rows(value: Any, num_rows: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == num_rows


def _leaves(params: Params) -> Params:
    return {name: value.detach().requires_grad_() for name, value in params.items()}
