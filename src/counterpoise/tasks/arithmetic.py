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
from itertools import accumulate, count
from operator import itemgetter

from counterpoise.errors import nearest
from counterpoise.tasks import any_order
from counterpoise.tasks.phrases import (
    ATOM,
    CLOSING,
    CLOSING_WORDS,
    CONNECTIVES,
    MINUS,
    OPENINGS,
    PLUS,
    RESULTS,
    STARTS,
    is_number,
)
from counterpoise.text import shared_length
from counterpoise.types import Prompt

SPLITS = ("train", "test")
TEST_FRAC = 0.1
MAX_DRAWS = 2_000
MAX_TERMS = 1_000

# name -> terms, largest number, largest running total
DIFFICULTIES = {"easy": (4, 12, 30), "medium": (6, 12, 30), "hard": (8, 20, 99)}

# how worked answers look
STYLES = ("ordered", "free", "fixed")

_CLOSING = re.compile(r"So the answer is (-?\d+)\.\s*\Z")


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Signed sums, e.g. ``What is 7 - 3 + 12 - 8 + 2 + 5?``.

    Args:
        difficulty: ``easy`` (4 terms up to 12), ``medium`` (6 terms up to 12: 35 million problems)
            or ``hard`` (8 terms up to 20).
        terms, max_number, max_total: override what the difficulty sets; running totals stay between
            0 and ``max_total``.
        style: how worked answers look, which ``demonstration`` and ``first_error`` know and the
            grader does not ask: ``ordered`` takes one term per step in varied words, ``fixed`` in
            the same words every time, ``free`` (see ``any_order``) the terms in any order, several
            per step, once or twice. The problems are the same.
        grade_steps: an answer with a wrong step earns nothing, also where its closing is right by
            luck. A model that cannot do a sum is right by luck in a few percent of its answers.

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
    style: str = "ordered"
    grade_steps: bool = False

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ValueError(
                f"arithmetic: unknown style {self.style!r}. {nearest(str(self.style), STYLES)}"
            )
        if not isinstance(self.difficulty, str) or self.difficulty not in DIFFICULTIES:
            raise ValueError(
                f"arithmetic: unknown difficulty {self.difficulty!r}. Known:"
                f" {', '.join(DIFFICULTIES)}."
            )
        if not isinstance(self.grade_steps, bool):
            raise ValueError(
                f"arithmetic: grade_steps must be true or false, got {self.grade_steps!r}."
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
        """1.0 if the text ends with the closing sentence and the right number, else 0.0; with
        ``grade_steps`` all before it has to be right too.
        """
        if not is_right(prompt, text):
            return 0.0
        return float(not self.grade_steps or self.first_error(prompt, text) is None)

    def first_error(self, prompt: Prompt, text: str) -> int | None:
        """The offset of the first character that no right answer has there.

        Numbers, operators and the closing words are read in order and held against the true chain;
        the words around them are free. A digit too many, too few or wrong is an error at that
        character, so the right first digit of a wrong number is not. An error stays the first one
        even if all that follows is consistent with it, and also where the result is right by luck.
        ``len(text)``: right so far, and then it ends. None for answers without an error, and for
        texts without a number, an operator or a closing.

        >>> prompt = Prompt("", "What is 7 + 8?", "15")
        >>> text = "Start with 7. Then 7 plus 8 makes 14. So the answer is 14."
        >>> text[Arithmetic().first_error(prompt, text) :]
        '4. So the answer is 14.'
        """
        free = self.style == "free"
        chain = any_order.free_chain(terms_of(prompt)) if free else _ordered_chain(prompt)
        atoms, expected = list(ATOM.finditer(text)), next(chain)
        for atom in atoms:
            if atom[0] not in expected:
                return _departure(text, atom, expected)
            try:
                expected = chain.send(atom[0])
            except StopIteration:
                return None if is_right(prompt, text) else _end_of_answer(text, atom)
        return len(text) if atoms else None

    def answer_start(self, prompt: Prompt, text: str) -> int | None:
        """Where the number of the closing sentence begins, right or wrong; None without one."""
        closing = _CLOSING.search(text)
        return closing.start(1) if closing else None

    def demonstration(self, prompt: Prompt, rng: random.Random) -> str:
        """A right worked answer in the task's style."""
        if self.style == "free":
            assert self.max_total is not None
            return any_order.demonstration(terms_of(prompt), rng, self.max_total)
        return demonstration(prompt, rng if self.style == "ordered" else None)

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


def is_right(prompt: Prompt, text: str) -> bool:
    """Whether the text ends with the closing sentence and the right number."""
    closing = _CLOSING.search(text)
    return closing is not None and closing[1] == prompt.answer


def terms_of(prompt: Prompt) -> list[int]:
    """The signed terms of a problem.

    >>> terms_of(Prompt("", "What is 7 - 3?", "4"))
    [7, -3]
    """
    return [int(n.replace(" ", "")) for n in re.findall(r"[+-]? ?\d+", prompt.text)]


def chain_of(prompt: Prompt) -> list[tuple[str, ...]]:
    """What a worked answer says in order, each with all the ways to say it.

    >>> chain_of(Prompt("", "What is 7 - 3?", "4"))[:4]
    [('7',), ('7',), ('minus', 'less'), ('3',)]
    """
    numbers = terms_of(prompt)
    totals = list(accumulate(numbers))
    out: list[tuple[str, ...]] = [(str(numbers[0]),)]
    for before, number, after in zip(totals, numbers[1:], totals[1:]):
        words = PLUS if number > 0 else MINUS
        out += [(str(before),), words, (str(abs(number)),), (str(after),)]
    return [*out, (CLOSING_WORDS,), (str(totals[-1]),)]


def _ordered_chain(prompt: Prompt) -> any_order.Chain:
    for expected in chain_of(prompt):  # noqa: UP028 - a list cannot be sent what was said
        yield expected


def _departure(text: str, atom: re.Match[str], expected: tuple[str, ...]) -> int:
    """Where a wrong number, operator or closing sentence begins to be wrong."""
    numbers = [one for one in expected if is_number(one)]
    if is_number(atom[0]) and numbers:
        return atom.start() + max(shared_length(atom[0], number) for number in numbers)
    is_word_missing = is_number(atom[0]) and expected[0] == CLOSING_WORDS
    # a further step where the answer should close: its first word is wrong already
    return text.rfind(". ", 0, atom.start()) + 2 if is_word_missing else atom.start()


def _end_of_answer(text: str, last: re.Match[str]) -> int:
    """Where a text goes on behind the right result, or ends without its full stop."""
    rest = text[last.end() :]
    spaces = len(rest[1:]) - len(rest[1:].lstrip())
    return last.end() + (1 + spaces if rest.startswith(".") else 0)


def demonstration(prompt: Prompt, rng: random.Random | None) -> str:
    """A right worked answer in phrasings drawn from ``rng``; None takes the first of each.

    >>> demonstration(Prompt("", "What is 7 - 3?", "4", {"numbers": (7, -3)}), random.Random(1))
    'Let us work it out step by step. The first term is 7. Then 7 less 3 makes 4. So the answer is
    4.'"""
    first, *rest = prompt.meta["numbers"]
    pick = rng.choice if rng else itemgetter(0)
    parts, total = [pick(OPENINGS), pick(STARTS).format(first)], first
    for number in rest:
        words = pick(CONNECTIVES), pick(PLUS if number > 0 else MINUS), pick(RESULTS)
        parts.append(f"{words[0]} {total} {words[1]} {abs(number)} {words[2]} {total + number}.")
        total += number
    return " ".join([*parts, CLOSING.format(prompt.answer)])
