"""A key-value cache with room to grow: appending a token writes in place instead of copying all
that came before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

ROOM = 128  # tokens of free space made at a time


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer, views of buffers that have free columns at the end."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self._hold(keys, values)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        start = self.keys.shape[-2]  # pyright: ignore[reportOptionalMemberAccess]
        end = start + key_states.shape[-2]
        if end > self.key_buffer.shape[-2]:
            self._hold(self.keys, self.values)
        self.key_buffer[:, :, start:end] = key_states
        self.value_buffer[:, :, start:end] = value_states
        self.keys, self.values = self.key_buffer[:, :, :end], self.value_buffer[:, :, :end]
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep rows ``beam_idx``: in place where only rows from beyond the new end move (see
        ``compaction``), else by copying all.
        """
        num_kept = len(beam_idx)
        moved_R = (beam_idx != torch.arange(num_kept, device=beam_idx.device)).nonzero().flatten()
        source_R = beam_idx[moved_R]
        if (source_R < num_kept).any():
            self._hold(self.keys.index_select(0, beam_idx), self.values.index_select(0, beam_idx))  # pyright: ignore
            return
        length = self.keys.shape[-2]  # pyright: ignore[reportOptionalMemberAccess]
        for buffer in (self.key_buffer, self.value_buffer):
            buffer[moved_R, :, :length] = buffer[source_R, :, :length]
        self.key_buffer, self.value_buffer = (
            self.key_buffer[:num_kept],
            self.value_buffer[:num_kept],
        )
        self.keys, self.values = self.key_buffer[:, :, :length], self.value_buffer[:, :, :length]

    def _hold(self, keys: Any, values: Any) -> None:
        length = keys.shape[-2]
        self.key_buffer, self.value_buffer = _with_room(keys), _with_room(values)
        self.keys, self.values = self.key_buffer[:, :, :length], self.value_buffer[:, :, :length]


def _with_room(states: Tensor) -> Tensor:
    rows, heads, length, width = states.shape
    buffer = states.new_empty(rows, heads, (length // ROOM + 1) * ROOM, width)
    buffer[:, :, :length] = states
    return buffer


def compaction(alive_B: Tensor) -> Tensor:
    """The rows to keep, in an order that moves few: rows before the new end stay, rows beyond it
    fill the gaps.

    >>> compaction(torch.tensor([True, False, True, False, False, True])).tolist()
    [0, 5, 2]
    """
    num_alive = int(alive_B.sum())
    keep_R = torch.arange(num_alive, device=alive_B.device)
    keep_R[~alive_B[:num_alive]] = alive_B[num_alive:].nonzero().flatten() + num_alive
    return keep_R


def spread(cache: DynamicCache, row_N: Tensor) -> DynamicCache:
    """The cache with rows ``row_N`` (repeats allowed); plain attention layers are given room to
    grow.

    Layers that are not plain (sliding windows, recurrent states) keep their own class and their own
    way to pick rows."""
    if not isinstance(cache, DynamicCache):
        raise ValueError(
            f"sample: the model made a {type(cache).__name__}, expected a DynamicCache; this"
            " architecture cannot be sampled."
        )
    cache.reorder_cache(row_N)  # pyright: ignore[reportArgumentType]
    cache.layers = [_roomy(layer) for layer in cache.layers]
    return cache


def _roomy(layer: Any) -> Any:
    # exactly this class: subclasses keep more than keys and values. A layer that reads another's
    # cache stays empty.
    if type(layer) is not DynamicLayer or not layer.is_initialized:
        return layer
    return RoomyLayer(layer.keys, layer.values)  # pyright: ignore[reportArgumentType]
