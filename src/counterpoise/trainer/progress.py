"""A live line while training: reward, held-out accuracy, entropy, tokens per second, time left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.text import Text

from counterpoise.catalogue.label import label
from counterpoise.text import counted, visible
from counterpoise.trainer.config import Config

LINES = 12  # without a terminal, about so many lines per run
MAX_WARNINGS = 3  # of one kind, which its first letters tell
WARNING_KIND = 18


class Progress:
    """A bar on a terminal, a line now and then elsewhere, nothing but warnings if ``quiet``."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.quiet = quiet
        self.accuracy: float | None = None
        self.num_warnings: dict[str, int] = {}

    @contextmanager
    def open(self, config: Config, batch_number: int) -> Iterator[Progress]:
        text = TextColumn("{task.fields[numbers]}")
        columns = (
            "batches",
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            text,
            TimeElapsedColumn(),
            "left",
            TimeRemainingColumn(),
        )
        self.num_batches = config.num_batches
        self.every = max(1, config.num_batches // LINES)
        if not self.quiet:
            self.note(headline(config))
        self.bar = Bar(
            *columns, console=self.console, disable=self.quiet or not self.console.is_terminal
        )
        with self.bar:
            self.task = self.bar.add_task(
                "train", total=config.num_batches, completed=batch_number, numbers="starting"
            )
            yield self

    def show(
        self, batch_number: int, metrics: Mapping[str, float], seconds: Mapping[str, float]
    ) -> None:
        """The batch just finished; without a terminal a held-out number stands on its own line
        alone, not on every later one.
        """
        accuracy = metrics.get("eval/accuracy")
        self.accuracy = self.accuracy if accuracy is None else accuracy
        self.bar.update(
            self.task, completed=batch_number + 1, numbers=numbers(metrics, seconds, self.accuracy)
        )
        is_due = (batch_number + 1) % self.every == 0 or accuracy is not None
        if not self.quiet and not self.console.is_terminal and is_due:
            line = numbers(metrics, seconds, accuracy)
            where = f"batch {batch_number} ({batch_number + 1} of {self.num_batches})"
            self.note(f"{where}: {line}, {sum(seconds.values()):.1f} s per batch")

    def warn(self, where: str, warnings: Sequence[str]) -> None:
        """The first few warnings of a kind; all of them are in the run folder."""
        for warning in warnings:
            kind = warning[:WARNING_KIND]
            self.num_warnings[kind] = num = 1 + self.num_warnings.get(kind, 0)
            if num <= MAX_WARNINGS:
                self.note(f"warning: {where}: {warning}")
            if num == MAX_WARNINGS:
                self.note("warning: more like this are not shown; metrics.jsonl has them all")

    def note(self, line: str) -> None:
        """One line above the bar, never wrapped where it goes to a file."""
        if self.console.is_terminal:
            self.console.print(Text(visible(line)))
        else:
            print(visible(line), file=self.console.file, flush=True)


def headline(config: Config) -> str:
    """What is about to be trained."""
    return (
        f"{label(config.method)} on {config.task['name']}, model {config.model},"
        f" {counted(config.num_batches, 'batch', 'batches')}, into {config.run_dir}"
    )


def numbers(
    metrics: Mapping[str, float], seconds: Mapping[str, float], accuracy: float | None
) -> str:
    """The numbers of a batch on one line."""
    speed = metrics["rollouts/num_tokens"] / max(seconds["sample_s"], 1e-9)
    held_out = "" if accuracy is None else f" held-out {accuracy:.1%}"
    entropy, reward = metrics["entropy/mean"], metrics["reward/mean"]
    return f"reward {reward:.3f}{held_out} entropy {entropy:.3f} {speed:,.0f} tokens/s"


class Clock:
    """Seconds between marks."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now

    def row(self, num_tokens: int, more_s: float) -> dict[str, float]:
        """Seconds, those of sampling more apart, tokens sampled per second, and the shares of a
        teacher and of importance scores where there are any.
        """
        speed = num_tokens / max(self.seconds["sample_s"] - more_s, 1e-9)
        row = {**self.seconds, "sample_tokens_per_s": speed}
        row |= {"sample_more_s": more_s} if more_s else {}
        for name in ("teacher", "importance"):
            if f"{name}_s" in row:
                row[f"{name}_share"] = row[f"{name}_s"] / sum(self.seconds.values())
        return row
