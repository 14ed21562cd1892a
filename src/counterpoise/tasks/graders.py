"""Rewards of many rollouts with a time limit: a hanging, raising or dying grader gives reward 0, is
counted and reported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from counterpoise.tasks.workers import POOL, verdict
from counterpoise.types import Prompt

if TYPE_CHECKING:
    from counterpoise.tasks import Task


class Grades(NamedTuple):
    """Rewards in the order of the rollouts, how many graders failed or ran out of time, and one
    line for each of those.
    """

    reward: list[float]
    num_failed: int
    num_timed_out: int
    messages: list[str]


def grade(
    task: Task,
    pairs: Sequence[tuple[Prompt, str]],
    time_limit_s: float = 5.0,
    num_workers: int | None = None,
) -> Grades:
    """The rewards of (prompt, text) pairs, whatever the grader does.

    Args:
        task: a task. With ``is_trusted`` it is graded here; otherwise it goes to worker processes
            and has to be picklable.
        pairs: the rollouts.
        time_limit_s: seconds that one rollout may take; trusted tasks are not timed.
        num_workers: processes that share the work (default: one a core, 2 to 8); does not change
            the result.

    >>> from counterpoise.tasks.arithmetic import Arithmetic
    >>> grade(
    ...     Arithmetic(),
    ...     [
    ...         (Prompt("a", "What is 2 + 2?", "4"), "So the answer is 4."),
    ...         (Prompt("a", "What is 2 + 2?", "4"), "4"),
    ...     ],
    ... )
    Grades(reward=[1.0, 0.0], num_failed=0, num_timed_out=0, messages=[])
    """
    num_workers = min(8, max(2, os.cpu_count() or 2)) if num_workers is None else num_workers
    if not time_limit_s > 0 or num_workers < 1:
        raise ValueError(
            f"grade: time_limit_s must be above 0 and num_workers at least 1, got {time_limit_s}"
            f" and {num_workers}."
        )
    if getattr(task, "is_trusted", False):
        verdicts = [verdict(task, prompt, text) for prompt, text in pairs]
    else:
        verdicts = POOL.verdicts(task, pairs, time_limit_s, num_workers)
    faults = [found.fault for found in verdicts]
    messages = [
        f"prompt {prompt.id}: {found.message}"
        for (prompt, _), found in zip(pairs, verdicts)
        if found.fault
    ]
    return Grades(
        [found.reward for found in verdicts],
        faults.count("failed"),
        faults.count("timed out"),
        messages,
    )
