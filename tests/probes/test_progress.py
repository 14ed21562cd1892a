"""Probe progress: the gain is what an independent count of rewards and log-probs gives, methods
start from one and the same model, and what cancels pays no tax.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

import counterpoise as cp
from counterpoise.cli import run_command
from counterpoise.ledger.calculus.snapshot import restore, snapshot
from counterpoise.policy import measure
from counterpoise.probes import open_scene, progress
from counterpoise.probes.fresh import Forward, fresh_batch, with_columns
from counterpoise.probes.output import Output
from counterpoise.probes.scene import Scene
from counterpoise.probes.updates import before_last_update
from counterpoise.rollouts import RolloutBatch
from counterpoise.trainer.loop import set_rate
from counterpoise.trainer.update import apply_update
from helpers.probe_run import small_run

SMALL = {"batches": 2, "held_out": 12, "methods": "dapo, {name: dapo, plan: query_preserved}, psr"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return small_run(tmp_path_factory.mktemp("progress") / "run", ledger_every=0)


@pytest.fixture(scope="module")
def scene(run: Path) -> Scene:
    return open_scene(run, 1, trust=True)


def logp_of(scene: Scene, collected: RolloutBatch) -> torch.Tensor:
    """Summed log-probs of rollouts under the present weights."""
    batch = collected.batch
    column = measure(
        scene.policy.model,
        collected.prompt_ids,
        batch.token_ids_NT,
        batch.mask_NT,
        {"trainer_logp_NT"},
        temperature=1.0,
    )
    return (column["trainer_logp_NT"] * batch.mask_NT).double().sum(1)


def test_gain_is_the_reweighted_reward_after_all_updates_of_the_batch(scene: Scene) -> None:
    """Rewards by hand: prompts of six rollouts, each against the mean of the other five."""
    model, config = scene.policy.model, scene.config
    held_out = fresh_batch(scene, "test", 0, 0, 24)
    row = progress.outcome(scene, held_out)

    before_N, saved = logp_of(scene, held_out), snapshot(model, scene.optimizer)
    for k, row_R in enumerate(scene.plan.updates):
        set_rate(scene.optimizer, config, scene.state.num_updates + k)
        rows = scene.method.rows(scene.collected.batch, scene.credit, row_R)
        apply_update(model, scene.optimizer, scene.method, rows, scene.collected, config)
    after_N = logp_of(scene, held_out)
    restore(saved, model, scene.optimizer)

    reward = held_out.batch.reward_N.tolist()
    gain = first = 0.0
    for i, (r, change) in enumerate(zip(reward, (after_N - before_N).tolist())):
        group = reward[i // 6 * 6 : i // 6 * 6 + 6]
        advantage = r - (sum(group) - r) / 5
        gain += advantage * (torch.tensor(change).double().exp().item() - 1) / len(reward)
        first += advantage * change / len(reward)
    assert row["updates"] == 2 and abs(first) > 1e-6
    assert row["gain"] == pytest.approx(gain, rel=1e-3)
    assert row["first_order"] == pytest.approx(first, rel=1e-3)
    assert row["length"] > 0 and row["kl"] > 0


def test_the_gain_is_the_change_of_the_expected_reward(scene: Scene) -> None:
    """With every rollout's ratio known, the mean gain over groups is that of the reward: ratios of
    a group that add up to its size move its mean reward by exactly the gain times (G - 1) / G.
    """
    collected = fresh_batch(scene, "test", 0, 0, 6)
    batch = collected.batch
    ratio_N = torch.tensor([1.5, 0.5, 1.2, 0.8, 1.0, 1.0], dtype=torch.float64)
    change_NT = torch.zeros(batch.mask_NT.shape, dtype=torch.float64)
    change_NT[:, 0] = ratio_N.log()
    scores = progress.Scores(0 * change_NT, change_NT, change_NT, None, None, 0.0)
    gain, first, carried = progress.progress(collected, scores).values()
    moved = float(((ratio_N - 1) * batch.reward_N.double()).mean())
    assert gain * 5 / 6 == pytest.approx(moved, abs=1e-6) and first != gain
    assert carried == pytest.approx(36 / (6 * float(ratio_N.square().sum())))


def test_a_method_starts_from_the_model_as_it_is(scene: Scene, run: Path, tmp_path: Path) -> None:
    """Alone or beside others a method has the same row, and the scene is as it was, bit for bit."""
    saved = snapshot(scene.policy.model, scene.optimizer)
    table = {}
    for name, methods in (("all", SMALL["methods"]), ("one", "psr")):
        output = Output(tmp_path, name, 1, {})
        progress.probe(scene, output, **{**SMALL, "methods": methods})
        table[name] = output.tables()["batch_0001"].set_index("method")
    pd.testing.assert_series_equal(table["all"].loc["psr"], table["one"].loc["psr"])
    assert table["all"]["gain"].nunique() == 3
    now = snapshot(scene.policy.model, scene.optimizer)
    assert all(torch.equal(now.tensors[name], value) for name, value in saved.tensors.items())
    assert now.settings == saved.settings
    assert str(now.slots) == str(saved.slots)


def test_without_momentum_an_update_is_that_of_its_own_gradient(scene: Scene) -> None:
    """AdamW with a first beta of 0 does not read the first moment."""
    held_out, lengths = fresh_batch(scene, "test", 0, 0, 12), {}
    saved = snapshot(scene.policy.model, scene.optimizer)
    for momentum in (True, False):
        for factor in (1.0, -3.0):
            for slot in scene.optimizer.state.values():
                slot["exp_avg"].mul_(factor)
            with progress.using_momentum(scene.optimizer, momentum):
                lengths[momentum, factor] = progress.outcome(scene, held_out)["length"]
            restore(saved, scene.policy.model, scene.optimizer)
    assert lengths[False, 1.0] == lengths[False, -3.0]
    assert lengths[True, 1.0] != lengths[True, -3.0]


def test_the_step_grows_with_the_rate(scene: Scene, tmp_path: Path) -> None:
    """AdamW's step is linear in the rate while the gradient is the same: at one update."""
    lengths = []
    for lr in (1e-5, 3e-5):
        output = Output(tmp_path, f"rate{lr}", 1, {})
        progress.probe(scene, output, **{**SMALL, "methods": "psr"}, updates=1, lr=lr)
        lengths.append(output.tables()["batch_0000"]["length"].item())
    assert lengths[1] == pytest.approx(3 * lengths[0], rel=1e-2)


def test_equal_weights_on_shared_tokens_pay_no_tax_and_unequal_ones_do(scene: Scene) -> None:
    """Forked groups, whole prompts: what REINFORCE with the group's mean brings to shared tokens
    cancels in the last update too; products of ratios leave something over.
    """
    rollouts = scene.config.rollouts.model_copy(update={"fork_tokens": 8})
    forked = scene._replace(config=scene.config.model_copy(update={"rollouts": rollouts}))
    forked = progress.at_rate(forked, 3e-4)
    batch = fresh_batch(forked, "test", 0, 0, 24)
    batch = with_columns(scene.policy.model, batch, frozenset(), Forward())
    spent = {}
    for name, loss in (
        ("reinforce", "reinforce"),
        ("product", {"name": "dfpo", "transform": "none", "weight": "product"}),
    ):
        one = progress.scene_of(forked, cp.method("dfpo_min", loss=loss), batch, None, 0, 4)
        with before_last_update(one):
            spent[name] = progress.spent_by(one)
    even, uneven = spent["reinforce"], spent["product"]
    assert even["num_shared"] >= 8 and even["kl_fork"] > 0
    assert abs(even["tax"]) < 1e-3 * even["kl_fork"] and 0 <= even["brought"] < 1e-10
    assert abs(uneven["tax"]) > 5 * abs(even["tax"]) and uneven["brought"] > 100 * even["brought"]


def test_numbers_are_means_over_batches_and_differences_are_paired() -> None:
    gains = {"a": [0.1, 0.3, 0.2], "b": [0.2, 0.4, 0.3]}
    tables = {
        f"batch_{k:04d}": pd.DataFrame(
            [
                {"batch": k, "method": m, "gain": g[k], "first_order": g[k], "own": 1.0, "kl": 0.5}
                | {
                    "updates": 4,
                    "length": 1.0,
                    "carried": 0.4,
                    "num_shared": 0,
                    "kl_shared": float("nan"),
                }
                | {"tax": float("nan"), "brought": float("nan"), "kl_fork": float("nan")}
                for m, g in gains.items()
            ]
        )
        for k in range(3)
    }
    numbers = progress.summarise(tables)
    gain, difference = (numbers["methods"]["b"][name] for name in ("gain", "difference"))
    assert gain["mean"] == pytest.approx(0.3) and gain["low"] == pytest.approx(0.0516, abs=1e-4)
    assert difference == {name: pytest.approx(0.1) for name in ("mean", "low", "high")}
    assert numbers["methods"]["b"]["tax"]["median"] is None and numbers["control"] == "a"
    table = progress.sheet(numbers)
    assert any(
        "2 of 2 methods: less than half of the held-out rollouts" in note for note in table.notes
    )
    assert [row[0] for row in table.rows] == ["b", "a"] and "tax" not in table.head
    assert len(progress.figure(numbers).data) == len(progress.PANELS)


def test_the_command_shows_a_table_and_goes_on_where_it_stopped(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["batches=2", "held_out=12", "updates=1", "momentum=false", "lr=1e-5"]
    chosen = [word for setting in chosen for word in ("--set", setting)]
    words = [str(run), "--batch", "1", "--probe", "progress", "--trust", *chosen]
    with pytest.raises(SystemExit, match="0"):
        run_command("probe", words)
    shown = capsys.readouterr().out
    assert "updates per batch: 1" in shown and "dapo, plan reward_balanced" in shown
    folder = run / "probes" / "progress" / "batch_000001"
    first = (folder / "batch_0000.parquet").stat().st_mtime_ns
    (folder / "batch_0001.parquet").unlink()
    with pytest.raises(SystemExit, match="0"):
        run_command("probe", words)
    assert (folder / "batch_0000.parquet").stat().st_mtime_ns == first
    assert (folder / "figure.html").is_file()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batches": 1}, "expected 2 or more"),
        ({"methods": "sdpo"}, "sdpo reads a teacher"),
        ({"methods": "oar"}, "oar reads importance_NT"),
    ],
)
def test_what_it_cannot_do_is_said(settings, message: str, scene: Scene, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        progress.probe(scene, Output(tmp_path, "progress", 1, {}), **{**SMALL, **settings})
