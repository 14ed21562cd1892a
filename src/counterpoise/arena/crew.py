"""Prompts and rewards of all members, on the cores that are there.

Beside an accelerator the host would be the bottleneck: worker processes make prompts ahead of time,
decode answers and grade them. Without workers the same functions run in place.

Axes: N rollouts of a member, T response tokens.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from counterpoise.policy import Policy, decode_texts, encode_prompts
from counterpoise.tasks import Grades, Task
from counterpoise.trainer.collect import grade_rollouts
from counterpoise.trainer.config import Config
from counterpoise.trainer.importance import answer_tokens
from counterpoise.trainer.prompts import prompts_from
from counterpoise.types import Prompt


class Questions(NamedTuple):
    """Prompts of one batch of one seed, as text and as token ids."""

    prompts: list[Prompt]
    prompt_ids: list[list[int]]


class Stretch(NamedTuple):
    """Where prompts stand in a task's stream: a key of what was made ahead."""

    split: str
    seed: int
    start: int
    num: int


class Job(NamedTuple):
    """Rollouts to grade: rollout i answers ``prompts[group_N[i]]`` with the first ``length_N[i]``
    tokens of its row. ``where`` opens an error.
    """

    prompts: list[Prompt]
    group_N: np.ndarray
    token_ids_NT: np.ndarray
    length_N: np.ndarray
    where: str


class Shelf(NamedTuple):
    """Rows of a large tensor in shared memory, which worker processes read in place."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: slice

    def load(self) -> Tensor:
        return _mapping(self.path, self.dtype, self.shape)[self.rows]


@functools.lru_cache(maxsize=8)
def _mapping(path: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype).view(shape)


class Host(NamedTuple):
    """All that the work needs: the task, the recipe, a tokenizer (the policy has no model here)."""

    policy: Policy
    task: Task
    config: Config


def ask(host: Host, stretch: Stretch) -> Questions:
    """Prompts of a stretch, read by the tokenizer."""
    prompts = prompts_from(host.task, stretch.split, stretch.seed, stretch.start, stretch.num)
    rollouts, texts = host.config.rollouts, [prompt.text for prompt in prompts]
    ids = encode_prompts(
        host.policy, texts, chat=host.config.chat, max_prompt_tokens=rollouts.max_prompt_tokens
    )
    return Questions(prompts, ids)


def judge(host: Host, job: Job) -> Grades:
    """Decode and grade."""
    ids = [row[:length].tolist() for row, length in zip(job.token_ids_NT, job.length_N)]
    texts = decode_texts(host.policy.tokenizer, ids)
    pairs = [(job.prompts[p], text) for p, text in zip(job.group_N.tolist(), texts)]
    return grade_rollouts(host.task, pairs, host.config, job.where)


def find_answers(host: Host, job: Job) -> np.ndarray:
    """The position of each rollout's first answer token, [N]; -1 where it has no answer."""
    asked = [job.prompts[p] for p in job.group_N.tolist()]
    mask_NT = np.arange(job.token_ids_NT.shape[1]) < job.length_N[:, None]
    ids_NT, mask_NT = torch.from_numpy(job.token_ids_NT).long(), torch.from_numpy(mask_NT)
    return answer_tokens(host.policy, host.task, asked, ids_NT, mask_NT).numpy()


Item = TypeVar("Item")
Result = TypeVar("Result")


class Crew:
    """Worker processes of an arena; ``close`` ends them.

    Start it before the accelerator is first used: workers are forks of this process. Tasks that
    must be watched have worker processes of their own and are graded from here.
    """

    def __init__(
        self,
        policy: Policy,
        task: Task,
        config: Config,
        num_workers: int = 0,
        memory: Path | None = None,
    ) -> None:
        global _HOST
        _HOST = self.host = Host(policy._replace(model=None), task, config)  # pyright: ignore[reportArgumentType]
        self.pool, self.folder, self.num_workers = None, None, 0
        self.ahead: dict[Stretch, Future[Questions]] = {}
        self.known: dict[Stretch, Questions] = {}
        if num_workers and getattr(task, "is_trusted", False):
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            context = multiprocessing.get_context("fork")
            self.pool = ProcessPoolExecutor(num_workers, context, _start)
            shared = memory or Path("/dev/shm")
            self.folder = Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else None))
            self.num_workers = num_workers
            list(self.pool.map(int, range(4 * num_workers)))  # all forks are made now

    def call(self, work: Callable[[Host, Item], Result], items: Sequence[Item]) -> list[Result]:
        """``work(host, item)`` for every item."""
        if self.pool is None:
            return [work(self.host, item) for item in items]
        running = [self.pool.submit(_call, work, item) for item in items]
        return [one.result() for one in running]

    def expect(self, stretches: Sequence[Stretch]) -> None:
        """Make these prompts ahead of time."""
        if self.pool is not None:
            for stretch in stretches:
                if stretch not in self.known and stretch not in self.ahead:
                    self.ahead[stretch] = self.pool.submit(_call, ask, stretch)

    def questions(self, stretches: Sequence[Stretch]) -> list[Questions]:
        """The prompts of each stretch; equal stretches are made once."""
        self.expect(stretches)
        wanted = set(stretches)
        self.known = {key: value for key, value in self.known.items() if key in wanted}
        for stretch in wanted - set(self.known):
            coming = self.ahead.pop(stretch, None)
            self.known[stretch] = ask(self.host, stretch) if coming is None else coming.result()
        return [self.known[stretch] for stretch in stretches]

    def shelve(self, name: str, column: Tensor) -> Callable[[slice], Shelf | Tensor]:
        """Where the work finds rows of a large column: in shared memory for workers."""
        if self.folder is None:
            return lambda rows: column[rows]
        path, shape = str(self.folder / name), tuple(column.shape)
        kept = _mapping(path, column.dtype, shape)
        kept.copy_(column)
        return lambda rows: Shelf(path, column.dtype, shape, rows)

    def close(self) -> None:
        if self.pool is not None and self.folder is not None:
            self.pool.shutdown(cancel_futures=True)
            _mapping.cache_clear()
            shutil.rmtree(self.folder, ignore_errors=True)


_HOST: Host | None = None  # a fork of the process inherits it


def end_with_parent(*ends: Connection) -> None:
    """This process ends with the one that began it, killed or not, or when one of ``ends`` is
    closed on the other side: the next command would find its work taken.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_after, args=([parent.sentinel, *ends],), daemon=True).start()


def _end_after(signs: Sequence[int | Connection]) -> None:
    wait(signs)
    os._exit(1)


def _start() -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the arena itself hears Ctrl-C and ends workers
    torch.set_num_threads(1)


def _call(work: Callable[[Host, Item], Result], item: Item) -> Result:
    assert _HOST is not None
    return work(_HOST, item)
