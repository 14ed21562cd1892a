"""Prompt + response rows made ready for one forward, and back.

Rows are right-padded: with causal attention nothing after a token reaches it, so no attention mask is needed and the fastest kernels
apply. Where several rows continue one prompt it is read once (``prefix``). Only response positions go on to the head.

Axes: N rollouts, T response tokens, L tokens of prompt + response, M response tokens laid end to end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoise.rollouts.backbone import Backbone
from counterpoise.rollouts.prefix import Prefixes, can_share, hidden_of_prefixes, prefixes


class Packed(NamedTuple):
    """Rows of one forward; token m is ``token_ids_NT[row_M, column_M]``, predicted at ``position_M``.

    ``prefixes`` are the same rows as distinct prompts and responses, where that is worth it.
    """

    ids_NL: Tensor
    row_M: Tensor
    column_M: Tensor
    position_M: Tensor
    target_M: Tensor
    prefixes: Prefixes | None


def packed(prompt_ids: Sequence[Sequence[int]], token_ids_NT: Tensor, mask_NT: Tensor, device: torch.device) -> Packed:
    """Prompts and responses end to end, right-padded with 0.

    >>> packed([[7, 8], [9]], torch.tensor([[1, 2], [3, 0]]), torch.tensor([[1, 1], [1, 0]]), torch.device("cpu")).ids_NL.tolist()
    [[7, 8, 1, 2], [9, 3, 0, 0]]
    """
    token_ids_NT, mask_NT = token_ids_NT.to(device), mask_NT.to(device).bool()
    lengths = [len(prompt) for prompt in prompt_ids]
    own = response_lengths(mask_NT)
    widest, last = max(lengths), max(a + b for a, b in zip(lengths, own))
    prompt_NL = torch.tensor([[*prompt, *[0] * (widest - len(prompt))] for prompt in prompt_ids], device=device)
    length_N = torch.tensor(lengths, device=device)
    ids_NL = torch.nn.functional.pad(prompt_NL, (0, mask_NT.shape[1]))
    ids_NL.scatter_(1, length_N[:, None] + torch.arange(mask_NT.shape[1], device=device), token_ids_NT)
    row_M, column_M = mask_NT.nonzero(as_tuple=True)
    position_M, target_M = length_N[row_M] + column_M - 1, token_ids_NT[row_M, column_M]
    return Packed(ids_NL[:, :last], row_M, column_M, position_M, target_M, prefixes(prompt_ids, token_ids_NT, max(own)))


def placed(value_M: Tensor, rows: Packed, mask_NT: Tensor) -> Tensor:
    """One value a response token back on [N, T]; 0 elsewhere."""
    flat_M = rows.row_M * mask_NT.shape[1] + rows.column_M
    return value_M.new_zeros(mask_NT.numel()).index_put((flat_M,), value_M).view(mask_NT.shape)


def hidden_of(parts: Backbone, rows: Packed) -> Tensor:
    """The hidden states that feed the head at the response positions, [M, D]."""
    with kernels_without_plans():
        if rows.prefixes is not None and can_share(parts.decoder):
            return hidden_of_prefixes(parts.decoder, rows.prefixes, rows.row_M, rows.column_M)
        return parts.decoder(input_ids=rows.ids_NL, use_cache=False).last_hidden_state[rows.row_M, rows.position_M]


def own_logits(model: Any, rows: Packed, temperature: float) -> Tensor:
    """Logits at the response positions from the model's own forward, [M, V]; for models whose head is not known."""
    with kernels_without_plans():
        logits_MV = model(input_ids=rows.ids_NL, use_cache=False).logits[rows.row_M, rows.position_M]
    return logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)) / temperature


@contextmanager
def kernels_without_plans() -> Iterator[None]:
    """Attention without cuDNN for the block: it makes a plan for every new shape, which takes longer than the attention, and micro-batches of
    rollouts hardly ever have a shape twice."""
    kept = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(kept)


def response_lengths(mask_NT: Tensor) -> list[int]:
    """Tokens of each row up to the last one that counts.

    >>> response_lengths(torch.tensor([[1, 1, 0], [0, 1, 0]]))
    [2, 2]
    """
    number_T = torch.arange(1, mask_NT.shape[1] + 1, device=mask_NT.device)
    return (mask_NT * number_T).amax(1).tolist()


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
