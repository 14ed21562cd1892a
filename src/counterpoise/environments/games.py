"""What the built-in games share: an answer is a pure function of secret, state and action.

The state is what a player can know: the numbers or codes that are still possible, the turns left.
Whoever knows it knows the chances of every answer, which is what ``values`` adds up.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from counterpoise.environments import Reply
from counterpoise.errors import nearest
from counterpoise.types import Prompt

SPLITS = ("train", "test")
MALFORMED = "?"

Secret = TypeVar("Secret")
State = TypeVar("State", bound="tuple[object, ...]")


class Game(Protocol[Secret, State]):
    """An environment small enough for exact values.

    Args:
        actions: every legal one; what else a model writes is malformed and costs a turn.
    """

    @property
    def actions(self) -> tuple[str, ...]: ...

    def secret(self, prompt: Prompt) -> Secret: ...

    def first(self, prompt: Prompt) -> State:
        """The state before the first turn."""
        ...

    def answer(self, secret: Secret, state: State, action: str) -> tuple[Reply, State]:
        """The reply, and the state after it."""
        ...

    def possible(self, state: State, action: str) -> Iterable[Secret]:
        """Secrets that are equally likely in a state and stand for all that may answer."""
        ...


@dataclasses.dataclass
class Play(Generic[Secret, State]):
    """An episode of a game."""

    game: Game[Secret, State]
    secret: Secret
    state: State
    is_over: bool = False

    def step(self, action: str) -> Reply:
        """The game's answer; after the end nothing is paid."""
        if self.is_over:
            return Reply(is_done=True)
        reply, self.state = self.game.answer(self.secret, self.state, action)
        self.is_over = reply.is_done
        return reply


def draw(name: str, count: int, split: str, seed: int, position: int) -> int:
    """A number below ``count`` for a position of a split: every block of ``count`` positions is a
    shuffled deck, so that a batch or an evaluation of that size has each secret once.

    >>> sorted(draw("guess", 4, "train", 0, position) for position in range(8, 12))
    [0, 1, 2, 3]
    """
    if split not in SPLITS:
        raise ValueError(f"{name}: unknown split {split!r}. {nearest(split, SPLITS)}")
    block, place = divmod(position, count)
    return random.Random(f"{name}/{split}/{seed}/{block}").sample(range(count), count)[place]
