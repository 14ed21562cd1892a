"""The stream of prompts of a file: one permutation of its rows after the other."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import TypeVar

Row = TypeVar("Row")


def shuffled_passes(
    rows: Sequence[Row], name: str, split: str, seed: int, start: int
) -> Iterator[Row]:
    """Rows from position ``start`` on: every pass is a permutation drawn from (name, split, seed,
    pass); ``train`` never ends, other splits end after one pass.

    >>> sorted(shuffled_passes("abc", "mine", "test", seed=0, start=0))
    ['a', 'b', 'c']
    """
    first, skip = divmod(start, len(rows))
    passes = count(first) if split == "train" else range(first, 1)
    stream = (row for k in passes for row in _shuffle(rows, f"{name}/{split}/{seed}/{k}"))
    return islice(stream, skip, None)


def _shuffle(rows: Sequence[Row], key: str) -> list[Row]:
    return random.Random(key).sample(rows, len(rows))
