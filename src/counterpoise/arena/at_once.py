"""Several stacks at a time, a process each: while one waits for the host, others compute."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any, TypeVar

from counterpoise.arena.design import Design
from counterpoise.arena.live import Live
from counterpoise.arena.serial import start_process
from counterpoise.arena.shared import Arena, opened

Note = tuple[str, int | str]  # what ``Live`` is asked to do, and with what
LISTEN_S = 0.5
Item = TypeVar("Item")
Result = TypeVar("Result")


class Relay(Live):
    """Tells another process's ``Live`` of each step."""

    def __init__(self, notes: Queue[Note]) -> None:
        super().__init__(quiet=True)
        self.notes = notes

    def step(self, num: int) -> None:
        self.notes.put(("step", num))

    def skip(self, num_steps: int, num_runs: int = 0) -> None:
        assert not num_runs  # whole runs are left out before there are processes
        self.notes.put(("skip", num_steps))

    def finish(self, num: int) -> None:
        self.notes.put(("finish", num))

    def say(self, line: str) -> None:
        self.notes.put(("say", line))


def each(
    arena: Arena, work: Callable[[Arena, Item], Result], items: Sequence[Item]
) -> list[Result]:
    """``work(arena, item)`` of every item, ``arena.jobs`` of them at a time in processes that have
    an arena of their own; which takes the next one as soon as it is free.
    """
    jobs = min(arena.jobs, len(items))
    if jobs < 2:
        return [work(arena, item) for item in items]
    with _processes(jobs) as (pool, notes):
        workers = -(-arena.crew.num_workers // jobs)
        columns = arena.design, arena.out, arena.size, workers, arena.crew.folder
        running = [pool.submit(_take_turns, work, list(items), *columns) for _ in range(jobs)]
        for name, value in _heard(running, notes):
            getattr(arena.live, name)(value)
        result_of = {k: result for one in running for k, result in one.result().items()}
        return [result_of[k] for k in range(len(items))]


@contextmanager
def _processes(jobs: int) -> Iterator[tuple[Executor, Queue[Note]]]:
    """Processes that share the cores and end at once when this one does."""
    context, (reader, writer) = get_context("spawn"), Pipe(duplex=False)
    notes: Queue[Note] = context.Queue()
    threads = max(1, (os.cpu_count() or 1) // jobs)
    columns = threads, reader, notes, context.Value("q", 0)
    pool = ProcessPoolExecutor(jobs, context, _start, columns)
    try:
        yield pool, notes
        pool.shutdown()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        writer.close()


def _heard(running: Sequence[Future[Any]], notes: Queue[Note]) -> Iterator[Note]:
    """Notes until all are done; an error of one is raised."""
    waiting = list(running)
    while waiting:
        ended = [one for one in waiting if one.done()]
        try:
            yield notes.get(timeout=LISTEN_S)
        except Empty:  # what the ended ones said is read
            for one in ended:
                one.result()
                waiting.remove(one)


_NOTES: Queue[Note] | None = None  # of a worker process
_NEXT: Any = None  # the number of the next item, for all of them


def _start(num_threads: int, end: Connection, notes: Queue[Note], next_item: Any) -> None:
    global _NOTES, _NEXT
    start_process(num_threads, end)
    _NOTES, _NEXT = notes, next_item


def _take_turns(
    work: Callable[[Arena, Item], Result],
    items: list[Item],
    design: Design,
    out: Path,
    size: int,
    num_workers: int,
    memory: Path | None,
) -> dict[int, Result]:
    """What this process did, by the numbers of the items."""
    assert _NOTES is not None
    result_of = {}
    with opened(design, out, Relay(_NOTES), size, num_workers, 1, memory) as arena:
        while (k := _next()) < len(items):
            result_of[k] = work(arena, items[k])
    return result_of


def _next() -> int:
    with _NEXT.get_lock():
        _NEXT.value += 1
        return _NEXT.value - 1
