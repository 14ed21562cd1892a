"""The progress line: what was there already says nothing of the time that the rest takes."""

from __future__ import annotations

import io
import time

from rich.console import Console

from counterpoise.arena.live import Live


def test_time_left_is_reckoned_from_fresh_batches_alone(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    live = Live(console=Console(file=io.StringIO()))
    live.begin("final", 8, 800)
    live.skip(400, 4)
    assert live.line() == "final: 4 of 8 runs, 50% of the batches"
    live.skip(100)  # a stack that was cut off goes on
    clock[0] = 20.0
    live.step(100)
    live.finish(1)
    assert live.line() == "final: 5 of 8 runs, 75% of the batches, 40 s left"
    clock[0] = 60.0
    assert live.line() == "final: 5 of 8 runs, 75% of the batches, 2 min left"


def test_what_starting_takes_is_not_reckoned_per_batch(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    live = Live(console=Console(file=io.StringIO()))
    live.begin("final", 256, 7680)
    clock[0] = 20.0  # processes, kernels, the first batch of one stack
    live.step(11)
    assert live.line() == "final: 0 of 256 runs, 0% of the batches"
    clock[0] = 30.0
    live.step(757)
    assert live.line() == "final: 0 of 256 runs, 10% of the batches, 4 min left"
