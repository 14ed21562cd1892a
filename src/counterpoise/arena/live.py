"""How far an arena is: runs done, time left."""

from __future__ import annotations

import time

from rich.console import Console

from counterpoise.text import counted, visible

EVERY_S = 10.0  # seconds between two lines
LEAST = 0.02  # of what is to be done, before it says how long the rest takes: starting takes longer


class Live:
    """A line now and then; nothing if ``quiet``."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.console, self.quiet = console or Console(stderr=True), quiet
        self.begin("", 0, 0)

    def begin(self, phase: str, num_runs: int, num_steps: int) -> None:
        """A phase of so many runs, and batches of all of them together."""
        self.phase, self.num_runs, self.num_steps = phase, num_runs, num_steps
        self.runs = self.steps = 0
        self.start = self.last = time.monotonic()
        self.before = 0
        if num_runs:
            self.say(f"{phase}: {counted(num_runs, 'run', 'runs')}")

    def step(self, num: int) -> None:
        """So many batches are behind us, counted per run."""
        self.steps += num
        if time.monotonic() - self.last > EVERY_S:
            self.last = time.monotonic()
            self.say(self.line())

    def skip(self, num_steps: int, num_runs: int = 0) -> None:
        """So much was there already: it says nothing of the time that the rest takes."""
        self.runs += num_runs
        self.steps += num_steps
        self.before += num_steps

    def finish(self, num: int) -> None:
        """So many runs are."""
        self.runs += num

    def line(self) -> str:
        """``final: 12 of 96 runs, 34% of the batches, 5 min left``; without the time while
        nearly nothing is done.
        """
        share = self.steps / max(1, self.num_steps)
        runs = counted(self.num_runs, "run", "runs")
        text = f"{self.phase}: {self.runs} of {runs}, {share:.0%} of the batches"
        fresh = self.steps - self.before
        if fresh < max(1, LEAST * (self.num_steps - self.before)):
            return text
        left = (time.monotonic() - self.start) / fresh * (self.num_steps - self.steps)
        return f"{text}, {left / 60:.0f} min left" if left > 90 else f"{text}, {left:.0f} s left"

    def say(self, line: str) -> None:
        if not self.quiet:
            print(visible(line), file=self.console.file, flush=True)
