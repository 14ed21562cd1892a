"""OAR in the trainer: whose tokens are scored, numbers, resume, replay, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import counterpoise as cp
from counterpoise.policy import load_model, measure_importance
from counterpoise.probes.gradient import forward_of
from counterpoise.probes.methods import methods_of
from counterpoise.probes.scene import open_scene
from counterpoise.run.read import read_jsonl
from counterpoise.run.rollouts import ragged
from counterpoise.tasks import task as make_task
from counterpoise.trainer.collect import RolloutSampler, collect
from counterpoise.trainer.config import ConfigError, parse_config
from counterpoise.trainer.importance import answer_tokens, score_tokens
from counterpoise.trainer.loop import train

SMALL = {
    "model": "bundled",
    "task": {"name": "arithmetic", "difficulty": "easy"},
    "method": {"name": "oar"},
    "num_batches": 3,
    "rollouts": {"prompts": 6, "group_size": 4, "max_new_tokens": 80},
    "optimizer": {"lr": 1e-4, "updates_per_batch": 2, "warmup": 0},
    "eval": {"every": 0},
    "ledger": {"every": 0},
    "checkpoint_every": 1,
    "keep_every": 1,
    "trackers": [],
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def recipe(tmp_path: Path, name: str = "run", **more) -> dict:
    return {**SMALL, "run_dir": str(tmp_path / name), **more}


def first_batch(config):
    policy, task, method = load_model("bundled"), make_task(**config.task), cp.method("oar")
    sampler = RolloutSampler(policy, task, config, 0, needs=method.needs)
    return policy, task, method, collect(method, sampler)


def test_tokens_before_the_number_of_the_closing_sentence_are_scored(tmp_path):
    """Rollouts cut at 45 tokens: some have an answer, some do not."""
    rollouts = {**SMALL["rollouts"], "max_new_tokens": 45, "temperature": 0.8}
    config = parse_config(recipe(tmp_path, rollouts=rollouts))
    policy, task, method, collected = first_batch(config)
    batch, numbers = score_tokens(policy, method, task, config, collected, 0)
    batch, score_NT = batch.batch, batch.batch.importance_NT
    answers = []
    for row, text in enumerate(collected.texts):
        ids = batch.token_ids_NT[row, batch.mask_NT[row]].tolist()
        scored = [token for token, x in zip(ids, score_NT[row].tolist()) if x >= 0]
        words = policy.tokenizer.decode(scored)
        if "So the answer is" in text and text.rstrip().endswith("."):
            assert words.endswith("So the answer is"), words
            answers.append(len(ids) - len(scored))
        else:
            assert not scored
    assert 0 < len(answers) < len(collected.texts)
    assert numbers["importance/answer_frac"] == len(answers) / len(collected.texts)
    assert numbers["importance/answer_tokens"] == sum(answers) / len(answers)
    assert 0 < numbers["importance/score"] < 1
    credit = method.assign(batch)
    assert credit.metrics["credit/answer_influence/scored_frac"] == len(answers) / 24


def test_the_temperature_is_that_of_the_rollouts_and_other_methods_pay_nothing(tmp_path):
    rollouts = {**SMALL["rollouts"], "temperature": 0.8}
    config = parse_config(recipe(tmp_path, rollouts=rollouts))
    policy, task, method, collected = first_batch(config)
    got_NT = score_tokens(policy, method, task, config, collected, 0)[0].batch.importance_NT
    batch = collected.batch
    asked = [collected.prompts[p] for p in batch.group_N.tolist()]
    answer_N = answer_tokens(policy, task, asked, batch.token_ids_NT, batch.mask_NT)
    again_NT = score_tokens(policy, method, task, config, collected, 0)[0].batch.importance_NT
    other_NT = score_tokens(policy, method, task, config, collected, 1)[0].batch.importance_NT
    assert torch.equal(got_NT, again_NT)
    assert not torch.equal(got_NT, other_NT)
    warm_NT = measure_importance(
        policy.model,
        collected.prompt_ids,
        batch.token_ids_NT,
        batch.mask_NT,
        answer_N,
        seed=0,
        temperature=0.8,
    )
    assert torch.equal(warm_NT < 0, got_NT < 0)
    assert score_tokens(policy, cp.method("dapo"), task, config, collected, 0) == (collected, {})


def test_a_resumed_run_is_the_whole_run_and_a_replay_has_its_credit(tmp_path):
    """Metrics and weights bit for bit, and credit of a stored batch as it was given then."""
    whole, torn = (parse_config(recipe(tmp_path, name)) for name in ("whole", "torn"))
    train(whole)
    train(torn, until=1)
    train(torn, resume=True)
    rows = [read_jsonl(Path(one.run_dir) / "metrics.jsonl") for one in (whole, torn)]
    assert rows[0] == rows[1]
    assert all(0 < row["importance/answer_frac"] <= 1 for row in rows[0])
    assert all(row["loss/coef_mass"] > 0 for row in rows[0])
    last = [
        Path(one.run_dir) / "checkpoints" / "batch_000003" / "model.safetensors"
        for one in (whole, torn)
    ]
    assert last[0].read_bytes() == last[1].read_bytes()
    timing = read_jsonl(tmp_path / "whole" / "timing.jsonl")
    assert all(0 < row["importance_share"] < 1 for row in timing)
    scene = open_scene(tmp_path / "torn", 2)
    stored = pd.read_parquet(tmp_path / "torn" / "rollouts" / "batch_000002.parquet")
    got = ragged(scene.credit.credit_NT, scene.collected.batch.mask_NT).to_pylist()
    assert any(any(row) for row in got)
    for mine, theirs in zip(got, stored["credit"]):
        assert mine == pytest.approx(list(theirs), abs=1e-6)


def test_a_task_that_does_not_say_where_answers_begin_is_refused(tmp_path):
    config = parse_config(recipe(tmp_path, task={"name": "helpers.fussy:Fussy"}))
    with pytest.raises(
        ConfigError, match="oar reads importance_NT.*'helpers.fussy:Fussy' does not say where"
    ):
        train(config)
    assert not (tmp_path / "run").exists()


def test_all_methods_of_a_probe_leave_it_out_and_its_name_does_not():
    assert "oar" not in methods_of("all")
    assert list(methods_of("oar")) == ["oar"]


def test_the_probe_of_gradients_refuses_it():
    scene: Any = None  # it is not looked at
    with pytest.raises(ValueError, match="gradient: oar reads importance_NT, which this probe"):
        forward_of(scene, methods_of("oar"))
