"""Episodes inside verl's event loop, which no environment may stop.

A trusted environment is a few safe lines and is played in the loop itself. Any other is played in
processes that can be killed; a thread waits for each of them, so that other rollouts go on.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait as wait_for

from counterpoise.environments import Environment, Reply
from counterpoise.environments.episodes import Asked, Episodes, keep, play_kept
from counterpoise.tasks.workers import Fault, Worker, sent
from counterpoise.types import Prompt

_STARTING = threading.Lock()  # a process is started with the caller's script out of sight


class Players:
    """Processes that play one environment; an episode stays with one of them.

    Args:
        environment: what they play; it must be picklable.
        num: processes (default: an eighth of the cores, 2 to 8; verl has several workers per node).
    """

    def __init__(self, environment: Environment, num: int | None = None) -> None:
        num = num or min(8, max(2, (os.cpu_count() or 2) // 8))
        self.known = sent(environment, [])
        self.threads = [ThreadPoolExecutor(1, f"episodes_{slot}") for slot in range(num)]
        self.workers: list[Worker | None] = [None] * num
        self.calls: list[dict[int, None]] = [{} for _ in range(num)]

    async def play(self, asked: Asked, time_limit_s: float) -> tuple[Reply, ...] | Fault:
        """What ``play_step`` gives; meanwhile the event loop is free."""
        slot = asked.call % len(self.threads)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads[slot], self._play, slot, asked, time_limit_s)

    def _play(self, slot: int, asked: Asked, time_limit_s: float) -> tuple[Reply, ...] | Fault:
        worker = self._ready(slot)
        # an episode that is not there is played from its first action
        num_steps = 1 if asked.call in self.calls[slot] else len(asked.actions)
        keep(self.calls[slot], asked.call, None)
        worker.begin(0, (asked,), time_limit_s * num_steps)
        while (ended := worker.end(time_limit_s)) is None:
            wait_for([worker.connection], max(0.0, worker.deadline - time.monotonic()))
        return ended[1]

    def _ready(self, slot: int) -> Worker:
        worker = self.workers[slot]
        if worker is None or not worker.is_ready(self.known):
            if worker is not None:
                worker.kill()
            self.calls[slot] = {}
            with _STARTING:
                worker = self.workers[slot] = Worker(self.known, play_kept, "environment")
        return worker

    def close(self) -> None:
        """End all processes."""
        for thread in self.threads:
            thread.shutdown(cancel_futures=True)
        for worker in self.workers:
            if worker is not None:
                worker.kill()


class OwnEpisode(Episodes):
    """The episode of one rollout (row 0).

    Args:
        players: processes for an environment that is not trusted; None plays it here.
    """

    def __init__(
        self,
        environment: Environment,
        prompt: Prompt,
        seed: int,
        time_limit_s: float,
        players: Players | None,
    ) -> None:
        super().__init__(environment, [prompt], [seed], time_limit_s)
        self.players = players
        self.ready: list[tuple[int, Reply | Fault]] = []

    async def arrive(self) -> None:
        """Wait until the reply to what was sent is there."""
        row = self.queue.popleft()
        if self.players is None:
            reply = self._play_here(row)
        else:
            out = await self.players.play(self._asked(row), self.time_limit_s)
            reply = self._latest(row, out)
        self.ready.append((row, reply))

    def poll(self, *, wait: bool) -> list[tuple[int, Reply | Fault]]:
        ready, self.ready = self.ready, []
        return ready
