"""The task ``code``: files, splits, prompts, rewards, feedback, and what is refused."""

from __future__ import annotations

import json
import warnings
from itertools import islice

import pytest

from counterpoise.errors import ConfigError
from counterpoise.tasks import Reward, grade, task
from counterpoise.tasks import code as code_module
from counterpoise.tasks.code import last_block, score
from counterpoise.trainer.checks import check_grader
from counterpoise.trainer.config import parse_config
from counterpoise.trainer.loop import train
from counterpoise.types import Prompt
from helpers.sandboxes import NEEDS_BUBBLEWRAP

pytestmark = NEEDS_BUBBLEWRAP

ROWS = [
    {
        "text": f"Write a function add_{k} that adds {k}.",
        "task_id": k,
        "code": f"def add_{k}(x):\r\n    return x + {k}",
        "test_list": [f"assert add_{k}({x}) == {x + k}" for x in range(3)],
        "test_setup_code": "",
        "part": "train" if k % 2 else "test",
    }
    for k in range(1, 9)
]


def write(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def path(tmp_path):
    return write(tmp_path, ROWS)


def ids(one, split):
    return sorted(
        int(p.id) for p in islice(one.prompts(split, seed=0), 8 if split == "test" else 5)
    )


def test_ranges_fields_and_shares_split_the_rows(path):
    ranges = task("code", path=path, train="4-8", test="1-2")
    assert (ids(ranges, "train"), ids(ranges, "test")) == ([4, 5, 6, 7, 8], [1, 2])
    fields = task("code", path=path, split="part")
    assert ids(fields, "test") == [2, 4, 6, 8]
    assert {int(p.id) % 2 for p in islice(fields.prompts("train", seed=0), 8)} == {1}
    shares = task("code", path=path, test_frac=0.5)
    train = {int(p.id) for p in islice(shares.prompts("train", seed=0), 50)}
    assert train | set(ids(shares, "test")) == set(range(1, 9))
    assert not train & set(ids(shares, "test"))


def test_style_of_the_programs_in_a_file_is_not_remarked_on(tmp_path, recwarn):
    row = {**ROWS[0], "code": "def add_1(x):\n    return len('\\w')"}
    row["test_list"] = ["assert add_1('\\d') == 2"]
    warnings.simplefilter("always")
    assert next(task("code", path=write(tmp_path, [row]), test_frac=0.0).prompts("train", 0)).id
    assert [one for one in recwarn if "escape" in str(one.message)] == []


def test_a_grader_that_cannot_wait_for_the_tests_is_refused_before_a_model_loads(path):
    recipe = {"task": {"name": "code", "path": path, "time_limit_s": 3}, "model": "no/such-model"}
    with pytest.raises(ConfigError, match=r"grader_time_limit_s is 4, and the task may take 5 s"):
        train(parse_config({**recipe, "grader_time_limit_s": 4}))
    check_grader(task(**recipe["task"]), parse_config({**recipe, "grader_time_limit_s": 5}))


def test_a_stream_starts_where_it_is_told(path):
    one = task("code", path=path, split="part")
    whole = list(islice(one.prompts("train", seed=3), 12))
    for start in (1, 4, 7):
        assert list(islice(one.prompts("train", 3, start=start), 12 - start)) == whole[start:]


@pytest.mark.parametrize("shown", [1, 2, 3])
def test_shown_tests_are_in_the_prompt_and_hidden_ones_are_not(path, shown):
    prompt = next(iter(task("code", path=path, shown=shown).prompts("train", seed=0)))
    row = next(row for row in ROWS if row["task_id"] == int(prompt.id))
    assert [test in prompt.text for test in row["test_list"]] == [k < shown for k in range(3)]
    assert row["text"] in prompt.text


def test_braces_in_a_row_stay(tmp_path):
    row = {**ROWS[0], "text": "Give {tests} and {prompt}."}
    prompt = next(iter(task("code", path=write(tmp_path, [row]), test_frac=0).prompts("train", 0)))
    assert prompt.text.startswith("Give {tests} and {prompt}.\nYour code should pass these tests:")


ANSWERS = {
    "right": ("```python\ndef add_1(x):\n    return x + 1\n```", 1.0, 1.0),
    "no fence": ("def add_1(x):\n    return x + 1", 1.0, 1.0),
    "two of three": ("def add_1(x):\n    return x + 1 if x else 0", 2 / 3, 0.0),
    "the last counts": ("```python\n1/0\n```\n```\ndef add_1(x): return x + 1\n```", 1.0, 1.0),
    "empty": ("", 0.0, 0.0),
    "prose": ("I do not know.", 0.0, 0.0),
    "no end": ("```python\ndef add_1(x):\n    return x + 1\n", 1.0, 1.0),
    "too long": ("#" * 200_000 + "\ndef add_1(x): return x + 1", 0.0, 0.0),
    "hostile": ("import os\nos._exit(0)", 0.0, 0.0),
    "nul": ("def add_1(x):\0", 0.0, 0.0),
}


def test_rewards_and_feedback_come_through_the_graders(path):
    prompt = Prompt("1", "")
    pairs = [(prompt, text) for text, _, _ in ANSWERS.values()]
    for how, column in (("share", 1), ("all", 2)):
        grades = grade(task("code", path=path, score=how), pairs, time_limit_s=60, num_workers=2)
        assert grades.reward == pytest.approx([row[column] for row in ANSWERS.values()])
        assert grades.num_faults == 0
        said = dict(zip(ANSWERS, grades.feedback))
        assert said["two of three"] == "assert add_1(0) == 1: got 0, expected 1"
        assert said["right"] == ""
        assert said["prose"].startswith("SyntaxError")
        assert said["hostile"] == "the program ended"
        assert "200027 characters" in said["too long"]


def test_feedback_names_each_error_once():
    one = score(["a", "a", None, "b"], "share")
    assert (one, one.feedback) == (0.25, "a\nb")
    assert score([None, None], "all") == 1.0


def test_blocks():
    assert last_block("a\n```\nx\n```") == "x\n"
    assert last_block("```python\nx\n```\n```bash\nls\n```") == "x\n"
    assert last_block("x = '```'") == "x = '```'"
    assert last_block("1.\n   ```py\n   x = 1\n   ```\n") == "x = 1\n"


def test_a_reward_is_a_number_with_a_text():
    assert Reward(0.5) + 1 == 1.5
    assert Reward(0.5).feedback == ""


WRONG = {
    "no such field 'prompt'": (
        {},
        {"prompt": "promt"},
        r"line 1 has no field 'promt' \(task.prompt\)",
    ),
    "no tests": ({"test_list": []}, {}, "must be a list of tests, Python code each, got '\\[\\]'"),
    "tests are a text": ({"test_list": "assert 1"}, {}, "must be a list of tests"),
    "a test is no Python": ({"test_list": ["assert ("]}, {}, "line 1: a test is no Python"),
    "setup": ({}, {"setup": "test_setup"}, r"has no field 'test_setup' \(task.setup\). Did you"),
    "score": ({}, {"score": "al"}, "score must be one of share, all, got 'al'. Did you mean 'all'"),
    "sandbox": ({}, {"sandbox": "docker"}, "sandbox must be one of bubblewrap, none"),
    "range": ({}, {"train": "1 to 4", "test": "5-6"}, "task.train must be a range of numbers like"),
    "one range": ({}, {"train": "1-4"}, "give both task.train and task.test"),
    "overlap": ({}, {"train": "1-4", "test": "1-2"}, "line 1 is in task.train and in task.test"),
    "instruction": ({}, {"instruction": "{prompt}"}, "instruction must contain {tests}"),
    "slow": ({"code": "while True: pass"}, {"time_limit_s": 0.2}, "reference solutions fail"),
    "big": ({"code": "x = bytearray(1 << 30)"}, {}, "MemoryError.*raise task.time_limit_s or"),
    "twice": ({"task_id": 2}, {}, "two rows have the same 'task_id'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_one_line(tmp_path, name):
    fields, settings, message = WRONG[name]
    rows = [{**row, **fields} if name in ("slow", "big") else row for row in ROWS]
    path = write(tmp_path, [{**ROWS[0], **fields}, *rows[1:]])
    with pytest.raises(ValueError, match=message) as caught:
        task("code", path=path, **settings)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_tasks(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        task("code", path=str(tmp_path / "none.jsonl"))
    (tmp_path / "a").write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        task("code", path=str(tmp_path / "a"))
    (tmp_path / "a").write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1 is a list"):
        task("code", path=str(tmp_path / "a"))


def test_a_machine_without_a_sandbox_is_refused_and_none_is_warned_about(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(ValueError, match="bubblewrap is not installed"):
            task("code", path=path)
    with pytest.warns(UserWarning, match="programs that the model writes run as you"):
        one = task("code", path=path, sandbox="none")
    assert one.reward(Prompt("1", ""), ANSWERS["right"][0]) == 1.0
    code_module._sandbox.cache_clear()
