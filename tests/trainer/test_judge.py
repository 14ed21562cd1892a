"""Rollouts graded while others still run: the same texts and rewards, and no error is lost."""

from __future__ import annotations

import threading

import pytest
import torch

from counterpoise.policy import encode_prompts, load_model
from counterpoise.sampling import sample, sample_from
from counterpoise.tasks import Task
from counterpoise.tasks.arithmetic import Arithmetic
from counterpoise.trainer.config import Config, parse_config
from counterpoise.trainer.judge import Judge, sample_and_grade
from counterpoise.trainer.prompts import prompts_from
from counterpoise.types import Prompt

G = 4


@pytest.fixture(scope="module")
def policy():
    return load_model("bundled")


def recipe(**changes: object) -> Config:
    raw = {"task": {"name": "arithmetic"}, "method": {"name": "grpo"}, "model": "bundled"}
    return parse_config({**raw, "rollouts": {"max_new_tokens": 64}, **changes})


def asked(policy, num: int = 6) -> tuple[list[list[int]], list[Prompt]]:
    prompts = prompts_from(Arithmetic(), "train", 0, 0, num)
    ids = encode_prompts(policy, [prompt.text for prompt in prompts])
    return ids, [prompt for prompt in prompts for _ in range(G)]


@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize("max_rows", [5, 64])
def test_every_row_is_heard_once_with_its_tokens(policy, engine, max_rows):
    ids, _ = asked(policy)
    heard: dict[int, list[int]] = {}
    calls = []

    def watch(rows, token_ids):
        calls.append(len(rows))
        for row, tokens in zip(rows, token_ids):
            assert row not in heard
            heard[row] = tokens

    settings = {"group_size": G, "max_new_tokens": 64, "stop_ids": policy.stop_ids, "seed": 3}
    rollouts = sample(policy.model, ids, max_rows=max_rows, engine=engine, watch=watch, **settings)
    rows = [row[keep].tolist() for row, keep in zip(rollouts.token_ids_NT, rollouts.mask_NT)]
    assert heard == dict(enumerate(rows))
    if engine and max_rows == 5:
        assert len(calls) > 1  # while others run or wait


@pytest.mark.parametrize("max_rows", [5, 64])
def test_watching_changes_no_token(policy, max_rows):
    ids, _ = asked(policy)
    settings = {"group_size": G, "max_new_tokens": 64, "seed": 3, "max_rows": max_rows}
    alone = sample_from(policy, ids, **settings)
    watched = sample_from(policy, ids, watch=lambda rows, token_ids: None, **settings)
    assert torch.equal(alone.token_ids_NT, watched.token_ids_NT)
    assert torch.equal(alone.sampler_logp_NT, watched.sampler_logp_NT)


class Slow(Arithmetic):
    """Graded in place; remembers who graded, and fails where it is told to."""

    is_trusted = True
    threads: set[str] = set()
    is_broken = False

    def reward(self, prompt: Prompt, text: str) -> float:
        self.threads.add(threading.current_thread().name)
        if self.is_broken:
            raise RuntimeError("no grade")
        return super().reward(prompt, text)


def judged(policy, task: Task, *, beside: bool, config: Config):
    ids, prompts = asked(policy)
    judge = Judge(policy, task, prompts, config, "batch 0")
    with judge.listening(beside=beside):
        sample_from(policy, ids, group_size=G, max_new_tokens=64, seed=3, watch=judge.hear)
    return judge.texts, judge.grader.grades()


def test_beside_sampling_or_after_it_is_the_same(policy):
    ids, prompts = asked(policy)
    Slow.threads = set()
    texts, grades = judged(policy, Slow(), beside=True, config=recipe())
    assert len(Slow.threads) == 1
    assert next(iter(Slow.threads)).startswith("judge")
    after, same = judged(policy, Slow(), beside=False, config=recipe())
    assert texts == after
    assert grades == same
    assert 0 < sum(grades.reward) < len(prompts)
    whole = sample_and_grade(
        policy, Slow(), recipe(), ids, prompts, "batch 0", group_size=G, seed=3
    )
    assert whole.texts == [texts[row] for row in range(len(prompts))]
    assert whole.grades == grades


@pytest.mark.parametrize("beside", [True, False])
def test_a_grader_that_fails_too_often_ends_the_sampling(policy, beside):
    class Broken(Slow):
        is_broken = True

    with pytest.raises(ValueError, match=r"batch 0: the grader failed on .* no grade"):
        judged(policy, Broken(), beside=beside, config=recipe(grader_max_failed_frac=0.1))


def test_an_error_of_sampling_is_not_lost(policy):
    _, prompts = asked(policy)
    judge = Judge(policy, Slow(), prompts, recipe(), "batch 0")
    with pytest.raises(KeyError, match="sampling"), judge.listening(beside=True):
        raise KeyError("sampling")
    assert judge.thread is None
