"""Texts and rewards of rollouts, each as soon as it has stopped.

Beside an accelerator a thread decodes and grades while other rollouts still run; on a CPU, whose
cores all sample, it is done once sampling is over. The result is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from counterpoise.policy import Policy, decode_texts
from counterpoise.sampling import Rollouts, sample_from
from counterpoise.tasks import Task
from counterpoise.tasks.graders import Grader, Grades
from counterpoise.trainer.config import Config
from counterpoise.types import Prompt

# a thread that wants to start a kernel gets the interpreter after so many seconds, not after 0.005
SWITCH_S = 2e-4


class Judged(NamedTuple):
    """Rollouts with their texts and grades."""

    rollouts: Rollouts
    texts: list[str]
    grades: Grades


def grader_of(task: Task, prompts: Sequence[Prompt], config: Config, where: str) -> Grader:
    """The grader of rollouts that answer ``prompts``, under the limits of the recipe."""
    limit, most = config.grader_time_limit_s, config.grader_max_failed_frac
    return Grader(task, prompts, limit, max_failed_frac=most, where=where)


def sample_and_grade(
    policy: Policy,
    task: Task,
    config: Config,
    prompt_ids: Sequence[Sequence[int]],
    asked: Sequence[Prompt],
    where: str,
    **settings: Any,
) -> Judged:
    """``sample``, and every rollout graded; rollout i answers ``asked[i]``."""
    judge = Judge(policy, task, asked, config, where)
    with judge.listening(beside=policy.model.device.type != "cpu"):
        rollouts = sample_from(
            policy,
            prompt_ids,
            max_new_tokens=config.rollouts.max_new_tokens,
            watch=judge.hear,
            **settings,
        )
    return Judged(rollouts, [judge.texts[row] for row in range(len(asked))], judge.grader.grades())


class Judge:
    """Decodes and grades rollouts as they are handed over.

    Args:
        prompts: the prompt of every rollout that will come.
        where: opens an error of the grader.
    """

    def __init__(
        self, policy: Policy, task: Task, prompts: Sequence[Prompt], config: Config, where: str
    ) -> None:
        self.tokenizer = policy.tokenizer
        self.grader = grader_of(task, prompts, config, where)
        self.texts: dict[int, str] = {}
        self.thread: ThreadPoolExecutor | None = None
        self.parts: list[Future[None]] = []
        self.waiting: dict[int, list[int]] = {}

    def hear(self, rows: Sequence[int], token_ids: Sequence[list[int]]) -> None:
        """Rollouts that have stopped, and their tokens."""
        heard = dict(zip(rows, token_ids))
        if self.thread is None:
            self.waiting |= heard
            return
        for part in self.parts:
            if part.done():
                part.result()  # a grader that fails too often ends the sampling
        self.parts.append(self.thread.submit(self._judge, heard))

    @contextmanager
    def listening(self, *, beside: bool) -> Iterator[None]:
        """What is heard in the block is judged at its end; ``beside`` it, by a thread, from when it
        is heard.
        """
        if not beside:
            yield
            self._judge(self.waiting)
            return
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            with ThreadPoolExecutor(1, "judge") as self.thread:
                yield
            for part in self.parts:
                part.result()
        finally:
            sys.setswitchinterval(interval)
            self.thread = None

    def _judge(self, heard: Mapping[int, list[int]]) -> None:
        texts = decode_texts(self.tokenizer, list(heard.values()))
        self.texts |= dict(zip(heard, texts))
        self.grader.add(dict(zip(heard, texts)))
