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
        left = state.left - 1
        if action in ANSWERS:
            total = sum(digit_of(secret, letter) for letter in state.asked)
            is_right = int(action[1]) == total % 10
            return self._step(state._replace(left=left), "=" if is_right else "x", float(is_right))
        if action not in self._legal:
            return self._step(state._replace(left=left), MALFORMED, -self.cost)
        digit = digit_of(secret, action)
        known = tuple(sorted({*state.known, (action, digit)}))
        return self._step(Notes(state.asked, known, left), f"={digit}", -self.cost)

    def _step(self, after: Notes, text: str, reward: float) -> tuple[Reply, Notes]:
        is_answer = text in ("=", "x")
        is_done = is_answer or after.left == 0
        num_known = sum(letter in after.asked for letter, _ in after.known)
        reply = Reply(
            text=text,
            reward=reward,
            is_done=is_done,
            state=key(after),
            score=float(text == "=") if is_done else num_known / 2,
            metrics={"malformed": float(text == MALFORMED), "lookups": float(len(text) == 2)},
        )
        return reply, after


def digit_of(table: str, letter: str) -> int:
    return int(table[string.ascii_lowercase.index(letter)])


def table_of(letters: int, known: dict[str, int]) -> str:
    """A table with these digits, and 0 elsewhere."""
    return "".join(str(known.get(letter, 0)) for letter in string.ascii_lowercase[:letters])


def key(state: Notes) -> str:
    return "".join(letter for letter, _ in state.known) + f"/{state.left}"
