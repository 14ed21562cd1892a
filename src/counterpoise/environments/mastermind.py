"""Built-in environment: mastermind, a code of three letters found by guessing.

``abc:`` names the letters of the code. ``abb;`` guesses; ``1b1w`` answers that one letter stands
in its place (black) and another one is right and stands elsewhere (white).
"""

from __future__ import annotations

import dataclasses
import string
from collections import Counter
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import count, product
from typing import NamedTuple

from counterpoise.environments import Reply
from counterpoise.environments.games import MALFORMED, Play, draw
from counterpoise.errors import check_number, check_whole
from counterpoise.types import Prompt

MAX_LETTERS, MAX_PLACES = 6, 4


class Knowledge(NamedTuple):
    """What a player knows.

    Args:
        codes: those that are still possible, a bit each in the order of ``codes``.
        left: turns.
        blacks: the most so far, counted where they are paid.
    """

    codes: int
    left: int
    blacks: int = 0


@dataclasses.dataclass(frozen=True)
class Mastermind:
    """Find a code by guessing, told how many letters are right each time.

    Args:
        letters: that a code may have, ``a`` on.
        places: of a code.
        turns: guesses; the episode ends with the last of them.
        cost: what each turn costs.
        pay_blacks: False pays 1 at the hit; True pays a share of 1 for every black more than in
            all earlier turns, 1 in all by the hit.

    >>> episode = Mastermind().start(Prompt("", "abc:", "abc", {"secret": "abc"}), seed=0)
    >>> [episode.step(action).text for action in ("acb", "aab", "abc")]
    ['1b2w', '1b1w', '3b0w']
    """

    is_trusted = True

    letters: int = 3
    places: int = 3
    turns: int = 3
    cost: float = 0.0
    pay_blacks: bool = False

    def __post_init__(self) -> None:
        check_whole("mastermind", least=2, letters=self.letters, places=self.places)
        check_number("mastermind", most=MAX_LETTERS, letters=self.letters)
        check_number("mastermind", most=MAX_PLACES, places=self.places)
        check_whole("mastermind", least=1, turns=self.turns)
        check_number("mastermind", least=0, cost=self.cost)
        if not isinstance(self.pay_blacks, bool):
            raise ValueError(
                f"mastermind: pay_blacks must be true or false, got {self.pay_blacks!r}."
            )

    @property
    def actions(self) -> tuple[str, ...]:
        return codes(self.letters, self.places)

    def prompts(self, split: str, seed: int, start: int = 0) -> Iterator[Prompt]:
        """The endless stream of a split; as many prompts as there are codes have each once."""
        known = self.actions
        places = (draw("mastermind", len(known), split, seed, at) for at in count(start))
        return (self.prompt(known[place]) for place in places)

    def prompt(self, secret: str) -> Prompt:
        text = string.ascii_lowercase[: self.letters] + ":"
        return Prompt(f"mastermind/{secret}", text, secret, {"secret": secret})

    def start(self, prompt: Prompt, seed: int) -> Play[str, Knowledge]:
        return Play(self, self.secret(prompt), self.first(prompt))

    def first_state(self, prompt: Prompt) -> str:
        return key(self.first(prompt))

    def secret(self, prompt: Prompt) -> str:
        return prompt.meta["secret"]

    def first(self, prompt: Prompt) -> Knowledge:
        return Knowledge((1 << len(self.actions)) - 1, self.turns)

    def possible(self, state: Knowledge, action: str) -> list[str]:
        return [code for at, code in enumerate(self.actions) if state.codes >> at & 1]

    def answer(self, secret: str, state: Knowledge, action: str) -> tuple[Reply, Knowledge]:
        if action not in self.actions:
            after = Knowledge(state.codes, state.left - 1, state.blacks)
            return reply_of(after, MALFORMED, -self.cost), after
        blacks, whites = marks(secret, action)
        is_hit = blacks == self.places
        more = max(0, blacks - state.blacks) / self.places
        after = Knowledge(
            state.codes & alike(self.letters, self.places, action)[blacks, whites],
            state.left - 1,
            max(blacks, state.blacks) if self.pay_blacks else 0,
        )
        paid = more if self.pay_blacks else float(is_hit)
        return reply_of(after, f"{blacks}b{whites}w", paid - self.cost, is_hit), after


@lru_cache(maxsize=4096)
def reply_of(after: Knowledge, text: str, reward: float, is_hit: bool = False) -> Reply:
    """What is said once the codes are fewer; made once for all who get there."""
    is_done = is_hit or after.left == 0
    return Reply(
        text=text,
        reward=reward,
        is_done=is_done,
        state=key(after),
        score=float(is_hit) if is_done else 1 / after.codes.bit_count(),
        metrics={"malformed": float(text == MALFORMED)},
    )


@cache
def codes(letters: int, places: int) -> tuple[str, ...]:
    """Every code, in the order of the alphabet."""
    return tuple(map("".join, product(string.ascii_lowercase[:letters], repeat=places)))


@cache
def marks(secret: str, guess: str) -> tuple[int, int]:
    """Letters in their place, and right letters elsewhere.

    >>> marks("aab", "aba")
    (1, 2)
    """
    blacks = sum(map(str.__eq__, secret, guess))
    return blacks, (Counter(secret) & Counter(guess)).total() - blacks


@cache
def alike(letters: int, places: int, guess: str) -> dict[tuple[int, int], int]:
    """The codes, a bit each, that answer a guess with the same marks."""
    out: Counter[tuple[int, int]] = Counter()
    for at, code in enumerate(codes(letters, places)):
        out[marks(code, guess)] += 1 << at
    return dict(out)


def key(state: Knowledge) -> str:
    best = f"/{state.blacks}" if state.blacks else ""
    return f"{state.codes:x}/{state.left}{best}"
