"""A live line while training: reward, held-out accuracy, entropy, tokens per second, time left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from counterpoise.trainer.config import Config

LINES = 12  # without a terminal, about so many lines per run


class Progress:
    """A bar on a terminal, a line now and then elsewhere, nothing if ``quiet``."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.quiet = quiet
        self.accuracy: float | None = None

    @contextmanager
    def open(self, config: Config, batch_number: int) -> Iterator[Progress]:
        text = TextColumn("{task.fields[numbers]}")
        columns = (
            "batch",
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            text,
            TimeElapsedColumn(),
            "left",
            TimeRemainingColumn(),
        )
        self.every = max(1, config.num_batches // LINES)
        self.bar = Bar(
            *columns, console=self.console, disable=self.quiet or not self.console.is_terminal
        )
        with self.bar:
            self.task = self.bar.add_task(
                "train", total=config.num_batches, completed=batch_number, numbers="starting"
            )
            yield self

    def show(self, batch_number: int, metrics: dict[str, Any], seconds: dict[str, float]) -> None:
        """The batch just finished."""
        self.accuracy = metrics.get("eval/accuracy", self.accuracy)
        speed = metrics["rollouts/num_tokens"] / max(seconds["sample_s"], 1e-9)
        held_out = "" if self.accuracy is None else f" held-out {self.accuracy:.1%}"
        entropy, reward = metrics["entropy/mean"], metrics["reward/mean"]
        numbers = f"reward {reward:.3f}{held_out} entropy {entropy:.3f} {speed:,.0f} tokens/s"
        self.bar.update(self.task, completed=batch_number + 1, numbers=numbers)
        if not self.quiet and not self.console.is_terminal and (batch_number + 1) % self.every == 0:
            self.console.print(
                f"batch {batch_number + 1}: {numbers}, {sum(seconds.values()):.1f} s a batch",
                highlight=False,
            )


class Clock:
    """Seconds between marks."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now
