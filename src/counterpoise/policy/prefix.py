"""A prompt is read once for all its rollouts in a forward, instead of once per rollout.

Tokens are laid flat, ``[1, P * W + N * S]``: the distinct prompts, then the responses. A decoder's
layers work token by token and run as they are; attention alone knows rows, and is ours for the
call: prompts attend to themselves, a response to its prompt and to itself. Log-probs and gradients
are those of whole rows, up to rounding.

Axes: N rollouts, P distinct prompts, W prompt width, S response width, K key-value heads, G query
heads of each, C head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from counterpoise.policy.architecture import rotates_by_length
from counterpoise.policy.prompts import distinct, pad_prompts

NAME = "counterpoise_prefix"
CAUSAL = "counterpoise_causal"
DECODERS = ("LlamaModel", "Qwen2Model", "Qwen3Model")
ALIGNMENT = 16  # numbers; kernels that take a mask want its rows so
# tokens; on CUDA products whose sides are no multiple of it take a kernel several times slower
GRAIN = 8
# of the tokens of whole rows: above it the second attention costs more than the prompts saved
WORTH_FRAC = 0.9
_HELD: set[int] = set()  # configs of models whose attention stays as the forward had it
_WITHOUT_MASKS: set[int] = set()  # configs of models whose layers know from lengths what is seen


class Prefixes(NamedTuple):
    """Distinct prompts and responses, both right-padded; row n continues prompt ``prompt_N[n]``.

    A response's last token is read by nobody.
    """

    ids_PW: Tensor
    length_P: Tensor
    prompt_N: Tensor
    ids_NS: Tensor


class Size(NamedTuple):
    """Of a batch of rows: distinct prompts, tokens of the longest one, rows, tokens of the longest
    response and of the longest row.
    """

    num_prompts: int = 0
    prompt_width: int = 0
    num_rows: int = 0
    width: int = 0
    last: int = 0


def num_laid_out(size: Size) -> tuple[int, bool]:
    """(tokens of a forward, padding included; whether prompts are read once): they are where it
    saves enough.

    >>> num_laid_out(Size(2, 10, 16, 20, 30)), num_laid_out(Size(16, 10, 16, 20, 30))
    ((340, True), (480, False))
    """
    shared, whole = (
        size.num_prompts * size.prompt_width + size.num_rows * size.width,
        size.num_rows * size.last,
    )
    is_worth_it = shared <= WORTH_FRAC * whole and size.width > 1
    return (shared if is_worth_it else whole), is_worth_it


def prefixes(
    prompt_ids: Sequence[Sequence[int]],
    token_ids_NT: Tensor,
    lengths: Sequence[int],
    grain: int = 1,
) -> Prefixes | None:
    """The rows as prompts and responses; None where reading prompts once would save too little.

    Args:
        prompt_ids: the prompt's token ids of every row.
        token_ids_NT: the responses.
        lengths: tokens of each.
        grain: widths are multiples of it, see ``grain_of``.

    >>> prefixes([[7, 8], [7, 8]], torch.tensor([[1, 2, 3], [4, 5, 0]]), [3, 2]).ids_PW.tolist()
    [[7, 8]]
    """
    different, number = distinct(prompt_ids)
    width, last = max(lengths), max(len(prompt) + own for prompt, own in zip(prompt_ids, lengths))
    if not num_laid_out(
        Size(len(different), max(map(len, different)), len(prompt_ids), width, last)
    )[1]:
        return None
    device = token_ids_NT.device
    ids_NS = token_ids_NT[:, : width - 1]
    return Prefixes(
        pad_prompts(different, device, grain),
        torch.tensor([len(prompt) for prompt in different], device=device),
        torch.tensor(number, device=device),
        F.pad(ids_NS, (0, -ids_NS.shape[1] % grain)),
    )


def grain_of(device: torch.device) -> int:
    """Tokens that widths are multiples of, for a forward on the device."""
    return GRAIN if device.type == "cuda" else 1


def can_share(decoder: PreTrainedModel) -> bool:
    """Whether the decoder's attention can be ours: a known architecture, no window, no dropout;
    layers that the backward computes again are in ``same_attention``.

    And no rotation that depends on the longest row: flat tokens may have a position that no row
    has."""
    config = decoder.config
    return (
        type(decoder).__name__ in DECODERS
        and config._attn_implementation == "sdpa"
        and not getattr(config, "use_sliding_window", False)
        and not rotates_by_length(decoder)
        and not decoder.training
        and (not _recomputes(decoder) or id(config) in _HELD)
    )


def _recomputes(decoder: Any) -> bool:
    """Whether the backward computes layers again."""
    return has_checkpointing(decoder) and any(layer.training for layer in decoder.layers)


def has_checkpointing(decoder: Any) -> bool:
    """Whether recomputed activations are switched on, in training mode or not; transformers' own
    ``is_gradient_checkpointing`` walks through all modules, milliseconds of every forward.
    """
    parts = (decoder, *decoder.layers)
    return any(getattr(part, "gradient_checkpointing", False) for part in parts)


def hidden_of_prefixes(
    decoder: PreTrainedModel, rows: Prefixes, row_M: Tensor, column_M: Tensor
) -> Tensor:
    """The hidden states that predict ``response[row_M, column_M]``, [M, D]."""
    with own_attention(decoder.config):
        hidden_LD = decoder(
            input_ids=flat_ids(rows)[None],
            position_ids=flat_positions(rows),
            attention_mask=_mask(decoder, rows),
            use_cache=False,
            prefix_shape=(*rows.ids_PW.shape, *rows.ids_NS.shape),
            prefix_N=rows.prompt_N,
            prefix_length_P=rows.length_P,
            prefix_rows=rows_by_prompt(rows),
        ).last_hidden_state[0]
    return hidden_LD.index_select(0, flat_index(rows, row_M, column_M))


def flat_ids(rows: Prefixes) -> Tensor:
    """The token ids as they are laid flat, [P * W + N * S]."""
    return torch.cat([rows.ids_PW.flatten(), rows.ids_NS.flatten()])


def flat_index(rows: Prefixes, row_M: Tensor, column_M: Tensor) -> Tensor:
    """Where among the flat tokens ``response[row_M, column_M]`` is predicted."""
    (num_prompts, width), length = rows.ids_PW.shape, rows.ids_NS.shape[1]
    last_N = rows.prompt_N * width + rows.length_P[rows.prompt_N] - 1
    return torch.where(
        column_M == 0, last_N[row_M], num_prompts * width + row_M * length + column_M - 1
    )


def rows_by_prompt(rows: Prefixes) -> tuple[Tensor, Tensor]:
    """(order_N, start_P1): rows ``order_N[start_P1[p] : start_P1[p + 1]]`` continue prompt p."""
    sorted_N, order_N = rows.prompt_N.sort(stable=True)
    number_P1 = torch.arange(len(rows.ids_PW) + 1, device=order_N.device)
    return order_N, torch.searchsorted(sorted_N, number_P1)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of flat tokens, as Hugging Face calls it: heads before tokens in, tokens before
    heads out.

    The G query heads of a key-value head are taken as more queries of it, so that keys need no copy
    a head."""
    num_prompts, width, num_rows, length = kwargs["prefix_shape"]
    (own_q, q), (own_k, k), (own_v, v) = (
        _split(part, num_prompts, width, num_rows) for part in (query, key, value)
    )
    first = attend_prompts(own_q, own_k, own_v, scaling)
    groups = q.shape[1] // k.shape[1]
    keys, values = (
        torch.cat([own.index_select(0, kwargs["prefix_N"]), part], 2)
        for own, part in ((own_k, k), (own_v, v))
    )
    queries = q.unflatten(1, (-1, groups)).flatten(2, 3)
    second = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=attention_mask, scale=scaling
    )
    second = second.unflatten(2, (groups, length)).flatten(1, 2)
    return torch.cat([part.transpose(1, 2).flatten(0, 1) for part in (first, second)])[None], None


def attend_prompts(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Prompts attend to themselves: [P, heads, W, C].

    For float32 CUDA has no fast kernel in which query heads share a key-value head, and takes some
    25 small steps instead; so each gets a copy of its own: prompts are a small part of the tokens.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.is_cuda and query.dtype == torch.float32:
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=key.shape[1] < query.shape[1]
    )


@contextmanager
def own_attention(config: Any) -> Iterator[None]:
    """The model's attention is ``attend`` for the block, and on to the end of ``same_attention``
    around it; not where layers have an attention of their own, and threads may share the config.
    """
    if id(config) in _WITHOUT_MASKS:
        yield
        return
    implementation = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        if id(config) not in _HELD:
            config._attn_implementation = implementation


def can_skip_masks(decoder: PreTrainedModel) -> bool:
    """Whether ``causal_attention`` spares a forward over whole rows a wait: on an accelerator, and
    attention is torch's without a window.
    """
    config = decoder.config
    return (
        type(decoder).__name__ in DECODERS
        and config._attn_implementation == "sdpa"
        and not getattr(config, "use_sliding_window", False)
        and decoder.device.type == "cuda"
    )


@contextmanager
def causal_attention(config: Any) -> Iterator[None]:
    """The model's attention is torch's own under a name for which Hugging Face makes no mask: for
    its own name it asks the accelerator whether a row holds several texts, and waits.
    """
    implementation = config._attn_implementation
    config._attn_implementation = CAUSAL
    try:
        yield
    finally:
        config._attn_implementation = implementation


@contextmanager
def without_masks(config: Any) -> Iterator[None]:
    """The model's layers need no mask for the block: lengths tell them what a token sees."""
    _WITHOUT_MASKS.add(id(config))
    try:
        yield
    finally:
        _WITHOUT_MASKS.discard(id(config))


@contextmanager
def same_attention(model: PreTrainedModel) -> Iterator[None]:
    """One forward and its backward, which may compute layers again, with the same attention."""
    config = model.get_decoder().config
    implementation = config._attn_implementation
    _HELD.add(id(config))
    try:
        yield
    finally:
        _HELD.discard(id(config))
        config._attn_implementation = implementation


def _split(part: Tensor, num_prompts: int, width: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """[1, heads, tokens, C] -> [P, heads, W, C] and [N, heads, S, C]."""
    cut = num_prompts * width
    prompts, responses = part.squeeze(0).split([cut, part.shape[2] - cut], 1)
    return prompts.unflatten(1, (num_prompts, width)).transpose(0, 1), responses.unflatten(
        1, (num_rows, -1)
    ).transpose(0, 1)


def flat_positions(rows: Prefixes) -> Tensor:
    """Positions of the flat tokens, [1, P * W + N * S]."""
    width, length = rows.ids_PW.shape[1], rows.ids_NS.shape[1]
    device = rows.ids_PW.device
    own_PW = torch.arange(width, device=device).expand(len(rows.ids_PW), width)
    later_NS = rows.length_P[rows.prompt_N, None] + torch.arange(length, device=device)
    return torch.cat([own_PW.flatten(), later_NS.flatten()])[None]


def is_seen(rows: Prefixes) -> Tensor:
    """[N, 1, S, W + S]: a response token sees its prompt and the response up to itself."""
    width, length = rows.ids_PW.shape[1], rows.ids_NS.shape[1]
    device, shape = rows.ids_PW.device, (len(rows.prompt_N), 1, length)
    prompt_NW = torch.arange(width, device=device) < rows.length_P[rows.prompt_N, None]
    own_SS = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return torch.cat(
        [prompt_NW[:, None, None].expand(*shape, width), own_SS.expand(*shape, length)], -1
    )


def _mask(decoder: PreTrainedModel, rows: Prefixes) -> Tensor:
    """What ``attend`` adds to its scores, [N, 1, G * S, W + S]: 0 where a token is seen, -inf
    elsewhere.

    Made once for all layers, in the dtype attention computes in and with rows that begin at
    multiples of ``ALIGNMENT``: from any other mask every layer would make such a one and keep it
    for the backward."""
    config, device = decoder.config, rows.ids_PW.device.type
    if id(config) in _WITHOUT_MASKS:
        return torch.zeros(1, 1, 1, 1)  # four axes: Hugging Face passes it on as it is
    seen = is_seen(rows).repeat(1, 1, config.num_attention_heads // config.num_key_value_heads, 1)
    embedding: Any = decoder.get_input_embeddings()
    own = embedding.weight.dtype
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else own
    size = *seen.shape[:3], -(-seen.shape[3] // ALIGNMENT) * ALIGNMENT
    mask = torch.zeros(size, dtype=dtype, device=rows.ids_PW.device)[..., : seen.shape[3]]
    return mask.masked_fill_(~seen, float("-inf"))


AttentionInterface.register(NAME, attend)
AttentionInterface.register(CAUSAL, sdpa_attention_forward)
