"""Prompts and rewards of all members, on the cores that are there.

Beside an accelerator the host would be the bottleneck: worker processes make prompts ahead of time,
decode answers and grade them. Without workers the same functions run in place.

Axes: N rollouts of a member, T response tokens.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import NamedTuple

import numpy as np

from counterpoise.policy import Policy, encode_prompts
from counterpoise.tasks import Grades, Task
from counterpoise.trainer.collect import grade_rollouts, prompts_from
from counterpoise.trainer.config import Config
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
    tokens of its row.
    """

    prompts: list[Prompt]
    group_N: np.ndarray
    token_ids_NT: np.ndarray
    length_N: np.ndarray


class Answers(NamedTuple):
    """Texts and grades of the rollouts of a job; texts only where they were asked for."""

    texts: list[str]
    grades: Grades


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


def judge(host: Host, job: Job, where: str, with_texts: bool) -> Answers:
    """Decode and grade."""
    ids = [row[:length].tolist() for row, length in zip(job.token_ids_NT, job.length_N)]
    texts = host.policy.tokenizer.batch_decode(ids, skip_special_tokens=True)
    pairs = [(job.prompts[p], text) for p, text in zip(job.group_N.tolist(), texts)]
    grades = grade_rollouts(host.task, pairs, host.config, where)
    return Answers(texts if with_texts else [], grades)


class Crew:
    """The workers of an arena; ``close`` ends them.

    Start it before the accelerator is first used: workers are forks of this process.
    """

    def __init__(self, policy: Policy, task: Task, config: Config, num_workers: int = 0) -> None:
        global _HOST
        _HOST = self.host = Host(policy._replace(model=None), task, config)  # pyright: ignore[reportArgumentType]
        self.pool = None
        self.ahead: dict[Stretch, Future[Questions]] = {}
        self.known: dict[Stretch, Questions] = {}
        # tasks that need watching have worker processes of their own, and those cannot have any
        self.is_trusted = bool(getattr(task, "is_trusted", False))
        if num_workers:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            context = multiprocessing.get_context("fork")
            self.pool = ProcessPoolExecutor(num_workers, mp_context=context)
            list(self.pool.map(int, range(4 * num_workers)))  # all forks are made now

    def expect(self, stretches: Sequence[Stretch]) -> None:
        """Make these prompts ahead of time."""
        if self.pool is not None:
            for stretch in stretches:
                if stretch not in self.known and stretch not in self.ahead:
                    self.ahead[stretch] = self.pool.submit(_ask, stretch)

    def questions(self, stretches: Sequence[Stretch]) -> list[Questions]:
        """The prompts of each stretch; equal stretches are made once."""
        self.expect(stretches)
        for stretch in stretches:
            if stretch not in self.known:
                made = self.ahead.pop(stretch, None)
                self.known[stretch] = ask(self.host, stretch) if made is None else made.result()
        questions = [self.known[stretch] for stretch in stretches]
        wanted = set(stretches)
        self.known = {key: value for key, value in self.known.items() if key in wanted}
        return questions

    def answers(self, jobs: Sequence[Job], where: str, with_texts: bool = False) -> list[Answers]:
        """Texts and grades of every job."""
        if self.pool is None or not self.is_trusted:
            return [judge(self.host, job, where, with_texts) for job in jobs]
        running = [self.pool.submit(_judge, job, where, with_texts) for job in jobs]
        return [one.result() for one in running]

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)


_HOST: Host | None = None  # a fork of the process inherits it


def _ask(stretch: Stretch) -> Questions:
    assert _HOST is not None
    return ask(_HOST, stretch)


def _judge(job: Job, where: str, with_texts: bool) -> Answers:
    assert _HOST is not None
    return judge(_HOST, job, where, with_texts)
