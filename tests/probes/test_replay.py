"""Replay: one saved batch under several methods."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import counterpoise as cp
from counterpoise import probes
from counterpoise.cli.replay import replay as command
from counterpoise.ledger.calculus.snapshot import snapshot
from counterpoise.probes.replay import correlations
from counterpoise.probes.replay import replay as replay_batch
from helpers.make_run import make_run
from helpers.probe_run import small_run

# the run's task is a class of the tests
open_scene = functools.partial(probes.open_scene, trust=True)
replay = functools.partial(replay_batch, trust=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return small_run(tmp_path_factory.mktemp("replay") / "run", num_batches=1, ledger_every=0)


def test_a_training_inside_trl_is_replayed_from_its_rollouts(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", method="fade")
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"host": "trl"}))
    assert replay(path, 0, ["dapo", "top_entropy"])["numbers"]["credit"].keys() == {
        "dapo",
        "top_entropy",
    }
    for method, why in (("delta", "delta reads hidden_NTD"), ("fade", "fade has a memory")):
        with pytest.raises(ValueError, match="inside trl, which keeps no recipe") as error:
            replay(path, 0, [method])
        assert f"Its saved rollouts are not enough: {why}" in str(error.value)


def test_saved_rollouts_alone_give_the_credit_that_the_checkpoint_gives(
    run: Path, tmp_path: Path, monkeypatch
) -> None:
    methods = ["dapo", "top_entropy", "ktae", "{name: dapo, credit: [conflict]}"]
    apart = tmp_path / "apart"
    shutil.copytree(run, apart, ignore=shutil.ignore_patterns("checkpoints", "probes"))
    credits = []
    for folder, why in ((apart, ""), (run, "asked")):
        monkeypatch.setattr("counterpoise.probes.replay.why_model", lambda *_, why=why: why)
        summary = replay(folder, 0, methods)
        credits.append(pd.read_parquet(Path(summary["folder"]) / "credits.parquet"))
    monkeypatch.undo()
    assert credits[0].equals(credits[1])
    for apply, methods, why in ((True, ["dapo"], "--apply"), (False, ["delta"], "delta reads")):
        with pytest.raises(ValueError, match="no checkpoint of batch 0 .*keep_every") as error:
            replay(apart, 0, methods, apply=apply)
        assert f"Its saved rollouts are not enough: {why}" in str(error.value)


def test_a_method_with_itself(run: Path) -> None:
    summary = replay(run, 0, ["dapo", "{name: dapo}", "psr"], apply=True)
    numbers = summary["numbers"]
    assert numbers["rank_correlation"]["dapo ~ {name: dapo}"] == 1.0
    assert numbers["rank_correlation_of_updates"]["dapo ~ {name: dapo}"] == 1.0
    assert numbers["update"]["dapo"] == numbers["update"]["{name: dapo}"]
    assert numbers["rank_correlation"]["dapo ~ psr"] < 1.0
    assert numbers["credit"]["psr"]["mean_negative"] == 0.0
    assert (
        numbers["update"]["dapo"]["delta"]["positive"]["mean"]
        > numbers["update"]["dapo"]["delta"]["negative"]["mean"]
    )


def test_updates_and_figure_stay_beside_the_credits(run: Path) -> None:
    """Numbers can be made again from the raw data, and other methods do not replace them."""
    first = replay(run, 0, ["dapo", "psr"], apply=True)
    second = replay(run, 0, ["dapo", "nsr"], apply=True)
    assert first["folder"] != second["folder"]
    for summary in (first, second):
        folder = Path(summary["folder"])
        assert {path.name for path in folder.iterdir()} == {
            "credits.parquet",
            "updates.parquet",
            "summary.json",
            "figure.html",
        }
        table = pd.read_parquet(folder / "updates.parquet")
        for label in summary["methods"]:
            positive = table[table["sign"] > 0]
            flips = (positive[f"change/{label}"] < 0).mean()
            assert summary["numbers"]["update"][label]["flip"]["positive"]["mean"] == pytest.approx(
                flips, rel=1e-5
            )
        assert (
            table.groupby("rollout")["position"].agg(lambda p: list(p) == list(range(len(p)))).all()
        )


def test_credits_are_those_of_the_method(run: Path) -> None:
    summary = replay(run, 0, ["dapo", "top_entropy"])
    table = pd.read_parquet(Path(summary["folder"]) / "credits.parquet")
    batch = open_scene(run, 0).collected.batch
    expected = cp.method("top_entropy").assign(batch).credit_NT[batch.mask_NT].numpy()
    assert np.array_equal(table["credit/top_entropy"].to_numpy(), expected)
    assert "update" not in summary["numbers"]


def test_replay_restores_between_methods(run: Path, monkeypatch) -> None:
    scene = open_scene(run, 0)
    before = snapshot(scene.policy.model, scene.optimizer)
    monkeypatch.setattr(
        "counterpoise.probes.replay.open_scene", lambda run_dir, batch_number, trust: scene
    )
    replay(run, 0, ["dapo", "nsr"], apply=True)
    after = snapshot(scene.policy.model, scene.optimizer)
    assert all(torch.equal(before.tensors[name], after.tensors[name]) for name in before.tensors)
    assert (
        after.slots == before.slots == [None] * len(before.slots)
    )  # no optimizer state before the first batch, none afterwards


def test_correlation_by_hand() -> None:
    """Ranks of (3, 1, 2) against (1, 2, 3): 1 - 6 (4 + 1 + 1) / (3 * 8) = -0.5; a constant column
    has none.
    """
    found = correlations(
        {"a": np.array([1.0, 2.0, 3.0]), "b": np.array([3.0, 1.0, 2.0]), "c": np.ones(3)}
    )
    assert found == {"a ~ b": -0.5, "a ~ c": None, "b ~ c": None}


@pytest.mark.parametrize(
    ("batch_number", "methods", "message"),
    [
        (0, ["dapo", "dapo"], "named twice"),
        (0, ["dappo"], "Did you mean 'dapo'"),
        (0, ["[dapo]"], "expected a name, or a mapping with name"),
        (5, ["dapo"], "no checkpoint of batch 5"),
    ],
)
def test_bad_input_is_one_line(
    batch_number: int, methods: list[str], message: str, run: Path
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        replay(run, batch_number, methods)
    assert "\n" not in str(error.value)


def test_the_command_says_what_a_rank_correlation_is_not(run: Path, capsys) -> None:
    command(run, 0, ["dapo", "grpo"], False, trust=True)
    assert "not that they weigh them alike" in capsys.readouterr().out
    command(run, 0, ["dapo"], False, trust=True)
    assert "rank correlation" not in capsys.readouterr().out


def test_command_prints_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(run, 0, ["dapo", "grpo"], False, trust=True, json_=True)
    assert json.loads(capsys.readouterr().out)["methods"] == ["dapo", "grpo"]
