"""What the rollout engine reads and fills: settings, columns of rollouts, slots in flight.

Axes: N rollouts, T response tokens, B slots (rows in flight), K candidates, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
