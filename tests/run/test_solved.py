"""What counts as solved where a named reward decides it: every reader asks the column ``success``,
not the sum of rewards.
"""

from __future__ import annotations

import json

import pandas as pd
import pytest
import yaml

from counterpoise.probes.audit import audit_plans
from counterpoise.probes.replay import read_saved
from counterpoise.report.samples import plan_table, sample_prompts
from counterpoise.run.files import batch_file, write_table, write_text
from counterpoise.run.read import open_run
from counterpoise.run.rollouts import read_rollouts
from counterpoise.viewer import api
from counterpoise.viewer.tokens import open_batch
from helpers.make_run import make_run

SMALL = {"num_batches": 2, "prompts": 3, "group_size": 4, "ledger_every": 2, "eval_every": 0}


@pytest.fixture
def truth(tmp_path):
    """Rollouts of a run whose rewards are accuracy + format: a point for everyone, wrong ones with
    two points the highest.
    """
    path = make_run(tmp_path / "run", **SMALL)
    config = yaml.safe_load((path / "config.yaml").read_text())
    config["trl"] = {"success_reward": "accuracy"}
    write_text(path / "config.yaml", yaml.safe_dump(config))
    manifest = json.loads((path / "manifest.json").read_text())
    write_text(path / "manifest.json", json.dumps({**manifest, "host": "trl"}))
    out = {}
    for batch in (0, 1):
        rows = pd.read_parquet(batch_file(path, "rollouts", batch, ".parquet"))
        rows["success"] = rows["reward"] > 0
        rows["reward"] = 2.0 - rows["reward"]
        write(path, batch, rows)
        out[batch] = rows
    tokens = pd.read_parquet(batch_file(path, "tokens", 0, ".parquet"))
    tokens["reward"] = 2.0 - tokens["reward"]
    write_table(batch_file(path, "tokens", 0, ".parquet"), tokens.to_dict("list"))
    return path, out


def write(path, batch, rows):
    write_table(batch_file(path, "rollouts", batch, ".parquet"), rows.to_dict("list"))


def test_the_report_counts_the_named_reward(truth):
    path, rows = truth
    run = open_run(path)
    solved = rows[0].groupby("group")["success"].sum()
    for prompt in sample_prompts(run, 0):
        assert prompt.solved == f"{solved[prompt.group]} of 4"
        if 0 < solved[prompt.group] < 4:  # the first is right, though its reward is the lower one
            right = rows[0].set_index("rollout")["success"]
            assert [bool(right[one.rollout]) for one in prompt.samples] == [True, False]
    batch, table = plan_table(run)
    plan = run.plan(batch)
    for line, part in zip(table.rows, plan["rows"]):
        assert line[4] == f"{100 * rows[batch].iloc[part]['success'].mean():.1f}%"


@pytest.mark.parametrize("batch", [0, 1], ids=["from tokens", "from rollouts"])
def test_the_viewer_counts_the_named_reward(truth, batch):
    path, rows = truth
    run = open_run(path)
    told = rows[batch].set_index("rollout")["success"]
    shown = {
        row["rollout"]: row["solved"]
        for group in api.batch_info(open_batch(run, batch))["groups"]
        for row in group["rollouts"]
    }
    assert shown == told.to_dict()
    (first, *_) = rows[batch]["prompt_id"]
    (line,) = api.prompt_history(run, first)
    assert line["solved"] == rows[batch].set_index("prompt_id")["success"][first].sum()


def test_audit_and_replay_read_the_named_reward(truth):
    path, rows = truth
    plans = audit_plans(path, batch_number=0, num_updates=1)["plans"]
    (whole,) = plans["whole prompts (query_preserved)"]
    assert whole["positive_frac"] == [rows[0]["success"].mean()]
    file = batch_file(path, "rollouts", 0, ".parquet")
    (alone,) = audit_plans(file, num_updates=1)["plans"]["whole prompts (query_preserved)"]
    assert alone["positive_frac"] == whole["positive_frac"]
    assert read_rollouts(file).batch.is_success_N.tolist() == rows[0]["success"].tolist()
    saved = read_saved(path, 0, trust=True)
    assert saved.batch.is_success_N.tolist() == rows[0]["success"].tolist()


def test_a_folder_that_does_not_say_is_told(truth):
    """Written before the column was: the sum of rewards is read, and that is said once."""
    path, rows = truth
    for batch, table in rows.items():
        write(path, batch, table.drop(columns="success"))
    run = open_run(path)
    assert {prompt.solved for prompt in sample_prompts(run, 0)} == {"4 of 4"}
    plan_table(run)
    (problem,) = run.problems
    assert "success_reward" in problem and "'accuracy'" in problem and "0.5" in problem
