"""Many episodes at once, whatever an environment does.

A trusted environment is played here. Any other is played in workers: an episode stays in one, and
where a worker was killed its episodes are played again from their actions.
"""

from __future__ import annotations

import itertools
import math
import numbers
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait as wait_for
from typing import Any, NamedTuple

from counterpoise.environments import Environment, Episode, Reply
from counterpoise.errors import ConfigError, said
from counterpoise.tasks.workers import Fault, Sent, Worker, sent
from counterpoise.types import Prompt

_WORKERS: list[Worker] = []  # kept between batches
_CALLS = itertools.count()
KEPT = 1000  # calls that a worker of many remembers; an older one is played from its first action


class Asked(NamedTuple):
    """One step of an episode: all its actions so far, the last of which is new."""

    call: int
    row: int
    prompt: Prompt
    seed: int
    actions: tuple[str, ...]


def play_step(
    environment: Environment, memory: dict[Any, Any], asked: Asked
) -> tuple[Reply, ...] | Fault:
    """Replies to the actions that an episode has not seen: the last one, or all of them where the
    episode is not here. A worker serves this.
    """
    if memory.get("call") != asked.call:
        memory.clear()
        memory["call"] = asked.call
    try:
        if asked.row not in memory:
            memory[asked.row] = environment.start(asked.prompt, asked.seed), 0
        episode, num_seen = memory[asked.row]
        replies = tuple(_step(episode, action) for action in asked.actions[num_seen:])
    except Exception as error:
        return _fault(memory, asked.row, error)
    memory[asked.row] = episode, len(asked.actions)
    return replies


def _fault(memory: dict[Any, Any], row: int, error: Exception) -> Fault:
    """An environment's fault is reported with its row; it must not end a run."""
    memory.pop(row, None)
    return Fault("failed", f"the environment raised {said(error)}")


def play_kept(
    environment: Environment, memory: dict[Any, Any], asked: Asked
) -> tuple[Reply, ...] | Fault:
    """``play_step`` for callers that take turns with a worker. A worker serves this."""
    own = memory.get(asked.call, {})
    keep(memory, asked.call, own)
    return play_step(environment, own, asked)


def keep(memory: dict[int, Any], call: int, value: object) -> None:
    """Remember a call; the oldest beyond ``KEPT`` are forgotten."""
    memory[call] = value
    while len(memory) > KEPT:
        del memory[next(iter(memory))]


def _step(episode: Episode, action: str) -> Reply:
    """One reply, with every part what it should be; a plain reply again, whatever it was."""
    reply = episode.step(action)
    if _is_plain(reply):
        return reply
    if not isinstance(reply, Reply):
        raise TypeError(f"step returned {type(reply).__name__}, expected a Reply")
    if not isinstance(reply.text, str) or not isinstance(reply.state, str):
        raise TypeError("the text and the state of a Reply must be str")
    if type(reply.metrics) is not dict and not isinstance(reply.metrics, Mapping):
        raise TypeError(f"the metrics of a Reply must be a mapping, got {reply.metrics!r}")
    return Reply(
        text=reply.text,
        reward=_number("reward", reply.reward),
        is_done=bool(reply.is_done),
        state=reply.state,
        score=None if reply.score is None else _number("score", reply.score),
        metrics=reply.metrics
        and {str(key): _number(key, value) for key, value in reply.metrics.items()},
    )


def _is_plain(reply: object) -> bool:
    """Every part is of the very type it should be: nearly always, and the checks below are slow."""
    if type(reply) is not Reply:
        return False
    text, reward, is_done, state, score, metrics = reply
    if not (type(text) is type(state) is str and type(reward) is float and type(is_done) is bool):
        return False
    if type(metrics) is not dict or not (score is None or type(score) is float):
        return False
    total = reward if score is None else reward + score
    for name, value in metrics.items():
        if type(name) is not str or type(value) is not float:
            return False
        total += value
    return math.isfinite(total)


def _number(name: str, value: Any) -> float:
    item = getattr(value, "item", None)
    value = item() if item else value
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"the {name} of a Reply must be a finite number, got {str(value)[:60]!r}")
    return float(value)


class Episodes:
    """The episodes of one batch, each known by its row.

    Args:
        environment: what they are played with.
        prompts, seeds: one per row.
        time_limit_s: seconds that one step may take; trusted environments are not timed.
        num_workers: processes (default: one per core, 2 to 8); does not change the result.
    """

    def __init__(
        self,
        environment: Environment,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        time_limit_s: float = 10.0,
        num_workers: int | None = None,
    ) -> None:
        self.environment, self.prompts, self.seeds = environment, prompts, seeds
        self.time_limit_s, self.call = time_limit_s, next(_CALLS)
        self.actions: list[tuple[str, ...]] = [()] * len(prompts)
        self.replies: list[tuple[Reply, ...]] = [()] * len(prompts)
        self.memory: dict[Any, Any] = {}
        self.queue: deque[int] = deque()
        self.crew = None
        if not getattr(environment, "is_trusted", False):
            self.crew = Crew(sent(environment, prompts), num_workers)

    def send(self, row: int, action: str) -> None:
        """A new action of a row; its reply comes with ``poll``."""
        self.actions[row] += (action,)
        self.queue.append(row)

    def poll(self, *, wait: bool) -> list[tuple[int, Reply | Fault]]:
        """Replies that are ready, each with its row; ``wait`` for one if there is none."""
        if self.crew is None:
            rows, self.queue = list(self.queue), deque()
            return [(row, self._play_here(row)) for row in rows]
        while self.queue:
            row = self.queue.popleft()
            self.crew.put(self._asked(row), self.time_limit_s)
        return [(row, self._latest(row, out)) for row, out in self.crew.take(wait=wait)]

    def check(self, rows: Sequence[int]) -> None:
        """Play some rows that did not fail again: other replies than before are an error."""
        self.send_again(rows)
        num_left = len(rows)
        while num_left:
            num_left -= len(self.poll(wait=True))

    def send_again(self, rows: Sequence[int]) -> None:
        """All actions of some rows, to new episodes."""
        self.call, self.memory = next(_CALLS), {}
        self.queue.extend(rows)

    def close(self) -> None:
        """Nobody waits any longer: workers in the middle of a step are ended."""
        if self.crew is not None:
            self.crew.close()

    def _asked(self, row: int) -> Asked:
        return Asked(self.call, row, self.prompts[row], self.seeds[row], self.actions[row])

    def _play_here(self, row: int) -> Reply | Fault:
        """The reply to a row's last action; an episode that is alive here takes it as it is."""
        actions, (episode, num_seen) = self.actions[row], self.memory.get(row, (None, 0))
        if episode is not None and num_seen == len(actions) - 1:
            try:
                reply = _step(episode, actions[-1])
            except Exception as error:
                return _fault(self.memory, row, error)
            self.memory[row] = episode, len(actions)
            self.replies[row] += (reply,)
            return reply
        return self._latest(row, play_step(self.environment, self.memory, self._asked(row)))

    def _latest(self, row: int, out: tuple[Reply, ...] | Fault) -> Reply | Fault:
        """The reply to the last action; those that were played again must be what they were."""
        if isinstance(out, Fault):
            return out
        first = len(self.actions[row]) - len(out)
        known = self.replies[row][first:]
        for turn, (old, new) in enumerate(zip(known, out), first):
            if (old.text, old.reward, old.is_done) != (new.text, new.reward, new.is_done):
                raise ConfigError(
                    f"environment: the same actions gave two replies to turn {turn} of prompt"
                    f" {self.prompts[row].id!r}: {old.text[:80]!r} with reward {old.reward:g}, then"
                    f" {new.text[:80]!r} with {new.reward:g}. Everything random in an episode must"
                    " come from the seed that start() gets."
                )
        self.replies[row] = (*self.replies[row][:first], *out)
        return out[-1]


class Crew:
    """Workers that play; an episode stays with one of them."""

    def __init__(self, known: Sent, num_workers: int | None) -> None:
        self.known = known
        num = num_workers or min(8, max(2, os.cpu_count() or 2))
        self.queues: list[deque[tuple[Asked, float]]] = [deque() for _ in range(num)]
        self.rows: list[set[tuple[int, int]]] = [set() for _ in range(num)]
        self.limit = 0.0

    def put(self, asked: Asked, time_limit_s: float) -> None:
        self.limit = time_limit_s
        self.queues[asked.row % len(self.queues)].append((asked, time_limit_s))
        self._begin()

    def take(self, *, wait: bool) -> list[tuple[int, Any]]:
        """Results that are ready; with ``wait`` at least one, if anything is under way."""
        while True:
            self._begin()
            busy = [worker for worker in self._mine() if worker.item is not None]
            out = [one for worker in busy if (one := worker.end(self.limit)) is not None]
            if out or not wait or not busy:
                self._begin()
                return out
            first = min(worker.deadline for worker in busy)
            wait_for([w.connection for w in busy], max(0.0, first - time.monotonic()))

    def close(self) -> None:
        for worker in self._mine():
            if worker.item is not None:
                worker.kill()
                worker.item = None

    def _mine(self) -> list[Worker]:
        return _WORKERS[: len(self.queues)]

    def _begin(self) -> None:
        """Every idle worker gets the next step that waits for it."""
        for slot, queue in enumerate(self.queues):
            if queue and (slot >= len(_WORKERS) or _WORKERS[slot].item is None):
                worker = self._ready(slot)
                asked, limit = queue.popleft()
                key = (asked.call, asked.row)
                # an episode that is not there is played from its first action
                num_steps = 1 if key in self.rows[slot] else len(asked.actions)
                self.rows[slot].add(key)
                worker.begin(asked.row, (asked,), limit * num_steps)

    def _ready(self, slot: int) -> Worker:
        while slot >= len(_WORKERS):
            _WORKERS.append(Worker(self.known, play_step, "environment"))
        if not _WORKERS[slot].is_ready(self.known):
            _WORKERS[slot].kill()
            _WORKERS[slot] = Worker(self.known, play_step, "environment")
            self.rows[slot] = set()
        return _WORKERS[slot]
