"""Where an answer of the built-in task first goes wrong."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoise.tasks import WithReward, first_error, task
from counterpoise.tasks.arithmetic import MINUS, PLUS, Arithmetic, demonstration
from counterpoise.types import Prompt

SUMS = Arithmetic()
PROMPT = Prompt("", "What is 7 + 8 - 12?", "3", {"numbers": (7, 8, -12)})
RIGHT = "Begin at 7. Then 7 plus 8 makes 15. Next 15 less 12 is 3. So the answer is 3."


def drawn(seed: int) -> tuple[Prompt, str]:
    prompt = next(SUMS.prompts("train", seed))
    return prompt, demonstration(prompt, random.Random(seed))


@given(st.integers(0, 10**6))
def test_right_answers_have_no_error(seed: int):
    prompt, text = drawn(seed)
    assert SUMS.first_error(prompt, text) is None


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 199))
def test_one_number_changed_is_the_error_at_its_first_other_digit(seed: int, pick: int, new: int):
    """In any place of the answer: the first character in which the two texts differ."""
    prompt, text = drawn(seed)
    numbers = list(re.finditer(r"\d+", text))
    old = numbers[pick % len(numbers)]
    changed = text[: old.start()] + str(new) + text[old.end() :]
    if str(new) != old[0]:
        first = next(k for k, (a, b) in enumerate(zip(text, changed)) if a != b)
        assert SUMS.first_error(prompt, changed) == first


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_wrong_operator_is_the_error(seed: int, pick: int):
    prompt, text = drawn(seed)
    words = list(re.finditer(r"\b(plus|and|minus|less)\b", text))
    old = words[pick % len(words)]
    other = MINUS if old[0] in PLUS else PLUS
    changed = text[: old.start()] + other[pick % 2] + text[old.end() :]
    assert SUMS.first_error(prompt, changed) == old.start()


@given(st.integers(0, 10**6), st.data())
def test_an_answer_that_is_cut_off_is_right_up_to_its_end(seed: int, data: st.DataObject):
    prompt, text = drawn(seed)
    first = re.search(r"\d", text)
    assert first
    cut = text[: data.draw(st.integers(first.end(), len(text) - 1))]
    assert SUMS.first_error(prompt, cut) == len(cut)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        # consistent after an error: the first one counts
        ("Begin at 7. Then 7 plus 8 makes 16. Next 16 less 12 is 4. So the answer is 4.", "6. N"),
        # a term skipped, in the middle and at the end
        ("Begin at 7. Then 7 less 12 is -5. So the answer is -5.", "less 12"),
        ("Begin at 7. Then 7 plus 8 makes 15. So the answer is 15.", "So the"),
        # a step too many, a result that is not that of the chain, words behind the result
        (RIGHT.replace(" So", " Now 3 plus 1 is 4. So"), "Now 3"),
        (RIGHT.replace("answer is 3", "answer is 13"), "13."),
        (RIGHT + " So the answer is 4.", "So the answer is 4"),
        (RIGHT[:-1] + " or 4.", " or 4"),
        # a running total that is not the one before
        ("Begin at 7. Then 7 plus 8 makes 15. Next 14 less 12 is 2. So the answer is 2.", "4 less"),
        # words are free
        ("Okay. Well, 7! Hmm 7 plus 8 makes 17.", "7."),
    ],
)
def test_cases_by_hand(text: str, wrong: str):
    at = SUMS.first_error(PROMPT, text)
    assert at is not None
    assert text[at:].startswith(wrong)


@pytest.mark.parametrize("text", ["", "I do not know.", "banana banana"])
def test_a_text_without_numbers_has_no_known_place(text: str):
    assert SUMS.first_error(PROMPT, text) is None


def test_a_reward_of_ones_own_keeps_the_tasks_place():
    text = RIGHT.replace("makes 15", "makes 14")
    graded = task("arithmetic", reward=lambda prompt, text: 0.0)
    assert first_error(graded, PROMPT, text) == text.index("4. Next")


class Plain:
    def prompts(self, split, seed, start=0):
        return iter(())

    def reward(self, prompt, text):
        return 0.0


def test_a_task_that_does_not_tell_has_none():
    assert first_error(Plain(), PROMPT, RIGHT) is None
    assert first_error(WithReward(Plain(), lambda prompt, text: 0.0), PROMPT, RIGHT) is None


@pytest.mark.parametrize("wrong", [99, -1, "3", True, 1.0])
def test_an_offset_outside_the_text_is_an_error(wrong: object):
    told = Plain()
    told.first_error = lambda prompt, text: wrong  # pyright: ignore
    with pytest.raises(ValueError, match=r"task Plain: first_error gave .* for a text of 4"):
        first_error(told, PROMPT, "text")
