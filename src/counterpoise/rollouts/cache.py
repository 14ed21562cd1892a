"""A key-value cache with room to grow: appending a token writes in place instead of copying all that came before."""

from __future__ import annotations

from typing import Any

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

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.keys.shape[-2]  # pyright: ignore[reportOptionalMemberAccess]
        end = start + key_states.shape[-2]
        if end > self.key_buffer.shape[-2]:
            self._hold(self.keys, self.values)
        self.key_buffer[:, :, start:end] = key_states
        self.value_buffer[:, :, start:end] = value_states
        self.keys, self.values = self.key_buffer[:, :, :end], self.value_buffer[:, :, :end]
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._hold(self.keys.index_select(0, beam_idx), self.values.index_select(0, beam_idx))  # pyright: ignore

    def _hold(self, keys: Any, values: Any) -> None:
        length = keys.shape[-2]
        self.key_buffer, self.value_buffer = _with_room(keys), _with_room(values)
        self.keys, self.values = self.key_buffer[:, :, :length], self.value_buffer[:, :, :length]


def _with_room(states: Tensor) -> Tensor:
    rows, heads, length, width = states.shape
    buffer = states.new_empty(rows, heads, (length // ROOM + 1) * ROOM, width)
    buffer[:, :, :length] = states
    return buffer


def spread(cache: Any, row_N: Tensor) -> Any:
    """The cache with rows ``row_N`` (repeats allowed); plain attention layers are given room to grow.

    Layers that are not plain (sliding windows, recurrent states) keep their own class and their own way to pick rows.
    """
    if not isinstance(cache, DynamicCache):
        raise ValueError(f"sample: the model made a {type(cache).__name__}, expected a DynamicCache; this architecture cannot be sampled.")
    cache.reorder_cache(row_N)  # pyright: ignore[reportArgumentType]
    cache.layers = [RoomyLayer(x.keys, x.values) if type(x) is DynamicLayer else x for x in cache.layers]
    return cache
