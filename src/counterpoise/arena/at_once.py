"""Several stacks at a time, a process each: while one waits for the host, others compute."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty

from counterpoise.arena.design import Design
from counterpoise.arena.live import Live
from counterpoise.arena.results import Run
from counterpoise.arena.serial import start_process
from counterpoise.arena.shared import Arena, opened
from counterpoise.arena.stacked import train_stack

Note = tuple[str, int | str]  # what ``Live`` is asked to do, and with what
LISTEN_S = 0.5


class Relay(Live):
    """Tells another process's ``Live`` of each step."""

    def __init__(self, notes: Queue[Note]) -> None:
        super().__init__(quiet=True)
        self.notes = notes

    def step(self, num: int) -> None:
        self.notes.put(("step", num))

    def finish(self, num: int) -> None:
        self.notes.put(("finish", num))

    def say(self, line: str) -> None:
        self.notes.put(("say", line))


def train_stacks(arena: Arena, stacks: Sequence[list[Run]]) -> None:
    """Every stack to its end, ``arena.jobs`` at a time."""
    jobs = min(arena.jobs, len(stacks))
    if jobs < 2:
        for runs in stacks:
            train_stack(arena, runs)
        return
    with _processes(jobs) as (pool, notes):
        workers = -(-arena.crew.num_workers // jobs)
        columns = arena.design, arena.out, arena.size, workers, arena.crew.folder
        shares = [list(stacks[first::jobs]) for first in range(jobs)]
        waiting = [pool.submit(_train_share, share, *columns) for share in shares]
        for name, value in _heard(waiting, notes):
            getattr(arena.live, name)(value)


@contextmanager
def _processes(jobs: int) -> Iterator[tuple[Executor, Queue[Note]]]:
    """Processes that share the cores and end at once when this one does."""
    context, (reader, writer) = get_context("spawn"), Pipe(duplex=False)
    notes: Queue[Note] = context.Queue()
    threads = max(1, (os.cpu_count() or 1) // jobs)
    pool = ProcessPoolExecutor(jobs, context, _start, (threads, reader, notes))
    try:
        yield pool, notes
        pool.shutdown()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        writer.close()


def _heard(waiting: list[Future[None]], notes: Queue[Note]) -> Iterator[Note]:
    """Notes until all are done; an error of one is raised."""
    while waiting:
        ended = [one for one in waiting if one.done()]
        try:
            yield notes.get(timeout=LISTEN_S)
        except Empty:  # what the ended ones said is read
            for one in ended:
                one.result()
                waiting.remove(one)


_NOTES: Queue[Note] | None = None  # of a worker process


def _start(num_threads: int, end: Connection, notes: Queue[Note]) -> None:
    global _NOTES
    start_process(num_threads, end)
    _NOTES = notes


def _train_share(
    stacks: list[list[Run]],
    design: Design,
    out: Path,
    size: int,
    num_workers: int,
    memory: Path | None,
) -> None:
    assert _NOTES is not None
    with opened(design, out, Relay(_NOTES), size, num_workers, 1, memory) as arena:
        for runs in stacks:
            train_stack(arena, runs)
