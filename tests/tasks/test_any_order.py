"""The styles of the built-in task: ``free`` answers of many orders and lengths, and where one goes
wrong, held against all right answers of a small sum; ``fixed`` answers of one wording.
"""

from __future__ import annotations

import itertools
import random
import re
from itertools import accumulate, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoise.tasks import task
from counterpoise.tasks.any_order import an_order
from counterpoise.tasks.arithmetic import Arithmetic
from counterpoise.text import shared_length
from counterpoise.types import Prompt

FREE = Arithmetic(style="free")
NUMBERS = (7, -3, 12)
PROMPT = Prompt("", "What is 7 - 3 + 12?", "16", {"numbers": NUMBERS})
CLOSING = " So the answer is 16."


def drawn(seed: int) -> tuple[Prompt, str]:
    prompt = next(FREE.prompts("train", seed))
    return prompt, FREE.demonstration(prompt, random.Random(seed))


def chains() -> list[str]:
    """Every way to work out 7 - 3 + 12, in the same words except for the operators."""
    texts = []
    for first, second, third in itertools.permutations(NUMBERS):
        words = [("plus", "and") if n > 0 else ("minus", "less") for n in (second, third)]
        for one, two in itertools.product(*words):
            b, c, total = abs(second), abs(third), first + second
            start = f"Begin at {first}. Then {first} {one} {b}"
            texts += [f"{start} is {total}. Then {total} {two} {c} is 16."]
            texts += [f"{start} {two} {c} is 16."]
    return [text for text in texts if not text.startswith("Begin at -")]


ONCE = chains()
RIGHT = [text + CLOSING for text in ONCE] + [f"{a} {b}{CLOSING}" for a in ONCE for b in ONCE]


@given(st.integers(0, 10**6))
def test_demonstrations_are_right_in_every_style(seed: int):
    for style in ("ordered", "free", "fixed"):
        sums = Arithmetic(style=style)
        prompt = next(sums.prompts("train", seed))
        text = sums.demonstration(prompt, random.Random(seed))
        assert sums.reward(prompt, text) == 1.0
        assert sums.first_error(prompt, text) is None


def test_every_right_answer_of_a_small_sum_has_no_error():
    assert len(RIGHT) == len(set(RIGHT)) == 32 + 32**2
    assert all(FREE.first_error(PROMPT, text) is None for text in RIGHT)


@given(st.integers(0, len(RIGHT) - 1), st.integers(0, 100), st.integers(-9, 199))
def test_the_first_error_is_where_the_last_right_answer_departs(row: int, pick: int, new: int):
    """A number of a right answer is changed; brute force over all right answers."""
    numbers = list(re.finditer(r"-?\d+", RIGHT[row]))
    old = numbers[pick % len(numbers)]
    text = RIGHT[row][: old.start()] + str(new) + RIGHT[row][old.end() :]
    longest = max(shared_length(text, right) for right in RIGHT)
    assert FREE.first_error(PROMPT, text) == (None if text in RIGHT else longest)


@given(st.integers(0, 10**6), st.data())
def test_an_answer_that_is_cut_off_is_right_up_to_its_end(seed: int, data: st.DataObject):
    prompt, text = drawn(seed)
    first = re.search(r"\d", text)
    assert first
    cut = text[: data.draw(st.integers(first.end(), len(text) - 1))]
    assert FREE.first_error(prompt, cut) == len(cut)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        # a term left out, taken twice, with the wrong sign
        ("Begin at 7. Then 7 plus 12 is 19. So the answer is 19.", "So the"),
        ("Begin at 7. Then 7 plus 12 plus 12 is 31.", "plus 12 is"),
        ("Begin at 7. Then 7 plus 7", "7"),
        ("Begin at 7. Then 7 plus 12 and 3 is 22.", "and 3"),
        # a chain cannot begin at a term that is subtracted
        ("Begin at 3. Then 3", "3. Then"),
        # an error in the check counts, also where the closing is right
        (f"{ONCE[0]} Begin at 12. Then 12 less 3 is 8.{CLOSING}", "8."),
        (ONCE[0] + CLOSING + " So the answer is 4.", "So the answer is 4."),
    ],
)
def test_cases_by_hand(text: str, wrong: str):
    at = FREE.first_error(PROMPT, text)
    assert at is not None
    assert text[at:].startswith(wrong)


def test_right_answers_of_one_problem_differ_in_length_by_more_than_two():
    ratios = []
    for prompt in islice(FREE.prompts("train", 0), 40):
        lengths = [len(FREE.demonstration(prompt, random.Random(k)).split()) for k in range(8)]
        ratios.append(max(lengths) / min(lengths))
    assert sorted(ratios)[4] > 2  # in nine problems of ten, among eight answers


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_an_order_has_every_term_once_and_totals_in_bounds(seed: int, reach: int):
    numbers = next(FREE.prompts("train", seed)).meta["numbers"]
    order = an_order(numbers, random.Random(seed), 30, reach)
    assert sorted(order) == sorted(numbers)
    assert all(0 <= total <= 30 for total in accumulate(order))
    assert reach > 1 or order == list(numbers)


def test_styles_have_the_same_problems_and_the_same_grades():
    streams = [
        list(islice(Arithmetic(style=style).prompts("test", 3), 20))
        for style in ("ordered", "free", "fixed")
    ]
    assert streams[0] == streams[1] == streams[2]


def test_fixed_answers_have_one_wording():
    fixed = Arithmetic(style="fixed")
    assert {fixed.demonstration(PROMPT, random.Random(k)) for k in range(20)} == {
        "Let us work it out step by step. Start with 7. Then 7 minus 3 makes 4."
        " Then 4 plus 12 makes 16. So the answer is 16."
    }


def test_an_unknown_style_is_one_clear_line():
    with pytest.raises(ValueError, match="unknown style 'fre'. Did you mean 'free'"):
        task("arithmetic", style="fre")
    with pytest.raises(ValueError, match=r"unknown style \['free'\]"):
        task("arithmetic", style=["free"])


def test_graded_steps_leave_no_luck():
    lucky = RIGHT[0].replace("is 16.", "is 15.", 1)
    for style in ("free", "ordered"):
        sums = Arithmetic(style=style)
        strict = Arithmetic(style=style, grade_steps=True)
        assert (sums.reward(PROMPT, lucky), strict.reward(PROMPT, lucky)) == (1.0, 0.0)
        good = strict.demonstration(PROMPT, random.Random(0))
        assert strict.reward(PROMPT, good) == 1.0
        assert strict.reward(PROMPT, CLOSING) == 0.0  # no steps at all
    with pytest.raises(ValueError, match="grade_steps must be true or false, got 'yes'"):
        Arithmetic(grade_steps="yes")  # pyright: ignore
