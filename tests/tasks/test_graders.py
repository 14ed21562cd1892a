"""Graders that hang, raise, die or answer nonsense: reward 0, counted, reported, and the next
rollout is graded as if nothing happened.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from multiprocessing import Pipe

import pytest

from counterpoise.tasks import Grades, grade, task, workers
from counterpoise.tasks.workers import POOL
from counterpoise.types import Prompt

# the text tells the grader what to do
USER_MODULE = """
import ctypes, os, signal, time
import torch

def reward(prompt, text):
    if text == "raise":
        raise RuntimeError("cannot read this")
    if text == "loop":
        while True:
            pass
    if text == "swallow":
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass
    if text == "stuck in C":
        ctypes.PyDLL(None).sleep(600)
    if text == "exit":
        os._exit(3)
    if text == "sys.exit":
        raise SystemExit(4)
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "string": "1.0", "int": 1,
            "bool": True, "tensor": torch.tensor(0.5), "pid": os.getpid(),
            }.get(text, float(text == prompt.answer))
"""


@pytest.fixture
def user_task(tmp_path, monkeypatch):
    (tmp_path / "user_rewards.py").write_text(textwrap.dedent(USER_MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    yield task("arithmetic", reward="user_rewards:reward")
    POOL.close()


def pairs(*texts: str) -> list[tuple[Prompt, str]]:
    return [(Prompt(f"p{number}", "?", "right"), text) for number, text in enumerate(texts)]


def test_good_graders_in_order_with_any_number_of_workers(user_task):
    texts = ["right", "wrong", "int", "bool", "tensor", "right"] * 4
    expected = Grades([1.0, 0.0, 1.0, 1.0, 0.5, 1.0] * 4, 0, 0, [])
    assert [grade(user_task, pairs(*texts), num_workers=count) for count in (1, 2, 3)] == [
        expected
    ] * 3
    assert grade(user_task, []) == Grades([], 0, 0, [])


def test_raising_and_non_finite_graders_fail_and_are_named(user_task):
    grades = grade(
        user_task, pairs("raise", "right", "nan", "inf", "none", "string"), num_workers=1
    )
    line = USER_MODULE[: USER_MODULE.index("raise Run")].count("\n") + 1
    assert re.fullmatch(rf".*cannot read this \(.*user_rewards\.py:{line}\)", grades.messages[0])
    grades.messages[0] = grades.messages[0].partition(" (")[0]
    assert grades == Grades(
        [0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
        5,
        0,
        [
            "prompt p0: the grader raised RuntimeError: cannot read this",
            "prompt p2: the grader returned 'nan', expected a finite number",
            "prompt p3: the grader returned 'inf', expected a finite number",
            "prompt p4: the grader returned 'None', expected a finite number",
            "prompt p5: the grader returned the text '1.0', expected a finite number",
        ],
    )


@pytest.mark.parametrize("how", ["loop", "swallow", "stuck in C"])
def test_a_hanging_grader_is_cut(user_task, how):
    grades = grade(user_task, pairs("right", how, "right"), time_limit_s=5.0, num_workers=1)
    assert grades == Grades([1.0, 0.0, 1.0], 0, 1, ["prompt p1: the grader took more than 5 s"])


def test_a_grader_that_ends_its_process_fails_alone(user_task):
    grades = grade(user_task, pairs("exit", "right", "sys.exit", "right"), num_workers=1)
    assert grades.reward == [0.0, 1.0, 0.0, 1.0]
    assert (grades.num_failed, grades.num_timed_out) == (2, 0)
    assert grades.messages == [
        f"prompt p{n}: the grader ended its process (exit code {code})"
        for n, code in ((0, 3), (2, 4))
    ]


def test_the_worker_is_another_process_and_is_kept(user_task):
    first, second = (grade(user_task, pairs("pid"), num_workers=1).reward[0] for _ in range(2))
    assert first == second != os.getpid()


def test_trusted_tasks_run_here_and_their_faults_are_counted_too():
    class Broken:
        is_trusted = True

        def reward(self, prompt, text):
            return os.getpid() if text == "pid" else 1 / 0

    grades = grade(Broken(), pairs("pid", "x"))
    assert re.search(r" \(.*test_graders\.py:\d+\)$", grades.messages[0])
    grades.messages[0] = grades.messages[0].partition(" (")[0]
    assert grades == Grades(
        [float(os.getpid()), 0.0],
        1,
        0,
        ["prompt p1: the grader raised ZeroDivisionError: division by zero"],
    )


def test_a_task_the_worker_cannot_load_is_one_error(user_task, tmp_path, monkeypatch):
    grade(user_task, pairs("right"))
    (tmp_path / "user_rewards.py").unlink()
    POOL.close()
    with pytest.raises(
        ValueError,
        match="cannot load the task: ModuleNotFoundError: No module named 'user_rewards'",
    ):
        grade(user_task, pairs("right"))


@pytest.mark.parametrize(
    "bad", [{"time_limit_s": 0}, {"time_limit_s": float("nan")}, {"num_workers": 0}]
)
def test_bad_settings(bad):
    with pytest.raises(ValueError, match="time_limit_s must be above 0 and num_workers at least 1"):
        grade(task("arithmetic"), [], **bad)


SCRIPT = """
import os, sys
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")

from counterpoise.tasks import grade
from counterpoise.types import Prompt

class Own:
    def reward(self, prompt, text):
        return float(os.getpid() != int(text))

class Note:
    pass

if __name__ == "__main__":
    if sys.argv[2] == "own":
        task = Own()
    else:
        from user_task import UserTask as task_class
        task = task_class()
    meta = {"note": Note()} if sys.argv[2] == "own meta" else {}
    pairs = [(Prompt("a", "", "4"), str(os.getpid())), (Prompt("b", "", "4"), "4")]
    print(grade(task, pairs, num_workers=2).reward)
    if meta:
        pairs = [(Prompt("a", "", "4", meta), "4"), (Prompt("b", "", "4", meta), "5")]
        print(grade(task, pairs, num_workers=2).reward)
"""


@pytest.mark.parametrize(("whose", "num_readers"), [("own", 3), ("imported", 1), ("own meta", 3)])
def test_workers_import_the_callers_script_only_for_what_is_defined_there(
    tmp_path, whose, num_readers
):
    (tmp_path / "user_task.py").write_text(
        "class UserTask:\n    def reward(self, prompt, text):\n        return float(text == '4')\n"
    )
    script, readers = tmp_path / "script.py", tmp_path / "readers.txt"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(readers), whose],
        capture_output=True,
        text=True,
        check=True,
    )
    expected = {
        "own": ["[1.0, 1.0]"],
        "imported": ["[0.0, 1.0]"],
        "own meta": ["[0.0, 1.0]", "[1.0, 0.0]"],
    }
    assert done.stdout.splitlines() == expected[whose]
    assert len(set(readers.read_text().split())) == num_readers


def test_a_worker_whose_caller_is_gone_leaves_without_a_word(monkeypatch):
    monkeypatch.setattr(workers.signal, "signal", lambda *a: None)
    ours, theirs = Pipe()
    ours.send((("asked",), 1.0))

    def gone(task, memory, asked):
        ours.close()
        return asked

    assert workers.work(theirs, gone) is None
