"""Built-in environment: a sum of two hidden digits, and a tool that looks them up.

``b+e:`` asks for the sum of two letters, modulo 10. ``b;`` looks a letter up and gets ``=4``;
``!9;`` answers. Without the tool nobody can be right but by luck.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import string
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from counterpoise.environments import Reply
from counterpoise.environments.games import MALFORMED, SPLITS, Play
from counterpoise.errors import check_number, check_whole, nearest
from counterpoise.types import Prompt

ANSWERS = tuple(f"!{digit}" for digit in string.digits)
PLACE = {letter: at for at, letter in enumerate(string.ascii_lowercase)}


class Notes(NamedTuple):
    """What a player knows: the two letters asked for, the digits looked up, the turns left."""

    asked: str
    known: tuple[tuple[str, int], ...]
    left: int


@dataclasses.dataclass(frozen=True)
class Lookup:
    """The sum of two hidden digits, modulo 10.

    Args:
        letters: of the table.
        turns: look-ups and the answer; the episode ends with an answer or the last turn.
        cost: of each turn that is not an answer. The right answer pays 1.

    With the default cost the best is 0.9, two look-ups and the answer.

    >>> prompt = Prompt("", "b+e:", "1", {"secret": "040070"})
    >>> episode = Lookup().start(prompt, seed=0)
    >>> [episode.step(action)[:2] for action in ("b", "e", "!1")]
    [('=4', -0.05), ('=7', -0.05), ('=', 1.0)]
    """

    is_trusted = True

    letters: int = 6
    turns: int = 4
    cost: float = 0.05

    def __post_init__(self) -> None:
        check_whole("lookup", least=2, letters=self.letters)
        check_number("lookup", most=len(string.ascii_lowercase), letters=self.letters)
        check_whole("lookup", least=1, turns=self.turns)
        check_number("lookup", least=0, cost=self.cost)

    @property
    def actions(self) -> tuple[str, ...]:
        return (*string.ascii_lowercase[: self.letters], *ANSWERS)

    @functools.cached_property
    def _legal(self) -> frozenset[str]:
        return frozenset(self.actions)

    def prompts(self, split: str, seed: int, start: int = 0) -> Iterator[Prompt]:
        """The endless stream of a split."""
        if split not in SPLITS:
            raise ValueError(f"lookup: unknown split {split!r}. {nearest(split, SPLITS)}")
        return (self._drawn(split, seed, position) for position in count(start))

    def _drawn(self, split: str, seed: int, position: int) -> Prompt:
        rng = random.Random(f"lookup/{split}/{seed}/{position}/{self.letters}")
        asked = "".join(rng.sample(string.ascii_lowercase[: self.letters], 2))
        return self.prompt(asked, "".join(rng.choices(string.digits, k=self.letters)))

    def prompt(self, asked: str, table: str) -> Prompt:
        """The question for two letters; ``table`` has a digit per letter."""
        text = f"{asked[0]}+{asked[1]}:"
        total = sum(digit_of(table, letter) for letter in asked) % 10
        return Prompt(f"lookup/{text}{table}", text, str(total), {"secret": table})

    def start(self, prompt: Prompt, seed: int) -> Play[str, Notes]:
        return Play(self, self.secret(prompt), self.first(prompt))

    def first_state(self, prompt: Prompt) -> str:
        return key(self.first(prompt))

    def secret(self, prompt: Prompt) -> str:
        return prompt.meta["secret"]

    def first(self, prompt: Prompt) -> Notes:
        return Notes(prompt.text[0] + prompt.text[2], (), self.turns)

    def possible(self, state: Notes, action: str) -> list[str]:
        """Tables that agree with what is known and differ in the one digit that decides: the one
        that is looked up, or one of those that an answer leaves to luck.
        """
        known = dict(state.known)
        deciding = state.asked if action in ANSWERS else action
        hidden = [letter for letter in deciding if letter not in known]
        if not hidden:
            return [table_of(self.letters, known)]
        return [table_of(self.letters, {**known, hidden[0]: digit}) for digit in range(10)]

    def answer(self, secret: str, state: Notes, action: str) -> tuple[Reply, Notes]:
        asked, known, left = state
        if action not in self._legal:
            text, reward = MALFORMED, -self.cost
        elif action[0] == "!":
            total = digit_of(secret, asked[0]) + digit_of(secret, asked[1])
            text, reward = ("=", 1.0) if int(action[1]) == total % 10 else ("x", 0.0)
        else:
            digit = digit_of(secret, action)
            text, reward = f"={digit}", -self.cost
            if (action, digit) not in known:
                known = tuple(sorted((*known, (action, digit))))
        after = Notes(asked, known, left - 1)
        return reply_of(after, text, reward), after


@functools.lru_cache(maxsize=2**16)
def reply_of(after: Notes, text: str, reward: float) -> Reply:
    """What is said once something is known; made once for all who get there."""
    is_done = text in ("=", "x") or after.left == 0
    num_known = sum(letter in after.asked for letter, _ in after.known)
    return Reply(
        text=text,
        reward=reward,
        is_done=is_done,
        state=key(after),
        score=float(text == "=") if is_done else num_known / 2,
        metrics={"malformed": float(text == MALFORMED), "lookups": float(len(text) == 2)},
    )


def digit_of(table: str, letter: str) -> int:
    return int(table[PLACE[letter]])


def table_of(letters: int, known: dict[str, int]) -> str:
    """A table with these digits, and 0 elsewhere."""
    return "".join(str(known.get(letter, 0)) for letter in string.ascii_lowercase[:letters])


def key(state: Notes) -> str:
    return "".join(letter for letter, _ in state.known) + f"/{state.left}"
