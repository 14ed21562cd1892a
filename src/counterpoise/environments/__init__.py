"""Conversations: an environment answers every turn of the model until an episode is over.

An environment is a task whose ``reward`` became ``start``. The secret of an episode lies in
``prompt.meta``; all rollouts of a prompt play the same episode. **An episode is its actions**:
``start`` and the same actions give the same replies, so that a run can be resumed, branched and
checked without a stored episode.

A bad action is a ``Reply`` that says so. An environment that raises, hangs or returns something
else marks its row as failed; the batch goes on without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol, TypeGuard, runtime_checkable

from counterpoise.types import Prompt


class Reply(NamedTuple):
    """The answer to one turn.

    Args:
        text: what the model reads next.
        reward: of this turn; the outcome is part of the last one.
        is_done: the episode is over; ``text`` is then shown to people alone.
        state: a key of the state after this turn; equal keys in a group mean equal futures, ""
            is unknown.
        score: of the state after this turn, no part of the reward; None is none.
        metrics: numbers to log, averaged over the turns that have them.
    """

    text: str = ""
    reward: float = 0.0
    is_done: bool = False
    state: str = ""
    score: float | None = None
    metrics: Mapping[str, float] = {}


class Episode(Protocol):
    """One conversation, alive."""

    def step(self, action: str) -> Reply:
        """The answer to what the model wrote in a turn, its stop token left out."""
        ...


@runtime_checkable
class Environment(Protocol):
    """What the trainer asks of an environment.

    ``is_trusted = True`` says that its episodes are a few safe lines: they are then played in the
    caller's process, else in workers that can be killed. ``first_state(prompt)`` may give the key
    of the state before the first turn; without it all rollouts of a prompt share one.
    """

    def prompts(self, split: str, seed: int, start: int = 0) -> Iterator[Prompt]: ...

    def start(self, prompt: Prompt, seed: int) -> Episode: ...


def is_environment(task: object) -> TypeGuard[Environment]:
    """Whether a task is played in turns rather than graded once."""
    return isinstance(task, Environment)
