"""The account of one update: what it did to every token it was trained on, and why.

Reads, never writes: model, optimizer and RNG stay.

Axes: N rows of the update, T response tokens, M tokens laid end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from counterpoise.ledger.calculus.decompose import decompose
from counterpoise.ledger.calculus.head_change import (
    HeadChange,
    HeadResponse,
    HeadState,
    head_change,
)
from counterpoise.ledger.calculus.logprobs import Params, Texts, of_model
from counterpoise.ledger.calculus.optimizers import Response, UnknownOptimizer, response
from counterpoise.ledger.calculus.own import draw_tokens, lay_out, own_column, own_parts
from counterpoise.ledger.calculus.places import at, parameters, walked_once
from counterpoise.ledger.measures.changes import cancellation, change_sign
from counterpoise.maths.columns import is_flip
from counterpoise.maths.head import Head
from counterpoise.maths.transfer import send, send_all
from counterpoise.policy import measure
from counterpoise.policy.backbone import backbone, evaluating
from counterpoise.policy.fused import has_triton_layers
from counterpoise.policy.pack import Packed, hidden_of, pack_rows, shares_prompts
from counterpoise.run.schema import PART_PREFIX, REST
from counterpoise.types import Rows, TokenLoss

NOISE_STRIDE = 4  # every fourth row is scored twice


class Scores(NamedTuple):
    """Before and after the update, same forward.

    ``kl_NT`` and ``own_head_NT`` (for a coefficient of 1) are None where the head is not plain.
    """

    logp_before_NT: Tensor
    logp_after_NT: Tensor
    entropy_NT: Tensor
    kl_NT: Tensor | None
    own_head_NT: Tensor | None
    noise_floor: Tensor | float


class Account(NamedTuple):
    """Columns of the token table for the update's rows, [N, T], on the CPU or where the model is;
    ``notes`` say what is missing and why; ``noise_floor`` is one number, there too where it was
    measured.
    """

    columns: dict[str, Tensor]
    notes: list[str]
    noise_floor: Tensor | float


def account(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    before: Params,
    texts: Texts,
    rows: Rows,
    loss: TokenLoss,
    clip_factor: float,
    classes: Mapping[str, Mapping[str, Tensor]],
    gradient: Params | None = None,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    kernels: Callable[[], AbstractContextManager] = nullcontext,
    *,
    is_batched: bool | None = True,
    noise_floor: Tensor | float | None = None,
    own_tokens: int = 0,
    seed: int = 0,
    count_P: Sequence[float] | None = None,
) -> Account:
    """Account for the update that led from ``before`` to the model's present parameters.

    The host does not wait for an accelerator, unless it has to read ``count_P`` or sees a model for
    the first time.

    Args:
        model, optimizer: after the update.
        before: the trainable parameters before it (``copied(trainable(model))``).
        texts: the update's rows as the model reads them.
        rows, loss: what the update used, and what its loss returned; on the CPU.
        clip_factor: by which the gradient was scaled.
        classes: axis -> class -> mask, see ``classes.token_classes``; on the CPU.
        gradient: what the optimizer got, if it was kept: saves a backward an axis (see
            ``decompose``).
        autocast: precision of the training forward; gradients and forward-mode passes use it.
            Log-probs before and after are scored in the
            parameters' own precision: bfloat16 products move a log-prob about as much as a update
            does.
        kernels: the layers of the training forward; scores and gradients use them.
        is_batched: how the model takes forward mode (``decompose.forward_mode``); None leaves
            predictions out.
        noise_floor: where it is known already; None measures it.
        own_tokens: of how many tokens the own part is computed, drawn with ``seed``.
        count_P: updates of each parameter, see ``optimizers.update_counts``; None reads them.
    """
    with evaluating(model), walked_once(model):
        live = {name: p for name, p in parameters(model).items() if p.requires_grad}
        updates, notes = None, []
        try:
            updates = response(optimizer, live, count_P)
        except UnknownOptimizer as unknown:
            notes.append(str(unknown))
        weight_NT = loss.coef_NT * rows.scale_NT * clip_factor
        num = own_tokens if updates is not None else 0
        tokens = draw_tokens(weight_NT, num, torch.Generator().manual_seed(seed))
        laid_out = lay_out(model, texts, before, tokens)
        scores = score_update(
            model, before, texts, head_response(model, updates), noise_floor, kernels
        )
        sent_NT, sign_NT = send_all([weight_NT, rows.sign_NT], model.device)
        columns = update_columns(rows, loss, scores, sign_NT)
        notes += _head_notes(scores, updates)
        if scores.own_head_NT is not None:
            columns["own_head"] = sent_NT * scores.own_head_NT
        parts = None
        if is_batched is not None:
            parts = decompose(
                of_model(model, texts, autocast, kernels),
                before,
                {name: p.detach() for name, p in live.items()},
                weight_NT,
                classes,
                updates,
                gradient,
                is_batched=is_batched,
            )
        # last: many small steps, that the host hands out while an accelerator is at the large ones
        if updates is not None and own_tokens:
            part_S = own_parts(model, texts, before, updates, laid_out, autocast, kernels)
            columns["own"] = own_column(weight_NT, tokens, part_S)
        if parts is not None:
            columns["predicted"] = parts.predicted_NT
            if "own" in columns:
                columns["others"] = parts.predicted_NT - columns["own"]
            columns |= part_columns(parts.parts)
        return Account(columns, notes, scores.noise_floor)


def _head_notes(scores: Scores, updates: Response | None) -> list[str]:
    """What the head does not allow to tell."""
    if scores.kl_NT is None:
        return [
            "the model's head is not a plain linear layer: the table has no KL (no learning tax)"
            " and no own part of the head."
        ]
    if scores.own_head_NT is None and updates is not None:
        return [
            "the model's head is not trained (adapters?): tokens have no own part through it, so"
            " own_head is empty."
        ]
    return []


def score_update(
    model: PreTrainedModel,
    before: Params,
    texts: Texts,
    updates: HeadResponse | None,
    noise_floor: Tensor | float | None = None,
    kernels: Callable[[], AbstractContextManager] = nullcontext,
) -> Scores:
    """Log-probs at both parameter settings, in the same forward and through the same layers; the
    noise floor is measured unless it is given.
    """
    is_plain = backbone(model).head is not None
    with kernels():
        change = (
            _change(model, before, texts, updates)
            if is_plain
            else _logp_change(model, before, texts)
        )
        floor = (
            measured_noise(model, before, texts, change.logp_before_M)
            if noise_floor is None
            else noise_floor
        )
    return Scores(*change, noise_floor=floor)


def measured_noise(model: PreTrainedModel, before: Params, texts: Texts, logp_NT: Tensor) -> Tensor:
    """The largest gap when every fourth row is scored once more without an update.

    In another cut and with the maths path of attention, so that rounding shows even where a kernel
    repeats itself bit for bit."""
    again = texts.select(torch.arange(0, len(texts.mask_NT), NOISE_STRIDE))
    with sdpa_kernel(SDPBackend.MATH):
        repeat_RT = at(model, before, lambda m: _measure(m, again, {"trainer_logp_NT"}))[
            "trainer_logp_NT"
        ]
    # both are 0 on padding
    return (logp_NT[::NOISE_STRIDE] - repeat_RT).abs().max()


def update_columns(
    rows: Rows, loss: TokenLoss, scores: Scores, sign_NT: Tensor
) -> dict[str, Tensor]:
    """What the update used and what it did, before any prediction; ``sign_NT`` of the rows, where
    the scores are.
    """
    delta_NT = scores.logp_after_NT - scores.logp_before_NT
    change_NT = change_sign(delta_NT, scores.noise_floor)
    column = {
        **loss_columns(rows, loss),
        "trainer_logp": scores.logp_before_NT,
        "trainer_logp_after": scores.logp_after_NT,
        "delta": delta_NT,
        "noise_floor": torch.zeros_like(delta_NT) + scores.noise_floor,
        "change": change_NT,
        "is_flip": is_flip(change_NT, sign_NT),
        "entropy": scores.entropy_NT,
    }
    return column if scores.kl_NT is None else column | {"kl": scores.kl_NT}


def loss_columns(rows: Rows, loss: TokenLoss) -> dict[str, Tensor]:
    """What the update used."""
    return {
        "coef": loss.coef_NT,
        "scale": rows.scale_NT,
        "is_clipped": loss.clipped_NT,
        "ratio": loss.ratio_NT,
    }


def part_columns(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """``part_<axis>_<class>``, and the cancellation among the classes of the first axis (the rest
    is no class).
    """
    out = {
        f"{PART_PREFIX}{axis}_{name}": part_NT
        for axis, named in parts.items()
        for name, part_NT in named.items()
    }
    for named in list(parts.values())[:1]:
        out["cancellation"] = cancellation(
            part_NT for name, part_NT in named.items() if name != REST
        )
    return out


def head_response(model: PreTrainedModel, updates: Response | None) -> HeadResponse | None:
    """The optimizer's response at the head's weight and bias; None where the head is not trained or
    not plain.
    """
    head = backbone(model).head
    if updates is None or head is None:
        return None
    names = {id(p): name for name, p in parameters(model).items()}
    weight = updates.get(names.get(id(head.weight_VD), ""))
    bias = 0.0 if head.bias_V is None else updates.get(names.get(id(head.bias_V), ""), 0.0)
    return None if weight is None else HeadResponse(weight, bias)


def head_state(model: PreTrainedModel, texts: Texts) -> HeadState:
    """What feeds the head at every response token, and the head."""
    hidden_NTD = _measure(model, texts, {"hidden_NTD"})["hidden_NTD"]
    head = backbone(model).head
    assert head is not None
    return HeadState(hidden_NTD[texts.mask_NT], _detached(head))


def _detached(head: Head) -> Head:
    bias_V = None if head.bias_V is None else head.bias_V.detach()
    return head._replace(weight_VD=head.weight_VD.detach(), bias_V=bias_V)


@torch.no_grad()
def _change(
    model: PreTrainedModel, before: Params, texts: Texts, updates: HeadResponse | None
) -> HeadChange:
    """Columns [N, T] from the hidden states of two forwards over the same layout."""
    columns: list[Tensor | None] = [None] * len(HeadChange._fields)
    with evaluating(model):
        share, fused = shares_prompts(backbone(model)), has_triton_layers(model)
        cut = texts.cut(share)(range(len(texts.mask_NT)), texts.token_budget)
        buckets = [torch.tensor(bucket) for bucket in cut]
        for row_B, sent_B in zip(buckets, send_all(buckets, model.device)):
            some = texts.select(row_B)
            columns_BT = some.prompt_ids, some.token_ids_NT, some.mask_NT
            rows = pack_rows(*columns_BT, model.device, share=share)
            change = head_change(
                at(model, before, partial(packed_state, rows=rows)),
                packed_state(model, rows),
                rows.target_M,
                temperature=texts.temperature,
                response=updates,
                fused=fused,
            )
            place = sent_B[rows.row_M], rows.column_M
            for number, value_M in enumerate(change):
                if value_M is not None:
                    column_NT = columns[number]
                    if column_NT is None:
                        column_NT = columns[number] = value_M.new_zeros(texts.mask_NT.shape)
                    column_NT[place] = value_M
    return HeadChange(*columns)  # pyright: ignore[reportArgumentType]


def packed_state(model: PreTrainedModel, rows: Packed) -> HeadState:
    """What feeds the head at the response tokens of a layout, in float32 or wider, and the head."""
    parts = backbone(model)
    assert parts.head is not None
    hidden_MD = hidden_of(parts, rows)
    wide = torch.promote_types(hidden_MD.dtype, torch.float32)
    return HeadState(hidden_MD.to(wide), _detached(parts.head))


def place_tokens(value_M: Tensor, mask_NT: Tensor) -> Tensor:
    """Values of tokens laid end to end, back on [N, T]; 0 on padding."""
    here_NT = send(mask_NT, value_M.device)
    return value_M.new_zeros(mask_NT.shape).masked_scatter(here_NT, value_M)


def _logp_change(model: PreTrainedModel, before: Params, texts: Texts) -> HeadChange:
    """The same for a model whose head is not plain: no distributions, so no KL and no own part."""
    needs = {"trainer_logp_NT", "entropy_NT"}
    first, second = (
        at(model, before, lambda m: _measure(m, texts, needs)),
        _measure(model, texts, {"trainer_logp_NT"}),
    )
    return HeadChange(
        first["trainer_logp_NT"], second["trainer_logp_NT"], first["entropy_NT"], None, None
    )


def _measure(model: PreTrainedModel, texts: Texts, needs: set[str]) -> dict[str, Tensor]:
    rollouts = (texts.prompt_ids, texts.token_ids_NT, texts.mask_NT)
    return measure(
        model, *rollouts, needs, temperature=texts.temperature, token_budget=texts.token_budget
    )
