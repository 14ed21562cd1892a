"""What the rollout engine reads and fills: settings, columns of rollouts, slots in flight.

Axes: N rollouts, T response tokens, B slots (rows in flight), K candidates, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.sampling.draw import Draw


class Settings(NamedTuple):
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_ids: tuple[int, ...]
    is_greedy: bool
    has_hidden: bool = False
    topk: int = 0


class Columns(NamedTuple):
    """What the engine fills, one row more than there are rollouts: slots without a rollout write
    into the last one.

    Hidden states and candidates come from the pass that draws the token; their columns have no
    tokens where nobody asked for them."""

    token_ids_NT: Tensor
    sampler_logp_NT: Tensor
    entropy_NT: Tensor
    length_N: Tensor
    uniform_NT: Tensor
    hidden_NTD: Tensor
    topk_ids_NTK: Tensor
    topk_logp_NTK: Tensor


class Slots(NamedTuple):
    """Fixed tensors that a captured step reads and writes in place."""

    token_B: Tensor
    position_B: Tensor
    age_B: Tensor
    row_B: Tensor
    alive_B: Tensor


def record(
    slots: Slots,
    columns: Columns,
    settings: Settings,
    drawn: Draw,
    hidden_BD: Tensor,
    best: tuple[Tensor, Tensor] | None,
) -> None:
    """Write what every slot drew into its row and move the slot on, all in place.

    A slot that stops points at the last row from then on.

    Args:
        best: ids and log-probs of the likeliest candidates, [B, K] each, where they are asked for.
    """
    token_B, position_B, age_B, row_B, alive_B = slots
    columns.token_ids_NT[row_B, age_B] = drawn.token_N
    columns.sampler_logp_NT[row_B, age_B] = drawn.logp_N.float()
    columns.entropy_NT[row_B, age_B] = drawn.entropy_N.float()
    if settings.has_hidden:
        columns.hidden_NTD[row_B, age_B] = hidden_BD
    if best is not None:
        columns.topk_ids_NTK[row_B, age_B], columns.topk_logp_NTK[row_B, age_B] = best
    columns.length_N[row_B] = age_B + 1
    is_stop_B = torch.zeros_like(alive_B)
    for stop in settings.stop_ids:
        is_stop_B |= drawn.token_N == stop
    token_B.copy_(drawn.token_N)
    alive_B.logical_and_(~is_stop_B & (age_B + 1 < settings.max_new_tokens))
    row_B.masked_fill_(~alive_B, len(columns.length_N) - 1)
    age_B.add_(alive_B)
    position_B.add_(alive_B)
