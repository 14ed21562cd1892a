"""Prompt + response rows made ready for one forward, and back.

Rows are right-padded: with causal attention nothing after a token reaches it, so no attention mask
is needed and the fastest kernels apply. Where several rows continue one prompt it is read once
(``prefix``). Only response positions go on to the head.

Axes: N rollouts, T response tokens, L tokens of prompt + response, M response tokens laid end to
    end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from counterpoise.maths.transfer import fetch, send_all
from counterpoise.policy.backbone import Backbone
from counterpoise.policy.prefix import (
    Prefixes,
    Size,
    can_share,
    can_skip_masks,
    causal_attention,
    grain_of,
    hidden_of_prefixes,
    num_laid_out,
    prefixes,
)
from counterpoise.policy.prompts import pad_prompts


class Whole(NamedTuple):
    """Rows as they are, prompt and response end to end; token m is predicted at ``position_M``."""

    ids_NL: Tensor
    position_M: Tensor


class Packed(NamedTuple):
    """Rows of one forward; token m is ``token_ids_NT[row_M, column_M]``."""

    row_M: Tensor
    column_M: Tensor
    target_M: Tensor
    layout: Whole | Prefixes


def shares_prompts(parts: Backbone) -> bool:
    """Whether rows that continue one prompt can have it read once."""
    return parts.head is not None and can_share(parts.decoder)


def pack_rows(
    prompt_ids: Sequence[Sequence[int]],
    token_ids_NT: Tensor,
    mask_NT: Tensor,
    device: torch.device,
    *,
    share: bool = False,
) -> Packed:
    """Rows laid out for a forward: whole, or with ``share`` as distinct prompts and responses where
    that saves enough.

    The host lays them out, since the layout depends on the mask: where ids and mask lie on the CPU
    it does not wait for the device.

    >>> rows = pack_rows(
    ...     [[7, 8], [9]],
    ...     torch.tensor([[1, 2], [3, 0]]),
    ...     torch.tensor([[1, 1], [1, 0]]),
    ...     torch.device("cpu"),
    ... )
    >>> rows.layout.ids_NL.tolist()
    [[7, 8, 1, 2], [9, 3, 0, 0]]
    """
    token_ids_NT, mask_NT = fetch([token_ids_NT, mask_NT.bool()])
    row_M, column_M = mask_NT.nonzero(as_tuple=True)
    own = response_lengths(mask_NT)
    layout = prefixes(prompt_ids, token_ids_NT, own, grain_of(device)) if share else None
    layout = layout or whole(prompt_ids, token_ids_NT, own, row_M, column_M)
    parts = (row_M, column_M, token_ids_NT[row_M, column_M], *layout)
    row_M, column_M, target_M, *laid_out = send_all(parts, device)
    return Packed(row_M, column_M, target_M, type(layout)(*laid_out))


def whole(
    prompt_ids: Sequence[Sequence[int]],
    token_ids_NT: Tensor,
    own: Sequence[int],
    row_M: Tensor,
    column_M: Tensor,
) -> Whole:
    """Prompts and responses end to end, right-padded with 0; ``own`` are the responses' lengths."""
    device, lengths = token_ids_NT.device, [len(prompt) for prompt in prompt_ids]
    length_N, last = torch.tensor(lengths, device=device), max(a + b for a, b in zip(lengths, own))
    ids_NL = torch.nn.functional.pad(pad_prompts(prompt_ids, device), (0, token_ids_NT.shape[1]))
    ids_NL.scatter_(
        1, length_N[:, None] + torch.arange(token_ids_NT.shape[1], device=device), token_ids_NT
    )
    return Whole(ids_NL[:, :last], length_N[row_M] + column_M - 1)


def place_tokens(value_M: Tensor, rows: Packed, mask_NT: Tensor) -> Tensor:
    """One value a response token back on [N, T]; 0 elsewhere."""
    flat_M = rows.row_M * mask_NT.shape[1] + rows.column_M
    return value_M.new_zeros(mask_NT.numel()).index_put((flat_M,), value_M).view(mask_NT.shape)


def hidden_of(parts: Backbone, rows: Packed) -> Tensor:
    """The hidden states that feed the head at the response positions, [M, D]."""
    with kernels_without_plans():
        if isinstance(rows.layout, Prefixes):
            return hidden_of_prefixes(parts.decoder, rows.layout, rows.row_M, rows.column_M)
        skips = can_skip_masks(parts.decoder)
        with causal_attention(parts.decoder.config) if skips else nullcontext():
            out = parts.decoder(input_ids=rows.layout.ids_NL, use_cache=False)
    return out.last_hidden_state[rows.row_M, rows.layout.position_M]


def own_logits(model: PreTrainedModel, rows: Packed, temperature: float) -> Tensor:
    """Logits at the response positions from the model's own forward, [M, V]; for models whose head
    is not known.
    """
    assert isinstance(rows.layout, Whole)
    with kernels_without_plans():
        logits_MV = model(input_ids=rows.layout.ids_NL, use_cache=False).logits[
            rows.row_M, rows.layout.position_M
        ]
    return logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)) / temperature


@contextmanager
def kernels_without_plans() -> Iterator[None]:
    """Attention without cuDNN for the block: it makes a plan for every new shape, which takes
    longer than the attention, and micro-batches of rollouts hardly ever have a shape twice.
    """
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)


def response_lengths(mask_NT: Tensor) -> list[int]:
    """Tokens of each row up to the last one that counts.

    >>> response_lengths(torch.tensor([[1, 1, 0], [0, 1, 0]]))
    [2, 2]
    """
    number_T = torch.arange(1, mask_NT.shape[1] + 1, device=mask_NT.device)
    return (mask_NT * number_T).amax(1).tolist()


def row_buckets(
    prompt_ids: Sequence[Sequence[int]], lengths: Sequence[int], token_budget: int, *, share: bool
) -> list[list[int]]:
    """Rows in batches of at most ``token_budget`` tokens as ``pack_rows`` lays them out, padding
    included; the shortest first.

    With ``share`` the rows of a prompt stay together unless they alone are over the budget. A row
    longer than the budget is a batch of its own. What CUDA pads widths by (``prefix.GRAIN``) is not
    counted.

    Args:
        prompt_ids: the prompt's token ids of every row.
        lengths: tokens of each response.

    >>> row_buckets([[7, 8]] * 2 + [[9]], [3, 1, 2], token_budget=8, share=True)
    [[2], [1, 0]]
    >>> row_buckets([[7, 8]] * 2 + [[9]], [3, 1, 2], token_budget=8, share=False)
    [[1, 2], [0]]
    """
    if not share:
        return length_buckets(
            [len(prompt) + own for prompt, own in zip(prompt_ids, lengths)], token_budget
        )
    of_prompt: dict[tuple[int, ...], list[int]] = {}
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        of_prompt.setdefault(tuple(prompt_ids[row]), []).append(row)
    batches: list[list[int]] = []
    size = Size()  # of the last batch
    for prompt, rows in sorted(
        of_prompt.items(), key=lambda item: len(item[0]) + lengths[item[1][-1]]
    ):
        fits = num_laid_out(_with_rows(Size(), prompt, 1, rows, lengths))[0] <= token_budget
        parts = [rows] if fits else [[row] for row in rows]
        for number, part in enumerate(parts):
            grown = _with_rows(size, prompt, int(number == 0), part, lengths)
            if batches and num_laid_out(grown)[0] <= token_budget:
                batches[-1] += part
                size = grown
            else:
                batches.append(part)
                size = _with_rows(Size(), prompt, 1, part, lengths)
    return batches


def even_buckets(
    prompt_ids: Sequence[Sequence[int]],
    lengths: Sequence[int],
    token_budget: int,
    multiple: int,
    *,
    share: bool,
) -> list[list[int]]:
    """``row_buckets`` for workers who take batches side by side: as many as the budget asks for,
    rounded up to a multiple, if there are rows for it, and of nearly the same size.

    >>> even_buckets([[7]] * 5, [3, 3, 3, 3, 3], token_budget=16, multiple=1, share=False)
    [[0, 1, 2], [3, 4]]
    >>> even_buckets([[7]] * 5, [3, 3, 3, 3, 3], token_budget=8, multiple=2, share=False)
    [[0, 1], [2, 3], [4]]
    """

    def cut(budget: int) -> list[list[int]]:
        return row_buckets(prompt_ids, lengths, budget, share=share)

    best = cut(token_budget)
    most, low, high = -(-len(best) // multiple) * multiple, 0, token_budget
    while high - low > 1:  # the smallest budget that needs no more batches
        middle = (low + high) // 2
        batches = cut(middle)
        if len(batches) <= most:
            best, high = batches, middle
        else:
            low = middle
    return best


def _with_rows(
    size: Size, prompt: Sequence[int], num_new: int, rows: Sequence[int], lengths: Sequence[int]
) -> Size:
    """A batch's size with more rows of one prompt, which is new to it or not; the longest row comes
    last.
    """
    longest = lengths[rows[-1]]
    return Size(
        size.num_prompts + num_new,
        max(size.prompt_width, len(prompt)),
        size.num_rows + len(rows),
        max(size.width, longest),
        max(size.last, len(prompt) + longest),
    )


def length_buckets(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Rows cut into batches of similar length with at most ``token_budget`` tokens each, padding
    included.

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
