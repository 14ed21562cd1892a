"""Python functions as tools: what a call is, what it gives, and what an error says."""

from __future__ import annotations

import pytest

from counterpoise.environments.tools import BUILT_IN, Tools, calculator, call_of, result_of
from counterpoise.tasks import task


@pytest.mark.parametrize(
    ("expression", "value"), [("2+3*4", 14), ("(2+3)*4", 20), ("-7 // 2", -4), ("7 % 4 / 2", 1.5)]
)
def test_the_calculator_calculates(expression, value):
    assert float(calculator(expression)) == value


@pytest.mark.parametrize(
    "expression", ["__import__('os')", "9 ** 9 ** 9", "a", "True + 1", "'a' * 9", "1 if 1 else 2"]
)
def test_the_calculator_runs_no_code(expression):
    with pytest.raises(ValueError, match="expected numbers and"):
        calculator(expression)


@pytest.mark.parametrize(
    ("text", "is_call"),
    [
        ('calculator("1+1")', True),
        ('Let me see.\n calculator("1+1") \n', True),
        ('calculator("1+1") is what I need', False),
        ('calculator("1+1")\nSo it is 2.', False),
        ('other("1+1")', False),
        ("So the answer is 2.", False),
        ("", False),
        ("(" * 500, False),
    ],
)
def test_a_call_is_the_last_line_alone(text, is_call):
    assert (call_of(text, BUILT_IN) is not None) == is_call


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ('calculator("1/0")', "error: division by zero"),
        ('calculator("1 +")', "error: invalid syntax"),
        ("calculator()", "error: missing a required argument: 'expression'"),
        ("calculator(open('x'))", "error: malformed node"),
    ],
)
def test_what_goes_wrong_is_text(call, line):
    text, is_error = result_of(call_of(call, BUILT_IN), BUILT_IN)
    assert is_error and text.startswith(line) and "\n" not in text


def test_a_conversation_with_a_tool():
    environment = task("tools", task="arithmetic", tools=["calculator"], cost=0.1)
    prompt = next(environment.prompts("test", seed=0))
    assert prompt.meta["question"] in prompt.text
    assert "calculator(expression: str) -> str: The value of" in prompt.text
    episode = environment.start(prompt, 0)
    sum_ = prompt.meta["question"].removeprefix("What is ").removesuffix("?")
    called = episode.step(f'calculator("{sum_}")')
    assert called[:3] == (prompt.answer, -0.1, False) and called.metrics["tool_calls"] == 1
    answered = episode.step(f"So the answer is {called.text}.")
    assert answered.reward == 1 and answered.is_done


def nothing_said(x: int) -> int:
    return x


def untyped(x):
    """Says something."""
    return x


@pytest.mark.parametrize("tool", [nothing_said, untyped, "math:sqrt"])
def test_a_tool_has_types_and_a_docstring(tool):
    with pytest.raises(ValueError, match="is no tool. Expected a function with type hints"):
        Tools("arithmetic", [tool])


def test_a_tool_task_has_a_grader():
    with pytest.raises(ValueError, match="tools: task 'guess' is an environment"):
        Tools("guess", ["calculator"])
