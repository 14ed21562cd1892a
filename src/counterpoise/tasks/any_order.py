"""Worked answers that take the terms of a sum in any order, several per step, once or twice.

The style ``free`` of the built-in task: right answers to one question differ in the order of the
terms, in how many terms a step takes, in whether the sum is worked out again, and so in length by
a factor of three. A chain is a generator of what may be said next; it is sent what is said."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence

from counterpoise.tasks.phrases import (
    CHECKS,
    CLOSING,
    CLOSING_WORDS,
    CONNECTIVES,
    MINUS,
    OPENINGS,
    PLUS,
    RESULTS,
    STARTS,
)

Chain = Generator[tuple[str, ...], str, None]

STRIDES = (1, 1, 2, 3)  # most terms that a step takes, drawn per answer
REACHES = (1, 2)  # among how many of the terms that are left the next is chosen, drawn per chain
CHECK_FRAC = 0.4  # answers that work the sum out twice
OPENING_FRAC = 0.5
MAX_DRAWS = 20


def free_chain(numbers: Sequence[int]) -> Chain:
    """What a right answer may say next, whatever it has said so far.

    Every chain of steps begins at a positive term and takes each other term once; behind a
    complete one stands the closing, or another chain.

    >>> chain = free_chain((7, -3, 12))
    >>> next(chain), chain.send("12"), chain.send("12")
    (('7', '12'), ('12',), ('plus', 'and', 'minus', 'less'))
    """
    said = ""
    while said != CLOSING_WORDS:
        said = said or (yield _starts(numbers))
        total, left = int(said), list(numbers)
        left.remove(total)
        while left:
            yield (str(total),)
            said = yield _operators(left)
            while said in PLUS + MINUS:
                sign = 1 if said in PLUS else -1
                number = sign * int((yield tuple(str(abs(n)) for n in left if n * sign > 0)))
                left.remove(number)
                total += number
                said = yield (*_operators(left), str(total))
        said = yield (CLOSING_WORDS, *_starts(numbers))
    yield (str(sum(numbers)),)


def _starts(numbers: Sequence[int]) -> tuple[str, ...]:
    return tuple(str(number) for number in numbers if number > 0)


def _operators(left: Sequence[int]) -> tuple[str, ...]:
    plus, minus = (any(n * sign > 0 for n in left) for sign in (1, -1))
    return PLUS * plus + MINUS * minus


def demonstration(numbers: Sequence[int], rng: random.Random, max_total: int) -> str:
    """A right worked answer in an order, a stride, a length and phrasings drawn from ``rng``.

    >>> demonstration((7, -3, 12), random.Random(1), 30)
    'Let us work it out step by step. Begin at 7. Now 7 minus 3 and 12 is 16. Let us go through it.
    Start with 7. Next 7 less 3 gives 4. After that 4 plus 12 gives 16. So the answer is 16.'
    """
    parts = [rng.choice(OPENINGS)] if rng.random() < OPENING_FRAC else []
    stride = rng.choice(STRIDES)
    num_chains = 1 + (rng.random() < CHECK_FRAC)
    for number in range(num_chains):
        order = an_order(numbers, rng, max_total, rng.choice(REACHES))
        parts += [rng.choice(CHECKS)] * (number > 0) + _steps(order, stride, rng)
    return " ".join([*parts, CLOSING.format(sum(numbers))])


def an_order(numbers: Sequence[int], rng: random.Random, max_total: int, reach: int) -> list[int]:
    """The terms in an order in which each is one of the first ``reach`` that are left and running
    totals stay between 0 and ``max_total``; as they are where no draw gives one.

    >>> an_order((7, -3, 12), random.Random(0), 30, reach=2)
    [7, 12, -3]
    """
    for _ in range(MAX_DRAWS):
        left, order = list(numbers), []
        while left:
            order.append(left.pop(rng.randrange(min(reach, len(left)))))
            if not 0 <= sum(order) <= max_total or order[0] < 0:
                break
        else:
            return order
    return list(numbers)


def _steps(order: list[int], stride: int, rng: random.Random) -> list[str]:
    """Sentences that work off the terms in this order, up to ``stride`` of them each."""
    total, at = order[0], 1
    parts = [rng.choice(STARTS).format(total)]
    while at < len(order):
        terms = order[at : at + rng.randint(1, stride)]
        said = " ".join(f"{rng.choice(PLUS if n > 0 else MINUS)} {abs(n)}" for n in terms)
        result = total + sum(terms)
        parts.append(f"{rng.choice(CONNECTIVES)} {total} {said} {rng.choice(RESULTS)} {result}.")
        total, at = result, at + len(terms)
    return parts
