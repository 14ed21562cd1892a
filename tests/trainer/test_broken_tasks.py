"""Reward functions and tasks that are broken: said in the terminal and in the run folder, stopped
where nothing can be learnt, never waited for without end.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import yaml

from counterpoise.cli import dispatch
from counterpoise.report.warnings import flat_stretches
from counterpoise.run.read import open_run, read_jsonl
from counterpoise.tasks.workers import POOL

SMALL = {
    "model": "bundled",
    "num_batches": 4,
    "rollouts": {"prompts": 4, "group_size": 4, "max_new_tokens": 24},
    "optimizer": {"lr": 1e-4, "updates_per_batch": 2},
    "eval": {"every": 0},
    "ledger": {"every": 0},
    "checkpoint_every": 0,
    "trackers": ["tensorboard"],
}

USER_MODULE = """
import time
from itertools import count

from counterpoise.types import Prompt

def raises(prompt, text):
    raise RuntimeError("no \\x1b[31mcolour here")

def none(prompt, text):
    return None

def nan(prompt, text):
    return float("nan")

def words(prompt, text):
    return "good"

def signature(text):
    return 1.0

def hangs(prompt, text):
    time.sleep(600)

def sometimes(prompt, text):
    if len(text) % 3 == 0:
        raise RuntimeError("cannot read this")
    return float(len(text) % 2)

def zero(prompt, text):
    return 0.0

class Short:
    "A train stream of five prompts."
    is_trusted = True
    num = 5

    def prompts(self, split, seed, start=0):
        return (Prompt(f"{split}/{k}", f"What is {k} + 1?", str(k + 1))
                for k in range(start, self.num))

    def reward(self, prompt, text):
        return float(len(text) % 2)

class Empty(Short):
    num = 0

class Deaf(Short):
    "Ignores where to start."
    def prompts(self, split, seed, start=0):
        return super().prompts(split, seed)

class Strings(Short):
    def prompts(self, split, seed, start=0):
        return iter(["What is 1 + 1?"] * 9)

class Numbers(Short):
    def prompts(self, split, seed, start=0):
        return (Prompt(str(k), "What is 1 + 1?", 2) for k in range(start, 9))

class NoStart(Short):
    def prompts(self, split, seed):
        return super().prompts(split, seed)

class NoFile(Short):
    def prompts(self, split, seed, start=0):
        for line in open("nosuch.txt"):
            yield Prompt(line, line)

class Forgets(Short):
    def prompts(self, split, seed, start=0):
        super().prompts(split, seed, start)

class Fails(Short):
    def __init__(self):
        self.rows = {}["rows"]
"""
LINE = {
    text: USER_MODULE[: USER_MODULE.index(text)].count("\n") + 1
    for text in ("raise R", "open(", "rows = {")
}


@pytest.fixture
def train(tmp_path, monkeypatch, capfd):
    """``counterpoise train`` on a small recipe: exit code, what stderr says, the run folder."""
    (tmp_path / "broken_rewards.py").write_text(textwrap.dedent(USER_MODULE))
    monkeypatch.syspath_prepend(tmp_path)

    def run(*options: str, **changes) -> tuple[int, str, Path]:
        run_dir = tmp_path / "run"
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(yaml.safe_dump({**SMALL, "run_dir": str(run_dir), **changes}))
        with pytest.raises(SystemExit) as end:
            dispatch(["train", str(recipe), *options])
        return int(end.value.code or 0), capfd.readouterr().err, run_dir

    yield run
    POOL.close()


def graded_by(name: str) -> dict:
    return {"name": "arithmetic", "reward": f"broken_rewards:{name}"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "the grader raised RuntimeError: no ⟨U+001B⟩[31mcolour here ("),
        ("raises", f"broken_rewards.py:{LINE['raise R']})"),
        ("none", "the grader returned 'None', expected a finite number"),
        ("nan", "the grader returned 'nan', expected a finite number"),
        ("words", "the grader returned the text 'good', expected a finite number"),
        ("signature", "the grader raised TypeError: signature() takes 1 positional argument"),
    ],
)
def test_a_broken_reward_stops_the_run_and_is_named(train, name, message):
    code, said, _ = train(task=graded_by(name))
    assert code == 2 and "Traceback" not in said
    last = said.splitlines()[-1]
    assert last.startswith("counterpoise: batch 0: the grader failed on")
    assert "rollouts (of 16)" in last and message in last and "grader_max_failed_frac" in last


def test_a_broken_reward_stops_the_first_evaluation(train):
    code, said, _ = train(task=graded_by("raises"), eval={"every": 2, "prompts": 6})
    assert code == 2
    assert (
        "evaluation: the grader failed on 4 of the first 4 rollouts (of 6)" in said.splitlines()[-1]
    )


def test_a_hanging_reward_stops_the_run_soon(train):
    """Eight rollouts that run out of time are enough, not half of 16."""
    changes = {"prompts": 8, "group_size": 8, "max_new_tokens": 8}
    code, said, _ = train(task=graded_by("hangs"), grader_time_limit_s=0.2, rollouts=changes)
    assert code == 2
    assert "the grader ran out of time on each of the first 8 rollouts" in said.splitlines()[-1]


def test_failures_below_the_limit_are_shown_counted_and_kept(train):
    code, said, run_dir = train(task=graded_by("sometimes"), eval={"every": 2, "prompts": 12})
    assert code == 0
    lines = [line for line in said.splitlines() if "the grader failed on" in line]
    assert "of 16 rollouts" in lines[1] and "RuntimeError: cannot read this" in lines[1]
    rows = read_jsonl(run_dir / "metrics.jsonl")
    failures = [row for row in rows if row["grader/num_failures"]]
    assert failures and all("cannot read this" in row["warnings"][0] for row in failures)
    evals = read_jsonl(run_dir / "evals.jsonl")
    assert sum(row["eval/num_grader_failures"] for row in evals) > 0
    assert open_run(run_dir).metrics["grader/num_failures"].sum() > 0


def test_a_limit_of_one_lets_every_grader_fail(train):
    code, said, run_dir = train(task=graded_by("none"), grader_max_failed_frac=1.0)
    assert code == 0 and len(read_jsonl(run_dir / "metrics.jsonl")) == 4
    assert said.count("the grader failed on 16 of 16 rollouts") == 3
    assert "more like this are not shown; metrics.jsonl has them all" in said


def test_eval_counts_failures(train, capfd, tmp_path):
    train(task={"name": "arithmetic"}, num_batches=1)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**SMALL, "task": graded_by("sometimes")}))
    with pytest.raises(SystemExit):
        dispatch(["eval", str(tmp_path / "run"), "--config", str(recipe), "--prompts", "12"])
    assert "of 12 rollouts" in capfd.readouterr().out


def test_nothing_to_learn_is_said(train):
    code, said, run_dir = train(task=graded_by("zero"))
    assert code == 0
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["reward/flat_batches"] for row in rows] == [1, 2, 3, 4]
    assert ["warnings" in row for row in rows] == [False, False, True, False]
    assert "nothing to learn for 3 batches: every reward is 0" in said


def test_a_method_without_rewards_has_something_to_learn_from_equal_ones(train):
    code, said, run_dir = train(task=graded_by("zero"), method={"name": "opsa"})
    assert code == 0 and "nothing to learn" not in said
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["reward/flat_batches"] for row in rows] == [0, 0, 0, 0]
    assert all(row["loss/coef_mass"] > 0 for row in rows)
    assert flat_stretches(open_run(run_dir)) == []


def test_rules_that_take_all_credit_away_are_told(train):
    """Rewards differ, and GTPO's filter drops every rollout."""
    rule = {"name": "entropy_filter", "limit": 0.0}
    method = {"name": "gtpo", "credit": [{"name": "conflict", "rule": rule}]}
    code, said, _ = train(task={"name": "helpers.probe_run:Coin"}, method=method)
    assert code == 0
    assert "nothing to learn for 3 batches: rewards differ, and no token has credit." in said


def test_a_resumed_run_goes_on_counting(train):
    train("--set", "num_batches=2", task=graded_by("zero"), checkpoint_every=1)
    code, said, run_dir = train("--resume", task=graded_by("zero"), checkpoint_every=1)
    assert code == 0 and "nothing to learn for 3 batches" in said
    assert [r["reward/flat_batches"] for r in read_jsonl(run_dir / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_train_stream_that_ends_begins_again(train):
    code, said, run_dir = train(task="broken_rewards:Short")
    assert code == 0, said
    table = open_run(run_dir).table("rollouts", 1, ["prompt_id"])
    names = table["prompt_id"].to_pylist()[::4]
    assert names == ["train/4", "train/0", "train/1", "train/2"]


def test_a_task_without_prompts_is_an_error(train):
    code, said, _ = train(task="broken_rewards:Empty")
    assert code == 2 and "task: no prompts in split 'train'" in said


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Strings", "prompt 0 of split 'train' is a str, got 'What is 1 + 1?'. Expected counter"),
        ("Numbers", "task: prompt 0 of split 'train': answer must be a text, got 2. Write Prompt("),
        ("NoStart", "prompts(split, seed) cannot be called as prompts('train', 0, start=0)"),
        ("NoFile", "task: prompts('train', 0, start=0) raised FileNotFoundError: [Errno 2] No"),
        ("NoFile", f"broken_rewards.py:{LINE['open(']})."),
        ("Forgets", "prompts('train', 0, start=0) returned None, expected an iterator over"),
        ("Fails", "task 'broken_rewards:Fails' raised KeyError: 'rows' ("),
        ("Fails", f"broken_rewards.py:{LINE['rows = {']})."),
    ],
)
def test_a_task_that_is_slightly_wrong_is_one_line(train, name, message):
    code, said, _ = train(task=f"broken_rewards:{name}")
    assert code == 2 and "Traceback" not in said
    assert message in said.splitlines()[-1]


def test_a_stream_that_ignores_where_to_start_is_an_error(train):
    code, said, _ = train(task="broken_rewards:Deaf")
    assert code == 2 and "task: prompts('train', 0, start=1) begins with 'train/0'" in said


@pytest.mark.parametrize(
    "task", [{"terms": 2, "max_number": 2, "max_total": 2}, {"max_number": 10**12}]
)
def test_arithmetic_without_problems_is_an_error(train, task):
    code, said, _ = train(task={"name": "arithmetic", **task}, eval={"every": 1, "prompts": 8})
    assert code == 2 and "arithmetic: no" in said and "max_number" in said.splitlines()[-1]
