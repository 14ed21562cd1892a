"""Several epochs over a batch: the same updates again, under credit that was assigned once."""

from __future__ import annotations

import dataclasses
import json
import zlib
from pathlib import Path

import pandas as pd
import pytest
import torch

from counterpoise.catalogue.method import Method
from counterpoise.policy import load_model
from counterpoise.probes.scene import open_scene
from counterpoise.probes.updates import before_last_update
from counterpoise.run.read import checkpoints, open_run, read_jsonl
from counterpoise.tasks import task
from counterpoise.tasks.arithmetic import Arithmetic
from counterpoise.trainer.collect import RolloutSampler, collect, measure_columns
from counterpoise.trainer.config import ConfigError, parse_config
from counterpoise.trainer.loop import make_method
from counterpoise.trainer.update import adamw, apply_update
from counterpoise.types import Prompt
from counterpoise.viewer.tokens import open_batch
from helpers.tiny_run import go, recipe

TWICE = {"lr": 1e-3, "updates_per_batch": 2, "epochs": 2}


@dataclasses.dataclass(frozen=True)
class SomeConstant(Arithmetic):
    """Every second prompt pays all answers alike, the others by a coin."""

    is_trusted = True

    def reward(self, prompt: Prompt, text: str) -> float:
        is_constant = zlib.crc32(prompt.text.encode()) % 2 == 0
        return 1.0 if is_constant else float(zlib.crc32(text.encode()) & 1)


def metrics(run_dir: Path) -> list[dict]:
    return read_jsonl(run_dir / "metrics.jsonl")


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    last = checkpoints(run_dir)[-1]
    return load_file(last / "model.safetensors") | load_file(last / "optimizer.safetensors")


def test_the_updates_of_a_batch_come_again_in_their_order(tmp_path):
    """The run is the same, bit for bit, as the plan's updates written out twice by hand."""
    go(tmp_path / "run", optimizer=TWICE, num_batches=1)
    config = parse_config(recipe(tmp_path / "run", optimizer=TWICE, num_batches=1))
    policy, method = load_model("bundled"), make_method(**config.method)
    optimizer = adamw(policy.model, config.optimizer)
    collected = collect(method, RolloutSampler(policy, task(**config.task), config, 0))
    collected = measure_columns(policy, method, config, collected, None)
    credit = method.assign(collected.batch)
    first, second = method.plan(collected.batch, 2, seed=config.seed)
    for row_R in (first, second, first, second):
        rows = method.rows(collected.batch, credit, row_R)
        apply_update(policy.model, optimizer, method, rows, collected, config)
    trained = load_model(str(checkpoints(tmp_path / "run")[-1])).model.state_dict()
    assert all(torch.equal(value, trained[key]) for key, value in policy.model.state_dict().items())
    (row,) = metrics(tmp_path / "run")
    assert row["optimizer/num_updates"] == 4
    plan = json.loads((tmp_path / "run" / "plan" / "batch_000000.json").read_text())
    assert len(plan["rows"]) == 2 and plan["left_out"] == []


def test_credit_is_assigned_once_and_the_rate_falls_over_all_updates(tmp_path, monkeypatch):
    calls, real = [], Method.assign

    def assign(self, *args, **kwargs):
        calls.append(kwargs.get("batch_number"))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Method, "assign", assign)
    go(tmp_path / "run", optimizer={**TWICE, "schedule": "linear"}, num_batches=2)
    assert [number for number in calls if number is not None] == [0, 1]
    rates = [row["optimizer/lr"] for row in metrics(tmp_path / "run")]
    assert rates == pytest.approx([1e-3 * (1 - 3 / 8), 1e-3 * (1 - 7 / 8)])
    state = json.loads((checkpoints(tmp_path / "run")[-1] / "state.json").read_text())
    assert state["num_updates"] == 8


def test_one_epoch_is_the_default_and_two_train_otherwise(tmp_path):
    one = {"lr": 1e-3, "updates_per_batch": 2}
    go(tmp_path / "none", optimizer=one)
    go(tmp_path / "one", optimizer={**one, "epochs": 1})
    go(tmp_path / "two", optimizer={**one, "epochs": 2})
    none, same, other = (metrics(tmp_path / name) for name in ("none", "one", "two"))
    assert none == same and none[0]["reward/mean"] == other[0]["reward/mean"]
    assert none[0]["loss/sampler_gap"] < other[0]["loss/sampler_gap"]
    with pytest.raises(ConfigError, match="optimizer.epochs: .*greater than or equal to 1, got 0"):
        parse_config(recipe(tmp_path, optimizer={"epochs": 0}))


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    ledger = {"every": 1, "decompose": ["sign"], "bank": 0}
    go(tmp_path / "whole", optimizer=TWICE, ledger=ledger)
    go(tmp_path / "cut", optimizer=TWICE, ledger=ledger, num_batches=1)
    go(tmp_path / "cut", optimizer=TWICE, ledger=ledger, resume=True)
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(whole[key], cut[key]) for key in whole)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")


def test_the_ledger_books_every_epoch_and_changes_none(tmp_path):
    """A row per token and epoch; the viewer shows the first."""
    ledger = {"every": 1, "decompose": ["sign"], "bank": 0, "own_tokens": 4}
    go(tmp_path / "seen", optimizer=TWICE, ledger=ledger)
    go(tmp_path / "unseen", optimizer=TWICE)
    seen, unseen = weights(tmp_path / "seen"), weights(tmp_path / "unseen")
    assert all(torch.equal(seen[key], unseen[key]) for key in unseen)
    run = open_run(tmp_path / "seen")
    tokens = pd.read_parquet(tmp_path / "seen" / "tokens" / "batch_000001.parquet")
    assert set(tokens["update"]) == {0, 1, 2, 3}
    assert (tokens.groupby(["rollout", "position"]).size() == 2).all()
    first, second = (tokens[tokens["update"].isin(pair)] for pair in ((0, 1), (2, 3)))
    assert (first["ratio"] - 1).abs().max() < (second["ratio"] - 1).abs().max()
    assert first["credit"].tolist() == second["credit"].tolist()
    assert first["own"].notna().sum() == second["own"].notna().sum() == 8
    shown = open_batch(run, 1).column("delta").value_T
    expected = first.sort_values(["group", "rollout", "position"])["delta"]
    assert shown.tolist() == pytest.approx(expected.tolist())
    before, last = metrics(tmp_path / "seen")
    spent = sum(4 * row["ledger/tax/other"] for row in (before, last))
    assert last["ledger/tax/cumulative_other"] == pytest.approx(spent, rel=1e-5)


def test_tpo_pulls_constant_groups_back_from_the_second_epoch_on(tmp_path):
    """The target is that of the sampler: a constant group has no force at first, and one against
    the way it went as soon as the other groups have moved it.
    """
    name = f"{__name__}:SomeConstant"
    go(
        tmp_path / "run",
        task={"name": name},
        method={"name": "tpo"},
        rollouts={"prompts": 6, "group_size": 4, "max_new_tokens": 8},
        optimizer={"lr": 1e-3, "updates_per_batch": 1, "epochs": 4},
        ledger={"every": 1, "decompose": ["sign"], "bank": 0, "own_tokens": 0},
        num_batches=1,
    )
    tokens = pd.read_parquet(tmp_path / "run" / "tokens" / "batch_000000.parquet")
    is_constant = tokens.groupby("group")["reward"].transform("nunique") == 1
    assert 0 < tokens[is_constant]["group"].nunique() < 6
    pull = tokens[is_constant].groupby("update")["coef"].apply(lambda one: one.abs().max())
    assert pull[0] < 1e-5 and (pull[1:] > 1e-3).all()
    by_row = tokens[is_constant].groupby(["group", "rollout", "update"])
    moved = by_row["ratio"].prod().unstack("update")[1].groupby("group").rank()
    back = by_row["coef"].first().unstack("update")[1]
    assert (back.groupby("group").sum().abs() < 1e-5).all()
    highest = moved == moved.groupby("group").transform("max")
    assert (back[highest] < 0).all(), "what rose most is pulled down"


def test_probes_of_the_last_update_count_epochs(tmp_path):
    """One update, gone through twice: the last is off-policy."""
    optimizer = {"lr": 1e-3, "updates_per_batch": 1, "epochs": 2}
    go(tmp_path / "run", optimizer=optimizer, num_batches=1, keep_every=1)
    scene = open_scene(tmp_path / "run", 0, trust=True)
    before = {key: value.clone() for key, value in scene.policy.model.state_dict().items()}
    assert len(scene.updates) == 2
    with before_last_update(scene) as rows:
        moved = scene.policy.model.state_dict()
        assert any(not torch.equal(moved[key], before[key]) for key in before)
        assert rows.row_R.tolist() == list(range(8))
