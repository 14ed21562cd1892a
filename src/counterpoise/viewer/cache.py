"""Batches that are open, shared by the server's threads: each is read once while its files stay."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from counterpoise.run.read import batch_files, open_run
from counterpoise.viewer.tokens import BatchTokens, open_batch

BUDGET = 1 << 30  # bytes of columns that are kept
LEAST = 3  # batches that are kept however large they are


class Key(NamedTuple):
    """Which files a batch was read from, and when they were written."""

    path: Path
    folder: str
    batch: int
    written_ns: int


class Slot:
    """A batch that is being read, or was."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tokens: BatchTokens | None = None

    @property
    def size(self) -> int:
        return self.tokens.num_bytes if self.tokens else 0


class BatchCache:
    """Open batches, the oldest dropped when their columns outgrow the budget.

    A batch that several threads ask for at once is read by one of them, the others wait for it
    alone.
    """

    def __init__(self, budget: int = BUDGET, least: int = LEAST) -> None:
        self.budget, self.least = budget, least
        self._lock = threading.Lock()
        self._slots: OrderedDict[Key, Slot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, path: Path, batch: int, folder: str = "") -> BatchTokens:
        """The tokens of a batch; ValueError if its files hold nothing to show."""
        key = _key(path, batch, folder)
        with self._lock:
            slot = self._slots.setdefault(key, Slot())
            self._slots.move_to_end(key)
        try:
            with slot.lock:
                slot.tokens = slot.tokens or open_batch(open_run(path), batch, folder)
                return slot.tokens
        except ValueError:
            with self._lock:
                self._slots.pop(key, None)
            raise
        finally:
            self._shrink()

    def _shrink(self) -> None:
        with self._lock:
            while len(self._slots) > self.least and self._total() > self.budget:
                self._slots.popitem(last=False)

    def _total(self) -> int:
        return sum(slot.size for slot in self._slots.values())


def _key(path: Path, batch: int, folder: str) -> Key:
    names = (folder,) if folder else ("tokens", "rollouts")
    files = [file for name in names if (file := batch_files(path, name).get(batch))]
    written = max((file.stat().st_mtime_ns for file in files), default=0)
    return Key(path, folder, batch, written)
