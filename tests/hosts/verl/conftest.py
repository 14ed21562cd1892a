"""Shared by the tests of the verl host."""

from __future__ import annotations

import pytest


@pytest.fixture
def queue_of(monkeypatch):
    """Put rollouts into a queue in memory, in place of verl's."""
    import transfer_queue

    from helpers.verl.cases import Queue

    def make(rows):
        queue = Queue(rows)
        for name in ("kv_batch_get", "kv_batch_put", "kv_clear"):
            monkeypatch.setattr(transfer_queue, name, getattr(queue, name))
        return queue

    return make
