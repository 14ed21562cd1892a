"""Where the final answer of a text begins, as tasks say it."""

from __future__ import annotations

import json

import pytest

from counterpoise.tasks import WithReward, answer_start, task
from counterpoise.tasks.gym import Gym
from counterpoise.types import Prompt

PROMPT = Prompt("", "What is 7 - 3?", "4")


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("Start with 7. Then 7 less 3 makes 4. So the answer is 4.", "4."),
        ("So the answer is 3. So the answer is -12.\n", "-12.\n"),
        ("So the answer is 4", None),
        ("So the answer is 4. Or not.", None),
        ("", None),
    ],
)
def test_arithmetic(text, rest):
    sums = task("arithmetic")
    assert_rest(sums, text, rest)
    assert_rest(task("arithmetic", reward=lambda prompt, text: 0.0), text, rest)


def assert_rest(graded, text, rest):
    start = answer_start(graded, PROMPT, text)
    assert (None if start is None else text[start:]) == rest


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        (r"So $2 + 2 = 4$, \boxed{4}. Not \boxed{ 5 }.", "5 }."),
        (r"The answer is \boxed{\frac{1}{2}}.", r"\frac{1}{2}}."),
        ("He has 3 left. The answer is: $12 dollars, of 40.", "12 dollars, of 40."),
        ("3 + 4 = 7\n#### 7", "7"),
        ("The answer is 3. No, the Answer: x+1", "x+1"),
        ("First 12, then 3,450.", "3,450."),
        ("It falls to -3 degrees.", "-3 degrees."),
        ("A half, 1/2 of it", "1/2 of it"),
        ("The answer is ", None),
        ("I do not know.", None),
    ],
)
def test_jsonl(tmp_path, text, rest):
    pytest.importorskip("math_verify")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "q?", "answer": "1"}) + "\n")
    rows = task("jsonl", path=str(tmp_path / "rows.jsonl"), test_frac=0.0)
    assert_rest(rows, text, rest)


def test_gym():
    pytest.importorskip("reasoning_gym")
    chain = Gym("chain_sum", num_items=50)
    assert_rest(chain, "<answer>3</answer>, no: <answer>4</answer>", "4</answer>")
    assert_rest(chain, "It is 4.", None)


class Plain:
    is_trusted = True

    def prompts(self, split, seed, start=0):
        yield PROMPT

    def reward(self, prompt, text):
        return 1.0


def test_tasks_that_do_not_tell_and_wrong_offsets():
    assert answer_start(Plain(), PROMPT, "4") is None
    assert getattr(WithReward(Plain(), lambda prompt, text: 0.0), "answer_start", None) is None
    told = Plain()
    told.answer_start = lambda prompt, text: 9  # pyright: ignore
    with pytest.raises(ValueError, match="task Plain: answer_start gave 9 for a text of 4"):
        answer_start(told, PROMPT, "text")
