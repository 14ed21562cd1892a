"""Built-in environment: guess a number, told each time whether it is smaller or larger.

``1-g:`` says that the secret is one of 1, 2, ... 9, a, ... g, a character each. ``7;`` asks; ``<``
answers that the secret is smaller, ``>`` that it is larger.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from typing import NamedTuple

from counterpoise.environments import Reply
from counterpoise.environments.games import MALFORMED, Play, draw
from counterpoise.errors import check_number, check_whole
from counterpoise.types import Prompt

DIGITS = string.digits[1:] + string.ascii_lowercase  # the number k is written DIGITS[k - 1]
NUMBERS = {digit: k for k, digit in enumerate(DIGITS, 1)}


class Interval(NamedTuple):
    """What a player knows: the secret is from low to high, and so many turns are left."""

    low: int
    high: int
    left: int


@dataclasses.dataclass(frozen=True)
class Guess:
    """Guess a number from 1 to ``n`` in a few turns.

    Args:
        n: the largest number, at most 35.
        turns: guesses; the episode ends with the last of them.
        cost: what each turn costs. The hit pays 1.

    The best player halves: it hits in ``k`` turns with chance ``min(1, (2**k - 1) / n)``.

    >>> episode = Guess().start(Prompt("", "1-g:", "9", {"secret": 9}), seed=0)
    >>> [episode.step(action).text for action in ("4", "c", "x")]
    ['>', '<', '?']
    >>> episode.step("9").reward
    1.0
    """

    is_trusted = True

    n: int = 16
    turns: int = 4
    cost: float = 0.0

    def __post_init__(self) -> None:
        check_whole("guess", least=2, n=self.n)
        check_number("guess", most=len(DIGITS), n=self.n)
        check_whole("guess", least=1, turns=self.turns)
        check_number("guess", least=0, cost=self.cost)

    @property
    def actions(self) -> tuple[str, ...]:
        return tuple(DIGITS[: self.n])

    def prompts(self, split: str, seed: int, start: int = 0) -> Iterator[Prompt]:
        """The endless stream of a split; every ``n`` prompts have each secret once."""
        numbers = (draw("guess", self.n, split, seed, position) for position in count(start))
        return (self.prompt(number + 1) for number in numbers)

    def prompt(self, secret: int) -> Prompt:
        digit = DIGITS[secret - 1]
        text = f"{DIGITS[0]}-{DIGITS[self.n - 1]}:"
        return Prompt(f"guess/{digit}", text, digit, {"secret": secret})

    def start(self, prompt: Prompt, seed: int) -> Play[int, Interval]:
        return Play(self, self.secret(prompt), self.first(prompt))

    def first_state(self, prompt: Prompt) -> str:
        return key(self.first(prompt))

    def secret(self, prompt: Prompt) -> int:
        return prompt.meta["secret"]

    def first(self, prompt: Prompt) -> Interval:
        return Interval(1, self.n, self.turns)

    def possible(self, state: Interval, action: str) -> range:
        return range(state.low, state.high + 1)

    def answer(self, secret: int, state: Interval, action: str) -> tuple[Reply, Interval]:
        guess = NUMBERS.get(action)
        if guess is None or guess > self.n:
            guess, sign = None, MALFORMED
        else:
            sign = "=" if guess == secret else "<" if secret < guess else ">"
        after = narrow(state, secret, guess)
        return reply_of(after, sign, self.cost), after


@lru_cache(maxsize=4096)
def reply_of(after: Interval, sign: str, cost: float) -> Reply:
    """What is said once an answer has narrowed the interval: a handful, so each is made once."""
    is_hit = sign == "="
    is_done = is_hit or after.left == 0
    size = after.high - after.low + 1
    return Reply(
        text=sign,
        reward=is_hit - cost,
        is_done=is_done,
        state=key(after),
        score=float(is_hit) if is_done else 1 / size,
        metrics={"malformed": float(sign == MALFORMED)},
    )


def narrow(state: Interval, secret: int, guess: int | None) -> Interval:
    """What is known after a guess, None for a malformed one.

    >>> narrow(Interval(1, 16, 4), 9, 4)
    Interval(low=5, high=16, left=3)
    """
    low, high, left = state
    if guess is not None and guess <= secret:
        low = max(low, guess + (guess < secret))
    if guess is not None and guess >= secret:
        high = min(high, guess - (guess > secret))
    return Interval(low, high, left - 1)


def key(state: Interval) -> str:
    return f"{state.low}-{state.high}/{state.left}"
