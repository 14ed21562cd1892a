"""Prompts of a task's stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from counterpoise.errors import own_code
from counterpoise.tasks import Task
from counterpoise.trainer.config import ConfigError
from counterpoise.types import Prompt


def prompts_from(task: Task, split: str, seed: int, start: int, num: int) -> list[Prompt]:
    """The next prompts of a stream; a train stream that ends is begun again."""
    taken = stream(task, split, seed, start, num)
    if len(taken) < num and split == "train":
        whole = stream(task, split, seed, 0, start + num)
        taken = [whole[at % len(whole)] for at in range(start, start + num) if whole]
    if not taken:
        raise ConfigError(f"task: no prompts in split {split!r}.")
    return taken


def stream(task: Task, split: str, seed: int, start: int, num: int) -> list[Prompt]:
    """So many prompts, fewer where the stream ends; what a task gives in their place is an
    error.
    """
    where = f"task: prompts({split!r}, {seed}, start={start})"
    with own_code(where):
        given = task.prompts(split, seed, start=start)
        if not isinstance(given, Iterable):
            raise ConfigError(
                f"{where} returned {given!r}, expected an iterator over counterpoise.Prompt."
            )
        taken = list(itertools.islice(given, num))
    for at, prompt in enumerate(taken, start):
        _check_prompt(f"task: prompt {at} of split {split!r}", prompt)
    return taken


def _check_prompt(where: str, prompt: object) -> None:
    if not all(hasattr(prompt, name) for name in Prompt._fields):
        raise ConfigError(
            f"{where} is a {type(prompt).__name__}, got {str(prompt)[:60]!r}. Expected"
            " counterpoise.Prompt(id=..., text=..., answer=...)."
        )
    for name in ("id", "text", "answer"):
        value = getattr(prompt, name)
        if not isinstance(value, str):
            raise ConfigError(
                f"{where}: {name} must be a text, got {value!r}. Write Prompt({name}=str(...));"
                " values of other kinds have their place in meta."
            )
