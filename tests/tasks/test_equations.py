"""The first false equation of a worked answer."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from counterpoise.tasks.equations import false_equation, left_value


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("3*4=13", "3"),
        ("2 x 3 = 7", "7"),
        ("2 x 3 = 17 km", "17 km"),
        (r"\( 9 \times 2 = 19 \)", r"9 \)"),
        (r"\[ 8 \div 2 = 5 \]", r"5 \]"),
        ("(3 * 4 = 13)", "3)"),
        ("2 * (3 + 4 = 8) = 16", "8) = 16"),
        ("1,200 + 300 = 1,400", "400"),
        ("x = 3 + 4 = 8", "8"),
        ("7/2 = 3", ""),  # an exact half is not rounded
        ("He has 5. 3*4 = 11", "1"),
        ("10 - 12 = 2", "2"),
        ("12 - 10 = -2", "-2"),
        ("3 + 4 = 7.5", ".5"),
        ("30 + 90 = 12", ""),  # too short: what follows it is wrong
        ("10 / 3 = 4", "4"),
        ("3 × $4 = $11", "1"),
        ("3 – 1 = 4", "4"),
        ("1. 3 + 3 = 7", "7"),
        ("- 3 + 3 = 7", "7"),
        ("\n\n3 + 3 = 7\n", "7\n"),
        ("Right: 2 + 2 = 4. Wrong: 2 + 2 = 5. Wrong too: 1 + 1 = 3", "5. Wrong too: 1 + 1 = 3"),
    ],
)
def test_a_false_equation_is_found_at_its_first_wrong_character(text: str, rest: str) -> None:
    offset = false_equation(text)
    assert offset is not None and text[offset:] == rest


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3*4=12",
        "100 / 3 = 33 and 100 / 3 = 33.3 and 2/3 = 0.66",
        "1,200 + 300 = 1,500",
        "$2.50 x 4 = $10",
        "10 - 12 = -2",
        "10/2 = 5 = 5",
        # not certain what is meant
        "20% * 50 = 11",
        "3 apples * 2 = 7",
        "2x + 3 = 7",
        "2**3 = 9",
        "2^3 = 9",
        "25 / 1/3 = 75",
        "1/0 = 3",
        "-3 + 5 = 7",
        # the number on the right goes on
        "5 + 3 = 2 * 4",
        "5 - 3 = 3 - 1",
        "2 - 1/2 = 1 1/2",
        "17/3 = 5 and 2/3",
        "100/5 = 5A/5",
        "$1 / 2 = 50 cents",
        "3 + 4 = 8:30",
        "(" * 5000 + "1 + 1" + ")" * 5000 + " = 3",
        "1 + " * 5000 + "1 = 3",
        "9" * 5000 + " + 1 = 3",
        "1 + 1 =" + " " * 100_000,
    ],
)
def test_what_holds_or_cannot_be_read_is_passed_over(text: str) -> None:
    assert false_equation(text) is None


@given(
    st.lists(st.integers(0, 999), min_size=2, max_size=5),
    st.lists(st.sampled_from("+-*/"), min_size=4, max_size=4),
    st.integers(0, 10**4),
)
def test_agrees_with_python_on_any_expression(
    numbers: list[int], signs: list[str], claimed: int
) -> None:
    assume("//" not in "".join(signs))  # a / b / c is not certain
    expression = str(numbers[0]) + "".join(f" {s} {n}" for s, n in zip(signs, numbers[1:]))
    exact = "".join(part if part in "+-*/" else f"Fraction({part})" for part in expression.split())
    try:
        true = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        true = None
    assert left_value(f"So {expression} ") == true
    wrong = true is not None and abs(true - claimed) >= Fraction(1, 2)
    offset = false_equation(f"So {expression} = {claimed}")
    assert (offset is not None) == wrong


@given(st.text(alphabet="0123456789+-*/=() x$,.%\n\\", max_size=80))
def test_any_text_is_read_without_an_error(text: str) -> None:
    offset = false_equation(text)
    assert offset is None or 0 <= offset <= len(text)
