"""Numbers and files of a run whose rollouts have turns."""

from __future__ import annotations

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from counterpoise.rollouts import Conversation, RolloutBatch
from counterpoise.run.parquet import KINDS
from counterpoise.run.read import read_jsonl
from counterpoise.run.rollouts import read_rollouts
from counterpoise.run.schema import (
    ROLLOUT_COLUMNS,
    TOKEN_COLUMNS,
    TOKEN_TURN_COLUMNS,
    TRAINER_COLUMNS,
    TURN_COLUMNS,
)
from counterpoise.trainer.metrics import turn_metrics
from counterpoise.types import TokenBatch
from helpers.turns_run import turns_run


def collected(talks, reward_NU, mask_NU):
    """Rollouts of one token per turn."""
    turn_NT = torch.where(mask_NU, torch.arange(mask_NU.shape[1]), -1)
    batch = TokenBatch(
        token_ids_NT=torch.ones_like(turn_NT),
        mask_NT=mask_NU,
        group_N=torch.zeros(len(talks), dtype=torch.long),
        reward_N=reward_NU.sum(1),
        sampler_logp_NT=torch.zeros(mask_NU.shape),
        turn_NT=turn_NT,
        turn_reward_NU=reward_NU,
        turn_mask_NU=mask_NU,
    )
    empty = [""] * len(talks)
    return RolloutBatch([], [[1]] * len(talks), empty, empty, batch, 0, [], talks)


def test_numbers_of_turns_are_over_those_who_played_them():
    talks = [
        Conversation(end_reason="done", metrics={"calls": 1.0, "<b>": 3.0}),
        Conversation(end_reason="turns", metrics={"calls": 0.0}),
        Conversation(end_reason="done"),
    ]
    reward_NU = torch.tensor([[0.5, 1.0], [0.0, 0.25], [1.0, 0.0]])
    mask_NU = torch.tensor([[True, True], [True, True], [True, False]])
    whole = collected(talks, reward_NU, mask_NU)
    lost = collected([Conversation(end_reason="timed out")], reward_NU[:1], mask_NU[:1])
    assert turn_metrics(whole._replace(lost=lost)) == {
        "turns/mean": pytest.approx(5 / 3),
        "turns/reward_0": pytest.approx(0.5),
        "turns/reward_1": pytest.approx(0.625),
        "turns/played_0": 1.0,
        "turns/played_1": pytest.approx(2 / 3),
        "turns/end_done": 0.5,
        "turns/end_turns": 0.25,
        "turns/end_length": 0.0,
        "turns/end_failed": 0.0,
        "turns/end_timed_out": 0.25,
        "environment/<b>": 3.0,
        "environment/calls": 0.5,
    }
    assert turn_metrics(whole._replace(conversations=None)) == {}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """One prompt in seven has an environment that fails in its second turn."""
    task = {"name": "helpers.rooms:Broken", "when": 2}
    rollouts = {"prompts": 7, "group_size": 4, "max_turn_tokens": 4, "max_new_tokens": 16}
    folder = tmp_path_factory.mktemp("runs") / "turns"
    return turns_run(folder, task, rollouts={**rollouts, "max_row_tokens": 200})


def test_every_column_of_turns_is_in_the_schema(run_dir):
    rollouts = pq.read_table(run_dir / "rollouts" / "batch_000000.parquet")
    expected = {*ROLLOUT_COLUMNS, *TRAINER_COLUMNS, *TURN_COLUMNS}
    assert set(rollouts.column_names) == expected
    tokens = pq.read_table(run_dir / "tokens" / "batch_000000.parquet").column_names
    assert set(TOKEN_COLUMNS) | set(TOKEN_TURN_COLUMNS) == {
        name for name in tokens if not name.startswith("part_")
    }
    samples = pq.read_table(run_dir / "evals" / "batch_000002.parquet").column_names
    assert set(TURN_COLUMNS) - {"turn_advantage"} <= set(samples)


def test_ledger_and_rollouts_agree_on_turns(run_dir):
    rollouts = pd.read_parquet(run_dir / "rollouts" / "batch_000000.parquet")
    tokens = pd.read_parquet(run_dir / "tokens" / "batch_000000.parquet")
    for at in tokens.itertuples():
        row = rollouts.iloc[at.rollout]
        assert at.turn == row["turn"][at.position] >= 0
        assert at.turn_advantage == pytest.approx(row["turn_advantage"][at.turn], abs=1e-6)
        assert at.sign == (at.turn_advantage > 0) - (at.turn_advantage < 0)


def test_failed_rollouts_are_counted_and_have_no_credit(run_dir):
    rollouts = pd.read_parquet(run_dir / "rollouts" / "batch_000000.parquet")
    failed = rollouts[rollouts["end_reason"] == "failed"]
    assert len(failed) == 4 and failed["failure"].str.contains("the door is locked").all()
    assert all((row == 0).all() for row in failed["credit"])
    metrics = read_jsonl(run_dir / "metrics.jsonl")[0]
    assert metrics["turns/end_failed"] == pytest.approx(4 / 28)
    assert metrics["turns/end_done"] == pytest.approx(24 / 28)
    assert metrics["turns/mean"] == 3.0 and "environment/length" in metrics
    kept = rollouts[rollouts["failure"] == ""]
    rewards = [sum(row[u] for row in kept["turn_reward"]) / len(kept) for u in range(3)]
    assert [metrics[f"turns/reward_{u}"] for u in range(3)] == pytest.approx(rewards)


def test_a_column_of_turns_of_another_kind_is_an_error(run_dir, tmp_path):
    table = pq.read_table(run_dir / "rollouts" / "batch_000000.parquet")
    at = table.column_names.index("turn_reward")
    wrong = table.set_column(at, "turn_reward", table["turn_action"])
    pq.write_table(wrong, tmp_path / "r.parquet")
    with pytest.raises(ValueError, match="'turn_reward' holds .*, expected list of numbers"):
        read_rollouts(tmp_path / "r.parquet")
    assert set(TURN_COLUMNS) <= set(KINDS)
