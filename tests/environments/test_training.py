"""Training with an environment: what is stored comes back, resuming changes nothing, failures cost
their rows alone."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from counterpoise.catalogue.registry import method as make_method
from counterpoise.probes.scene import open_scene
from counterpoise.run.rollouts import read_rollouts
from counterpoise.trainer.config import parse_config
from counterpoise.trainer.loop import train

RECIPE = {
    "model": "bundled_turns",
    "chat": False,
    "task": {"name": "guess", "n": 8, "turns": 3},
    "method": {"name": "turn_rloo"},
    "num_batches": 4,
    "rollouts": {
        "prompts": 8,
        "group_size": 4,
        "max_new_tokens": 12,
        "max_turn_tokens": 4,
        "max_prompt_tokens": 12,
    },
    "optimizer": {"lr": 3e-4, "updates_per_batch": 2},
    "eval": {"every": 4, "prompts": 8},
    "ledger": {"every": 2, "own_tokens": 2},
    "checkpoint_every": 2,
    "keep_every": 2,
    "trackers": [],
}


def run(path: Path, resume=False, **changes) -> Path:
    config = parse_config({**RECIPE, "run_dir": str(path), **changes})
    train(config, resume=resume)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("turns") / "whole")


def test_a_resumed_run_is_the_uninterrupted_one(whole, tmp_path):
    run(tmp_path / "r", num_batches=2)
    run(tmp_path / "r", resume=True)
    for name in ("rollouts/batch_000003.parquet", "tokens/batch_000002.parquet"):
        a, b = (pq.read_table(folder / name).to_pydict() for folder in (whole, tmp_path / "r"))
        assert a == b, name
    weights = [
        (folder / "checkpoints/batch_000004/model.safetensors").read_bytes()
        for folder in (whole, tmp_path / "r")
    ]
    assert weights[0] == weights[1]


def test_what_is_stored_gives_the_same_credit(whole):
    stored = pq.read_table(whole / "rollouts/batch_000002.parquet").to_pydict()
    scene = open_scene(whole, 2)
    assert scene.credit.advantage_NU is not None
    batch = scene.collected.batch
    for row, (credit, advantage) in enumerate(zip(stored["credit"], stored["turn_advantage"])):
        assert scene.credit.credit_NT[row, : len(credit)].tolist() == credit
        assert scene.credit.advantage_NU[row, : len(advantage)].tolist() == advantage
    assert [list(talk.replies) for talk in scene.collected.conversations] == stored["turn_reply"]
    assert torch.equal(batch.turn_reward_NU.sum(1), batch.reward_N)


def test_environment_tokens_have_no_credit_loss_or_ledger_row(whole):
    stored = pq.read_table(whole / "rollouts/batch_000002.parquet").to_pydict()
    num_env, num_drawn = 0, 0
    for mask, credit, turn in zip(stored["loss_mask"], stored["credit"], stored["turn"]):
        for drawn, one, at in zip(mask, credit, turn):
            assert drawn == (at >= 0)
            assert drawn or one == 0
            num_env, num_drawn = num_env + (not drawn), num_drawn + drawn
    assert num_env > 20
    assert pq.read_table(whole / "tokens/batch_000002.parquet").num_rows == num_drawn


@pytest.mark.parametrize("name", ["grpo", "gigpo", "mt_grpo", "crf_ntf", "gtpo", "gspo"])
def test_methods_train_on_stored_turns(whole, name):
    batch = read_rollouts(whole / "rollouts/batch_000002.parquet", max_length=12).batch
    # the start plays at random: at its usual limit GTPO's filter drops every rollout
    undecided = [{"name": "conflict", "rule": {"name": "entropy_filter", "limit": 10.0}}]
    method = make_method(name, **({"credit": undecided} if name == "gtpo" else {}))
    credit = method.assign(batch)
    assert (credit.credit_NT[~batch.mask_NT] == 0).all()
    assert (credit.credit_NT[batch.mask_NT] != 0).any()


def test_failures_are_counted_shown_and_train_nothing(tmp_path):
    room = "helpers.rooms:Broken"
    path = run(
        tmp_path / "r",
        task={"name": room, "turns": 3, "fault": "raise", "when": 2},
        method={"name": "grpo"},
        model="bundled",
        chat=None,
        num_batches=1,
        ledger={"every": 1, "own_tokens": 0},
        rollouts={"prompts": 8, "group_size": 2, "max_new_tokens": 24, "max_turn_tokens": 6},
        eval={"every": 0},
    )
    stored = pq.read_table(path / "rollouts/batch_000000.parquet").to_pydict()
    assert stored["end_reason"][-2:] == ["failed", "failed"]
    assert "the door is locked" in stored["failure"][-1]
    assert [sum(map(abs, row)) for row in stored["credit"][-2:]] == [0, 0]
    metrics = json.loads((path / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["grader/num_failures"] == stored["end_reason"].count("failed")
    assert metrics["rollouts/num"] == 16 - stored["end_reason"].count("failed")
    trained = set(pq.read_table(path / "tokens/batch_000000.parquet").to_pydict()["rollout"])
    assert trained == set(range(metrics["rollouts/num"]))
