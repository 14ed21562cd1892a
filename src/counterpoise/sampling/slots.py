"""What the rollout engine reads and fills: settings, columns of rollouts, slots in flight.

Axes: N rollouts, T response tokens, B slots (rows in flight), K candidates, D hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from counterpoise.sampling.draw import Draw

log = logging.getLogger("counterpoise.sampling")
SAMPLED = frozenset(
    {"hidden_NTD", "topk_ids_NTK", "topk_logp_NTK"}
)  # columns the engine can take along
# hears of rows that have stopped, and of their tokens
Watch = Callable[[Sequence[int], list[list[int]]], None]


class Settings(NamedTuple):
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_ids: tuple[int, ...]
    is_greedy: bool
    has_hidden: bool = False
    topk: int = 0
    has_turns: bool = False


class Columns(NamedTuple):
    """What the engine fills, one row more than there are rollouts: slots without a rollout write
    into the last one.

    Hidden states and candidates come from the pass that draws the token; their columns have no
    tokens where nobody asked for them. In a conversation ``given_NT`` holds tokens that are read
    instead of drawn (-1: drawn), and a row's turn ends at ``limit_N`` tokens at the latest."""

    token_ids_NT: Tensor
    sampler_logp_NT: Tensor
    entropy_NT: Tensor
    length_N: Tensor
    uniform_NT: Tensor
    hidden_NTD: Tensor
    topk_ids_NTK: Tensor
    topk_logp_NTK: Tensor
    given_NT: Tensor | None = None
    limit_N: Tensor | None = None


class Slots(NamedTuple):
    """Fixed tensors that a captured step reads and writes in place."""

    token_B: Tensor
    position_B: Tensor
    age_B: Tensor
    row_B: Tensor
    alive_B: Tensor


class Moved(NamedTuple):
    """How many slots are left, and which moved where."""

    num_slots: int
    from_R: Tensor
    to_R: Tensor


class Answer(NamedTuple):
    """What the other side of a dialogue says to a row.

    Args:
        row: the row.
        token_ids: what the row reads next; None if its conversation is over.
        limit: tokens of the row, these included, at which its next turn ends at the latest.
    """

    row: int
    token_ids: list[int] | None = None
    limit: int = 0


class Dialogue(Protocol):
    """The other side of conversations, as a sampler asks it."""

    def first_limit(self, row: int) -> int:
        """Tokens at which a row's first turn ends at the latest."""
        ...

    def hear(self, row: int, token_ids: list[int]) -> None:
        """A row's turn is over; these are all its tokens so far."""
        ...

    def answers(self, *, wait: bool) -> list[Answer]:
        """Answers that are ready, one per row heard; ``wait`` for one if there is none."""
        ...


def empty_columns(
    num_rows: int, settings: Settings, like_DV: Tensor, device: torch.device
) -> Columns:
    """Columns of ``num_rows`` rollouts and one row more; ``like_DV`` is the head's weight."""
    rows, tokens = num_rows + 1, settings.max_new_tokens

    def zeros(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    return Columns(
        token_ids_NT=zeros(rows, tokens, dtype=torch.long),
        sampler_logp_NT=zeros(rows, tokens, dtype=torch.float32),
        entropy_NT=zeros(rows, tokens, dtype=torch.float32),
        length_N=zeros(rows, dtype=torch.long),
        uniform_NT=zeros(rows, tokens, dtype=torch.float64),
        hidden_NTD=zeros(
            rows, tokens * settings.has_hidden, like_DV.shape[-2], dtype=like_DV.dtype
        ),
        topk_ids_NTK=zeros(rows, tokens, settings.topk, dtype=torch.long),
        topk_logp_NTK=zeros(rows, tokens, settings.topk, dtype=torch.float32),
        given_NT=zeros(rows, tokens, dtype=torch.long) - 1 if settings.has_turns else None,
        limit_N=zeros(rows, dtype=torch.long) if settings.has_turns else None,
    )


def empty_cache(
    size: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Keys and values; without memory for them, of half the slots."""
    try:
        keys, values = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
        return keys, values
    except torch.OutOfMemoryError:
        if size[1] == 1:
            raise
    half = (size[0], size[1] // 2, *size[2:])
    log.warning(
        "sample: no memory for the cache of %d rows in flight; set rollouts.max_rows to %d.",
        size[1],
        half[1],
    )
    torch.cuda.empty_cache()
    return empty_cache(half, dtype, device)


def asked_of_engine(
    needs: frozenset[str] | set[str], topk: int, num_tokens: int
) -> tuple[bool, int]:
    """Whether the engine takes hidden states along, and how many candidates."""
    has_candidates = bool(needs & {"topk_ids_NTK", "topk_logp_NTK"})
    return "hidden_NTD" in needs, min(topk, num_tokens) if has_candidates else 0


def engine_extras(
    filled: Any, needs: frozenset[str] | set[str], length_N: Tensor
) -> dict[str, Tensor]:
    """The engine's further columns, 0 on padding; half precision widens to float32 as in
    ``measure``.
    """
    width = int(length_N.max())
    is_padding_NT1 = (torch.arange(width, device=length_N.device) >= length_N[:, None])[:, :, None]
    columns = {
        name: getattr(filled, name)[:-1, :width].masked_fill(is_padding_NT1, 0)
        for name in SAMPLED & needs
    }
    return {
        name: c.float() if c.dtype in (torch.bfloat16, torch.float16) else c
        for name, c in columns.items()
    }


def rows_of(token_ids_NT: Tensor, length_N: Tensor) -> list[list[int]]:
    """The tokens of each row without its padding."""
    lengths = length_N.tolist()
    return [row[:num] for row, num in zip(token_ids_NT.tolist(), lengths)]


def hand_over(watch: Watch, slots: Slots, columns: Columns, running: Collection[int]) -> set[int]:
    """Tell ``watch`` of the rows that ran at the last look and have stopped; those that still
    run.
    """
    still = set(slots.row_B[slots.alive_B].tolist())
    ended = sorted(set(running) - still)
    if ended:
        row_R = torch.tensor(ended, device=columns.length_N.device)
        watch(ended, rows_of(columns.token_ids_NT[row_R], columns.length_N[row_R]))
    return still


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
    token, logp, entropy = drawn.token_N, drawn.logp_N.float(), drawn.entropy_N.float()
    is_given_B, limit_B = torch.zeros_like(alive_B), settings.max_new_tokens
    if columns.given_NT is not None and columns.limit_N is not None:
        given_B, limit_B = columns.given_NT[row_B, age_B], columns.limit_N[row_B]
        is_given_B = given_B >= 0
        token = torch.where(is_given_B, given_B, token)
    columns.token_ids_NT[row_B, age_B] = token
    columns.sampler_logp_NT[row_B, age_B] = logp
    columns.entropy_NT[row_B, age_B] = entropy
    if settings.has_hidden:
        columns.hidden_NTD[row_B, age_B] = hidden_BD
    if best is not None:
        columns.topk_ids_NTK[row_B, age_B], columns.topk_logp_NTK[row_B, age_B] = best
    columns.length_N[row_B] = age_B + 1
    is_stop_B = torch.zeros_like(alive_B)
    for stop in settings.stop_ids:
        is_stop_B |= token == stop
    token_B.copy_(token)
    # what a slot that stopped goes on to write lies behind its last token, never on it
    position_B.add_(alive_B)
    alive_B.logical_and_(~(is_stop_B & ~is_given_B) & (age_B + 1 < limit_B))
    row_B.masked_fill_(~alive_B, len(columns.length_N) - 1)
    age_B.add_(alive_B)
