"""Prompts of a task's stream."""

from __future__ import annotations

import itertools

from counterpoise.tasks import Task
from counterpoise.trainer.config import ConfigError
from counterpoise.types import Prompt


def prompts_from(task: Task, split: str, seed: int, start: int, num: int) -> list[Prompt]:
    """The next prompts of a stream; a train stream that ends is begun again."""
    taken = list(itertools.islice(task.prompts(split, seed, start=start), num))
    if len(taken) < num and split == "train":
        whole = list(itertools.islice(task.prompts(split, seed, start=0), start + num))
        taken = [whole[at % len(whole)] for at in range(start, start + num) if whole]
    if not taken:
        raise ConfigError(f"task: no prompts in split {split!r}.")
    return taken
