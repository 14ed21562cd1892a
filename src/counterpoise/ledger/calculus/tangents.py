"""Forward mode written out for Llama, Qwen2 and Qwen3: how every log-prob changes along C
directions, in one walk through the layers.

A tensor [M, A, ...] with A = 1 + C slots holds a token's value in slot 0 and its changes behind it.
A weight W that moves by dW_c takes it to ``[x, dx_c] W^T``, and ``x dW_c^T`` is added in place: two
products whatever C. Norm, rotation, gate and softmax have their derivative written out.
``torch.func.jvp`` takes the same model apart into several times as many operations; the tests hold
one against the other.

Axes: M tokens laid flat, A = 1 + C slots, D hidden size, F features, E head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from counterpoise.ledger.calculus.layers import (
    Attention,
    Lookup,
    Moving,
    add_norm,
    attention_of,
    embed,
    gate,
    heads,
    linear,
    project_heads,
    split_heads,
)
from counterpoise.ledger.calculus.places import parameters
from counterpoise.maths.head import Head, head_logp_change
from counterpoise.policy import logp_function
from counterpoise.policy.architecture import why_not_llama_like
from counterpoise.policy.backbone import backbone
from counterpoise.policy.pack import Packed, Whole, pack_rows, shares_prompts
from counterpoise.policy.prefix import Prefixes, flat_ids, flat_index, flat_positions

log = logging.getLogger("counterpoise.ledger")
_AGREES: WeakKeyDictionary[nn.Module, dict[torch.dtype, bool]] = (
    WeakKeyDictionary()
)  # tried once a model and precision


def can_walk(model: PreTrainedModel) -> bool:
    """Whether the layers are those that are written out here; adapters and a head with a bias are
    not.

    It is not taken on trust: the first time a model is seen two short rows go along a random
    direction here and through forward mode."""
    head = backbone(model).head if why_not_llama_like(model) is None else None
    if head is None or head.bias_V is not None:
        return False
    known, dtype = _AGREES.setdefault(model, {}), _product_dtype(model)
    if dtype not in known:
        known[dtype] = _agrees(model)
    return known[dtype]


@torch.no_grad()
def _agrees(model: PreTrainedModel) -> bool:
    """Two rows of one prompt along a random direction, in the weights' own precision; and in that
    of the products, for what may fail there.
    """
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    direction_C = {name: _noise(p, number) for number, (name, p) in enumerate(params.items())}
    ids_NT = torch.arange(8, device=model.device).view(2, 4) % model.config.vocab_size
    columns, parts = ([[0, 1, 2]] * 2, ids_NT, torch.ones_like(ids_NT).bool()), backbone(model)
    rows, name = (
        pack_rows(*columns, model.device, share=shares_prompts(parts)),
        type(model).__name__,
    )
    assert parts.head is not None
    try:
        logp_change(model, params, direction_C, rows, parts.head)
        with torch.autocast(model.device.type, enabled=False):
            change_M = logp_change(model, params, direction_C, rows, parts.head)[0]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as why:  # torch has no narrower type for an operation that a device lacks
        log.warning("%s: forward mode is differentiated, written out it fails: %s", name, why)
        return False
    try:
        with torch.autocast(model.device.type, enabled=False):
            one = {name: change[0] for name, change in direction_C.items()}
            expected_M = torch.func.jvp(logp_function(model, *columns), (params,), (one,))[
                1
            ].flatten()
    except RuntimeError as why:  # recomputed activations, for one
        log.info(
            "%s: forward mode is written out; there is nothing to hold it against: %s", name, why
        )
        return True
    error = float((change_M - expected_M).norm() / expected_M.norm())
    agrees = error < (
        1e-2 if model.dtype.itemsize >= 4 else 0.5
    )  # a wrong derivative is off by its own size
    if not agrees:
        log.warning(
            "%s: forward mode is differentiated, written out it is off by %.2g.", name, error
        )
    return agrees


def _noise(parameter: Tensor, seed: int) -> Tensor:
    """[1, ...], a few hundredths of the parameter's size; the global random state is left alone."""
    generator = torch.Generator(parameter.device).manual_seed(seed)
    noise = torch.randn(
        1, *parameter.shape, generator=generator, device=parameter.device, dtype=parameter.dtype
    )
    return noise * (0.02 * parameter.square().mean().sqrt() + 0.001)


@torch.no_grad()
def logp_change(
    model: PreTrainedModel,
    params: Mapping[str, Tensor],
    direction_C: Mapping[str, Tensor],
    rows: Packed,
    head: Head,
    *,
    temperature: float = 1.0,
    fused: bool = False,
) -> Tensor:
    """d/ds log-prob(params + s direction) at s = 0 of the rows' response tokens, [C, M].

    Products are in autocast's dtype where it is on, all else in float32 or wider, as in the model's
    own forward.

    Args:
        model: a causal LM that ``can_walk``.
        params: trainable parameters by name; the others are the model's.
        direction_C: a change for each of them, directions stacked along a first axis.
        rows: laid out by ``pack_rows``.
        head: the model's; its weight is looked up in ``params``.
        fused: norm, rotation, gate and attention as Triton kernels.
    """
    names = {id(p): name for name, p in parameters(model).items()}
    num = len(next(iter(direction_C.values())))
    device, dtype = model.device.type, _product_dtype(model)

    def of(parameter: Tensor) -> Moving:
        name = names[id(parameter)]
        value = params[name] if name in params else parameter.detach()
        return Moving(value, direction_C.get(name))

    weight = of(model.lm_head.weight)
    with torch.autocast(device, enabled=False):
        hidden_MAD = _hidden(model.model, rows, of, num, dtype, _fused() if fused else PLAIN)
        here = head._replace(weight_VD=weight.value.to(dtype))
        return head_logp_change(
            hidden_MAD, rows.target_M, here, weight.change, temperature=temperature
        )


def _product_dtype(model: PreTrainedModel) -> torch.dtype:
    device = model.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype


class Flat(NamedTuple):
    """Rows as one string of tokens: ids, positions, and where the response tokens are predicted."""

    ids_M: Tensor
    position_1M: Tensor
    index_M: Tensor


class Parts(NamedTuple):
    """What stands between the products of a layer."""

    add_norm: Callable[[Tensor, Tensor | None, Any, Lookup, torch.dtype], Tensor]
    heads: Callable[[Any, Tensor, Lookup, tuple[Tensor, Tensor]], tuple[Tensor, Tensor, Tensor]]
    gate: Callable[[Tensor], Tensor]
    attention: Callable[[Prefixes | Whole], Attention]


PLAIN = Parts(add_norm, heads, gate, attention_of)


def _fused() -> Parts:
    from counterpoise.ledger.calculus.kernels import triton_attend
    from counterpoise.ledger.calculus.kernels import triton_tangents as kernels

    def norm(
        x_MAD: Tensor, more_MAD: Tensor | None, module: Any, of: Lookup, dtype: torch.dtype
    ) -> Tensor:
        eps = module.variance_epsilon
        return kernels.add_norm(x_MAD, more_MAD, *of(module.weight), eps, dtype)

    def turned(
        attention: Any, x_MAD: Tensor, of: Lookup, turn: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        cos_ME, sin_ME = (part[:, 0, 0] for part in turn)
        qkv, num_values = project_heads(attention, x_MAD, of), attention.v_proj.out_features
        num_values //= attention.head_dim
        kernels.turn_(qkv, cos_ME, sin_ME, num_values, attention.scaling)
        return split_heads(attention, qkv)

    return Parts(norm, turned, kernels.gate, triton_attend.attention_of)


def _flat(rows: Packed) -> Flat:
    layout = rows.layout
    if isinstance(layout, Prefixes):
        index_M = flat_index(layout, rows.row_M, rows.column_M)
        return Flat(flat_ids(layout), flat_positions(layout), index_M)
    num_rows, length = layout.ids_NL.shape
    position_1M = torch.arange(length, device=layout.ids_NL.device).repeat(num_rows)[None]
    index_M = rows.row_M * length + layout.position_M
    return Flat(layout.ids_NL.flatten(), position_1M, index_M)


def _hidden(
    decoder: Any, rows: Packed, of: Lookup, num: int, dtype: torch.dtype, parts: Parts
) -> Tensor:
    """What feeds the head at the response tokens and its changes, [M, A, D]."""
    flat, attend, more_MAD = _flat(rows), parts.attention(rows.layout), None
    x_MAD = embed(of(decoder.embed_tokens.weight), flat.ids_M, num)
    cos_1ME, sin_1ME = decoder.rotary_emb(x_MAD[:, 0], flat.position_1M)
    turn = cos_1ME[0][:, None, None], sin_1ME[0][:, None, None]
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        normed_MAD = parts.add_norm(x_MAD, more_MAD, layer.input_layernorm, of, dtype)
        mixed_MAF = attend(*parts.heads(attention, normed_MAD, of, turn))
        more_MAD = linear(mixed_MAF, of, attention.o_proj)
        normed_MAD = parts.add_norm(x_MAD, more_MAD, layer.post_attention_layernorm, of, dtype)
        gate_up_MAF = linear(normed_MAD, of, mlp.gate_proj, mlp.up_proj)
        more_MAD = linear(parts.gate(gate_up_MAF), of, mlp.down_proj)
    last_MAD = x_MAD[flat.index_M]
    more_MAD = None if more_MAD is None else more_MAD[flat.index_M]
    return parts.add_norm(last_MAD, more_MAD, decoder.norm, of, x_MAD.dtype)
