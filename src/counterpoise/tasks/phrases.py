"""The words of worked answers to signed sums, and what in them counts: numbers, operators, the
closing.
"""

from __future__ import annotations

import re

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
CHECKS = ("Let us go through it.", "I will work it out.")  # before the sum is worked out once more
CLOSING = "So the answer is {}."
CLOSING_WORDS = CLOSING.partition(" {")[0]

# what a worked answer says: numbers, operators and the words before its result
ATOM = re.compile(rf"-?\d+|\b(?:{'|'.join((*PLUS, *MINUS))})\b|{CLOSING_WORDS}")


def is_number(atom: str) -> bool:
    """Whether an atom is a number, not a word.

    >>> is_number("-5"), is_number("minus")
    (True, False)
    """
    return atom.lstrip("-").isdigit()
