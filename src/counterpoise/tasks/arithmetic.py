"""Built-in task: signed sums of small numbers, worked out in words with a running total.

A question is ``What is 7 - 3 + 12?``; a worked answer opens with a sentence, works off one term a
step with the running total before and after it in one of several phrasings, and closes with ``So
the answer is 16.`` Only the closing sentence is graded. Numbers decide the reward; the words around
them are shared between the answers to one question."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
from collections.abc import Iterator
from itertools import count

from counterpoise.types import Prompt

SPLITS = ("train", "test")
TEST_FRAC = 0.1
MAX_DRAWS = 2_000
MAX_TERMS = 1_000

# name -> terms, largest number, largest running total
DIFFICULTIES = {"easy": (4, 12, 30), "medium": (6, 12, 30), "hard": (8, 20, 99)}

OPENINGS = (
    "Let us work it out step by step.",
    "We go through the terms one by one.",
    "I will keep a running total.",
)
STARTS = ("Start with {}.", "Begin at {}.", "The first term is {}.")
CONNECTIVES = ("Then", "Next", "Now", "After that")
PLUS = ("plus", "and")
MINUS = ("minus", "less")
RESULTS = ("makes", "gives", "is")
CLOSING = "So the answer is {}."

_CLOSING = re.compile(r"So the answer is (-?\d+)\.\s*\Z")


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Signed sums, e.g. ``What is 7 - 3 + 12 - 8 + 2 + 5?``.

    Args:
        difficulty: ``easy`` (4 terms up to 12), ``medium`` (6 terms up to 12: 35 million problems)
            or ``hard`` (8 terms up to 20).
        terms, max_number, max_total: override what the difficulty sets; running totals stay between
            0 and ``max_total``.

    A problem belongs to ``test`` if a hash of its text says so (one in ten), so no seed and no
    difficulty can mix the splits.

    >>> task = Arithmetic()
    >>> prompt = next(task.prompts("test", seed=0))
    >>> task.reward(prompt, f"... So the answer is {prompt.answer}.")
    1.0
    """

    is_trusted = True

    difficulty: str = "medium"
    terms: int | None = None
    max_number: int | None = None
    max_total: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.difficulty, str) or self.difficulty not in DIFFICULTIES:
            raise ValueError(
                f"arithmetic: unknown difficulty {self.difficulty!r}. Known:"
                f" {', '.join(DIFFICULTIES)}."
            )
        for name, default in zip(
            ("terms", "max_number", "max_total"), DIFFICULTIES[self.difficulty]
        ):
            value = getattr(self, name) if getattr(self, name) is not None else default
            object.__setattr__(self, name, value)
            if not isinstance(value, int) or value < 2:
                raise ValueError(
                    f"arithmetic: {name} must be a whole number of at least 2, got {value!r}."
                )
            if name == "terms" and value > MAX_TERMS:
                raise ValueError(f"arithmetic: terms must be at most {MAX_TERMS}, got {value}.")

    def prompts(self, split: str, seed: int, start: int = 0) -> Iterator[Prompt]:
        """The endless stream of a split from position ``start``; item k depends on (split, seed, k)
        and the difficulty alone.
        """
        if split not in SPLITS:
            raise ValueError(f"arithmetic: unknown split {split!r}. Known: {', '.join(SPLITS)}.")
        return (self._prompt(split, seed, position) for position in count(start))

    def reward(self, prompt: Prompt, text: str) -> float:
        """1.0 if the text ends with the closing sentence and the right number, else 0.0."""
        closing = _CLOSING.search(text)
        return float(closing is not None and closing[1] == prompt.answer)

    def _prompt(self, split: str, seed: int, position: int) -> Prompt:
        rng = random.Random(
            f"arithmetic/{split}/{seed}/{position}/{self.terms}/{self.max_number}/{self.max_total}"
        )
        for _ in range(MAX_DRAWS):
            numbers = self._numbers(rng)
            problem = expression(numbers)
            if split_of(problem) == split:
                return Prompt(
                    problem, f"What is {problem}?", str(sum(numbers)), {"numbers": numbers}
                )
        raise self._nothing(f"no {split} problem")

    def _numbers(self, rng: random.Random) -> tuple[int, ...]:
        assert self.terms is not None
        assert self.max_number is not None
        assert self.max_total is not None
        total = rng.randint(1, min(self.max_number, self.max_total))
        numbers = [total]
        for _ in range(MAX_DRAWS * self.terms):
            number = rng.randint(1, self.max_number) * rng.choice((1, -1))
            if 0 <= total + number <= self.max_total:
                numbers.append(number)
                total += number
            if len(numbers) == self.terms:
                return tuple(numbers)
        raise self._nothing("no sum whose running total stays below max_total")

    def _nothing(self, what: str) -> ValueError:
        return ValueError(
            f"arithmetic: {what} in {MAX_DRAWS} draws with terms {self.terms}, max_number"
            f" {self.max_number}, max_total {self.max_total}. Choose a max_number nearer to"
            " max_total, or more terms."
        )


def expression(numbers: tuple[int, ...]) -> str:
    """The sum as text.

    >>> expression((7, -3, 12))
    '7 - 3 + 12'
    """
    return str(numbers[0]) + "".join(
        f" {'-' if number < 0 else '+'} {abs(number)}" for number in numbers[1:]
    )


def split_of(problem: str) -> str:
    """``train`` or ``test``, by a hash of the problem's text."""
    digest = hashlib.sha256(problem.encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") < TEST_FRAC * 2**64 else "train"


def demonstration(prompt: Prompt, rng: random.Random) -> str:
    """A correct worked answer in phrasings drawn from ``rng``.

    >>> demonstration(Prompt("", "What is 7 - 3?", "4", {"numbers": (7, -3)}), random.Random(1))
    'Let us work it out step by step. The first term is 7. Then 7 less 3 makes 4. So the answer is
    4.'"""
    first, *rest = prompt.meta["numbers"]
    parts, total = [rng.choice(OPENINGS), rng.choice(STARTS).format(first)], first
    for number in rest:
        words = (
            rng.choice(CONNECTIVES),
            rng.choice(PLUS if number > 0 else MINUS),
            rng.choice(RESULTS),
        )
        parts.append(f"{words[0]} {total} {words[1]} {abs(number)} {words[2]} {total + number}.")
        total += number
    return " ".join([*parts, CLOSING.format(prompt.answer)])
