"""Rewards of many rollouts with a time limit: a hanging, raising or dying grader gives reward 0, is
counted and reported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from counterpoise.tasks.workers import POOL, Graded, Verdict, sent, verdict
from counterpoise.types import Prompt

if TYPE_CHECKING:
    from counterpoise.tasks import Task

HANGS = 8  # so many graders in a row that run out of time are not waited for any longer
ADVICE = "Mend the reward function; grader_max_failed_frac says how many may fail."


class Grades(NamedTuple):
    """Rewards in the order of the rollouts, how many graders failed or ran out of time, and one
    line for each of those. ``feedback`` is what the grader says of each answer; empty where it says
    nothing of any.
    """

    reward: list[float]
    num_failed: int
    num_timed_out: int
    messages: list[str]
    feedback: Sequence[str] = ()

    @property
    def num_faults(self) -> int:
        return self.num_failed + self.num_timed_out


def grade(
    task: Task,
    pairs: Sequence[tuple[Prompt, str]],
    time_limit_s: float = 5.0,
    num_workers: int | None = None,
    max_failed_frac: float = 1.0,
    where: str = "grade",
) -> Grades:
    """The rewards of (prompt, text) pairs, whatever the grader does.

    Args:
        task: a task. With ``is_trusted`` it is graded here; otherwise it goes to worker processes
            and has to be picklable.
        pairs: the rollouts.
        time_limit_s: seconds that one rollout may take; trusted tasks are not timed.
        num_workers: processes that share the work (default: one per core, 2 to 8); does not change
            the result.
        max_failed_frac: more failures than this share of the rollouts are an error, raised as soon
            as it is certain; 1 allows all of them.
        where: opens that error.

    >>> from counterpoise.tasks.arithmetic import Arithmetic
    >>> grade(
    ...     Arithmetic(),
    ...     [
    ...         (Prompt("a", "What is 2 + 2?", "4"), "So the answer is 4."),
    ...         (Prompt("a", "What is 2 + 2?", "4"), "4"),
    ...     ],
    ... )
    Grades(reward=[1.0, 0.0], num_failed=0, num_timed_out=0, messages=[], feedback=())
    """
    grader = Grader(
        task, [prompt for prompt, _ in pairs], time_limit_s, num_workers, max_failed_frac, where
    )
    grader.add({item: text for item, (_, text) in enumerate(pairs)})
    return grader.grades()


class Grader:
    """Verdicts of rollouts whose texts come in parts, under the limits of ``grade``.

    Args:
        prompts: the prompt of every rollout that will come.
    """

    def __init__(
        self,
        task: Task,
        prompts: Sequence[Prompt],
        time_limit_s: float = 5.0,
        num_workers: int | None = None,
        max_failed_frac: float = 1.0,
        where: str = "grade",
    ) -> None:
        num_workers = min(8, max(2, os.cpu_count() or 2)) if num_workers is None else num_workers
        if not time_limit_s > 0 or num_workers < 1:
            raise ValueError(
                f"grade: time_limit_s must be above 0 and num_workers at least 1, got"
                f" {time_limit_s} and {num_workers}."
            )
        self.task, self.prompts = task, prompts
        self.sent = None if getattr(task, "is_trusted", False) else sent(task, prompts)
        self.time_limit_s, self.num_workers = time_limit_s, num_workers
        self.max_failed_frac, self.where = max_failed_frac, where
        self.verdicts: dict[int, Verdict] = {}

    def add(self, texts: Mapping[int, str]) -> None:
        """Grade some rollouts, by their numbers."""
        pairs = {item: (self.prompts[item], text) for item, text in texts.items()}
        if self.sent is None:
            stream = (Graded(k, verdict(self.task, *pair)) for k, pair in pairs.items())
        else:
            stream = POOL.verdicts(self.sent, pairs, self.time_limit_s, self.num_workers)
        with closing(stream):  # an error leaves no worker with a rollout in hand
            for item, one in stream:
                self.verdicts[item] = one
                problem = one.fault and too_many(
                    self.verdicts, len(self.prompts), self.max_failed_frac
                )
                if problem:
                    first = first_fault(self.prompts, self.verdicts)
                    raise ValueError(f"{self.where}: {problem}. {first}. {ADVICE}")

    def grades(self) -> Grades:
        """What there is, in the order of the rollouts."""
        return grades(self.prompts, [self.verdicts[item] for item in range(len(self.prompts))])


def grades(prompts: Sequence[Prompt], verdicts: Sequence[Verdict]) -> Grades:
    """The verdicts of all rollouts as columns."""
    faults = [one.fault for one in verdicts]
    messages = [
        f"prompt {prompt.id}: {one.message}" for prompt, one in zip(prompts, verdicts) if one.fault
    ]
    reward = [one.reward for one in verdicts]
    feedback = [one.feedback for one in verdicts]
    return Grades(
        reward,
        faults.count("failed"),
        faults.count("timed out"),
        messages,
        feedback if any(feedback) else (),
    )


def too_many(verdicts: Mapping[int, Verdict], num_rollouts: int, max_failed_frac: float) -> str:
    """What is wrong if more graders failed than may, or if the first ones all ran out of time."""
    faults = [one.fault for one in verdicts.values()]
    num = len(faults) - faults.count("")
    if max_failed_frac < 1 and len(faults) >= HANGS and set(faults) == {"timed out"}:
        return f"the grader ran out of time on each of the first {num} rollouts"
    if num > max_failed_frac * num_rollouts:
        return f"the grader failed on {num} of the first {len(faults)} rollouts (of {num_rollouts})"
    return ""


def first_fault(prompts: Sequence[Prompt], verdicts: Mapping[int, Verdict]) -> str:
    """The first rollout whose grader failed, and how."""
    item = min(item for item, one in verdicts.items() if one.fault)
    return f"First, prompt {prompts[item].id}: {verdicts[item].message}"
