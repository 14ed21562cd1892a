"""Probes on a small real run: what they measure agrees with training, they leave everything as it
was, and they go on where they stopped.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from counterpoise import probes
from counterpoise.ledger.calculus.logprobs import of_model
from counterpoise.ledger.calculus.snapshot import snapshot
from counterpoise.probes import PROBES, exchangeability, pool, tax, try_update
from counterpoise.probes.counterfactual import (
    category_shares,
    enters,
    rank_correlations,
    share_difference,
)
from counterpoise.probes.drift import solution_bank
from counterpoise.probes.drift import summarise as summarise_drift
from counterpoise.probes.output import STRIDE
from counterpoise.probes.peer_masking import full_update, tau
from counterpoise.probes.runner import check_settings
from counterpoise.probes.updates import before_last_update
from counterpoise.probes.value import Candidates, match, prefix_values
from helpers.probe_run import small_run

# the run's task is a class of the tests
open_scene = functools.partial(probes.open_scene, trust=True)
run_probe = functools.partial(probes.run_probe, trust=True)
SMALL = {"coupling": {"targets": 3, "tokens": 200}, "value": {"pairs": 2, "samples": 2}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return small_run(tmp_path_factory.mktemp("probes") / "run")


@pytest.fixture(scope="module")
def scene(run: Path):
    return open_scene(run, 1)


def same(first, second) -> bool:
    """Two snapshots are equal bit for bit."""
    slots = zip(first.slots, second.slots)
    return (
        all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)
        and all((a is None) == (b is None) for a, b in slots)
        and all(torch.equal(a[k], b[k]) for a, b in zip(first.slots, second.slots) if a for k in a)
        and torch.equal(first.cpu_rng, second.cpu_rng)
        and first.settings == second.settings
        and not second.grads
    )


def test_full_update_is_the_one_that_training_made(run: Path, scene) -> None:
    change = try_update(scene, scene.rows)
    tokens = pd.read_parquet(run / "tokens" / "batch_000001.parquet")
    first = tokens[tokens["update"] == 0].set_index(["rollout", "position"])["delta"]
    rows = scene.rows
    ours = {
        (int(rows.row_R[r]), t): float(change.delta_RT[r, t])
        for r, t in rows.mask_NT.nonzero().tolist()
    }
    assert len(ours) == len(first) and first.abs().max() > 1e-3
    assert max(abs(first[key] - value) for key, value in ours.items()) < 2e-5


@pytest.mark.parametrize(
    "name", ["counterfactual", "coupling", "value", "exchangeability", "tax", "drift"]
)
def test_probe_leaves_model_and_optimizer_as_they_were(
    name: str, run: Path, scene, tmp_path: Path, monkeypatch
) -> None:
    before = snapshot(scene.policy.model, scene.optimizer)
    monkeypatch.setattr(
        "counterpoise.probes.runner.open_scene", lambda run_dir, batch_number, trust: scene
    )
    summary = run_probe(run, name, 1, SMALL.get(name), fresh=True)
    assert same(before, snapshot(scene.policy.model, scene.optimizer))
    folder = run / "probes" / name / "batch_000001"
    assert json.loads((folder / "summary.json").read_text())["numbers"] == json.loads(
        json.dumps(summary["numbers"])
    )
    assert "<html" in (folder / "figure.html").read_text()[:200]
    assert list(folder.glob("*.parquet"))


def test_flips_are_those_of_the_ledger(run: Path) -> None:
    numbers = run_probe(run, "flips", 1)["numbers"]
    tokens = pd.concat([pd.read_parquet(run / "tokens" / f"batch_{k:06d}.parquet") for k in (0, 1)])
    for side, sign in (("positive", 1), ("negative", -1)):
        expected = float(tokens[tokens["sign"] == sign]["is_flip"].astype(float).mean())
        assert numbers["flip"][side]["mean"] == pytest.approx(expected, rel=1e-5)
        assert numbers["flip"][side]["low"] <= expected <= numbers["flip"][side]["high"]


def test_without_plotly_there_are_numbers_and_a_word_about_the_figure(
    run: Path, monkeypatch
) -> None:
    monkeypatch.setattr("counterpoise.probes.output.importlib.util.find_spec", lambda name: None)
    summary = run_probe(run, "flips", 0, fresh=True)
    folder = run / "probes" / "flips" / "batch_000000"
    assert summary["no_figure"].startswith("plotly is not installed: pip install")
    assert json.loads((folder / "summary.json").read_text())["numbers"]["batches"] == [0]
    assert not (folder / "figure.html").exists()


def test_the_tax_is_that_of_the_last_update_against_a_control(run: Path, scene) -> None:
    """Against the ledger of the last update, and against training again without the tokens."""
    numbers = run_probe(run, "tax", 1, fresh=True)["numbers"]
    assert numbers["update"].startswith("the last, number 1")
    tokens = pd.read_parquet(run / "tokens" / "batch_000001.parquet")
    last = tokens[tokens["update"] == 1]
    table = pd.read_parquet(run / "probes" / "tax" / "batch_000001" / "contexts.parquet")
    full = table[table["variant"] == "full"]
    np.testing.assert_allclose(np.sort(full["kl"]), np.sort(last["kl"]), rtol=2e-2, atol=1e-9)
    kinds = {name for name in ("shared", "both_signs") if (full["context"] == name).any()}
    assert kinds
    for kind in kinds:
        with before_last_update(scene) as rows:
            is_it_RT = tax.contexts(scene, rows)[kind]
            control = try_update(scene, rows, rows.mask_NT & ~is_it_RT).scores.kl_NT
        spent = full[full["context"] == kind]["kl"].mean() - float(control[is_it_RT].mean())
        assert numbers["tax"][kind]["mean"] == pytest.approx(spent, rel=1e-4, abs=1e-12)
    for kind in {"shared", "both_signs"} - kinds:
        assert numbers["tax"][kind] == "no token of the update is of this kind"


def test_with_one_update_the_tax_says_that_it_is_the_first(scene) -> None:
    rows = torch.cat(list(scene.plan.updates))
    one = scene._replace(plan=type(scene.plan)([rows], scene.plan.manifest))
    columns = {"contexts": pd.DataFrame(tax.context_columns(one))}
    columns["lengths"] = pd.DataFrame({"fraction": [1.0], "kl": [1.0]})
    numbers = tax.summarise(columns)
    assert numbers["update"] == tax.FIRST and "first (and only)" in str(tax.figure(numbers).layout)


def test_a_tax_without_cancellation_is_the_whole_kl() -> None:
    """Two batches, in one of which nothing is shared: the control takes 1 of 3 nats there."""
    rows = [
        {"variant": variant, "update": 1, "group": group, "token": k, "context": kind, "kl": kl}
        for variant, kl in (("full", 3.0), ("shared_masked", 1.0))
        for group, kind in ((0, "shared"), (1, "shared"), (2, "shared"), (3, "other"))
        for k in range(2)
    ]
    rows += [{**rows[0], "group": STRIDE, "context": "other"}]
    assert tax.taxes(pd.DataFrame(rows)) == {
        "shared": {"mean": 2.0, "low": 2.0, "high": 2.0},
        "both_signs": "no token of the update is of this kind",
    }


def test_masked_gradient_equals_the_step_without_those_tokens(scene) -> None:
    """tau by subtracting the peers' gradient against tau from training again with their scale at 0;
    clipping is off in this run.
    """
    rows, model = scene.rows, scene.policy.model
    full = try_update(scene, rows)
    texts = scene.texts(rows.row_R)
    update = full_update(
        model, scene.optimizer, of_model(model, texts), full.update.loss.coef_NT * rows.scale_NT
    )
    entropy = torch.where(rows.mask_NT, full.scores.entropy_NT, -1)
    order = entropy.flatten().argsort(descending=True)[:4].tolist()
    target, *peers = [(k // entropy.shape[1], k % entropy.shape[1]) for k in order]
    enters_RT = rows.mask_NT.clone()
    for peer in peers:
        enters_RT[peer] = False
    expected = float(full.delta_RT[target] - try_update(scene, rows, enters_RT).delta_RT[target])
    assert abs(expected) > 1e-4
    assert tau(update, target, peers) == pytest.approx(expected, abs=2e-5)


def test_positives_only_lets_no_negative_token_in(scene) -> None:
    rows = scene.rows
    update = try_update(scene, rows, enters(rows, (1,))).update
    entered = update.rows.scale_NT != 0
    assert bool(entered[rows.advantage_N > 0].any()) and not bool(
        entered[rows.advantage_N <= 0].any()
    )


def test_empty_class_says_so(scene) -> None:
    with pytest.raises(
        ValueError, match="no token of batch 1 has the advantage that this update is made of"
    ):
        try_update(scene, scene.rows, torch.zeros_like(scene.rows.mask_NT))


def test_goes_on_where_it_stopped(run: Path) -> None:
    run_probe(run, "tax", 0)
    folder = run / "probes" / "tax" / "batch_000000"
    first = pd.read_parquet(folder / "contexts.parquet")
    stamp = (folder / "contexts.parquet").stat().st_mtime_ns
    (folder / "lengths.parquet").unlink()
    summary = run_probe(run, "tax", 0)
    assert (folder / "contexts.parquet").stat().st_mtime_ns == stamp
    pd.testing.assert_frame_equal(first, pd.read_parquet(folder / "contexts.parquet"))
    law = summary["numbers"]["kl_of_fraction_over_kl_of_step"]
    assert law["0.5"] == pytest.approx(0.25, rel=0.15) and law["1.0"] == 1.0


def test_other_settings_need_fresh(run: Path) -> None:
    run_probe(run, "drift", 0, {"size": 4})
    with pytest.raises(ValueError, match="begun with other settings"):
        run_probe(run, "drift", 0, {"size": 5})


@pytest.mark.parametrize(
    "wrong", [{"samples": 0}, {"samples": True}, {"same_prompt": 1}, {"seed": -1}]
)
def test_a_wrong_setting_drops_nothing_that_is_there(run: Path, wrong: dict) -> None:
    run_probe(run, "value", 0, SMALL["value"])
    (name,) = wrong
    with pytest.raises(ValueError, match=f"probe value: {name} must be"):
        run_probe(run, "value", 0, SMALL["value"] | wrong, fresh=True)
    assert (run / "probes" / "value" / "batch_000000" / "summary.json").is_file()
    run_probe(run, "value", 0, SMALL["value"])


def test_a_change_that_does_not_vary_has_no_rank_correlation() -> None:
    """The head alone changes nothing where it is not trained (adapters)."""
    moves, stands = (
        pd.DataFrame({"delta": [0.1, -0.2, 0.3]}),
        pd.DataFrame({"delta": [0.0, 0.0, 0.0]}),
    )
    assert list(rank_correlations([moves, moves, stands]).values()) == [1.0, 1.0, None]


def test_drift_is_zero_at_the_first_checkpoint(run: Path) -> None:
    numbers = run_probe(run, "drift", 1, fresh=True)["numbers"]
    assert numbers["batches"] == [0, 1]
    assert (
        numbers["log_odds_change"]["0"]["mean"] == 0 and numbers["log_odds_change"]["1"]["mean"] > 0
    )
    assert numbers["slope"]["0"]["mean"] == 0 and numbers["slope"]["1"]["mean"] != 0


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.7])
def test_sharpening_by_a_factor_has_that_slope_and_a_walk_has_none(factor: float) -> None:
    """2,000 prompts whose log-odds are multiplied, and the same after a walk of 3 nats."""
    rng = np.random.default_rng(0)
    start, walk = 4 * rng.normal(size=2000), 3 * rng.normal(size=2000)
    columns = {"prompt": np.arange(2000), "start": start, "entropy": np.zeros(2000)}
    rows = [
        pd.DataFrame({**columns, "batch": batch, "log_odds": factor * start + k * walk})
        for batch, k in ((1, 0), (2, 1), (3, 2))
    ]
    numbers = summarise_drift({"bank": pd.concat(rows)})
    exact, noisy, noisier = (numbers["slope"][name] for name in "123")
    assert exact["mean"] == pytest.approx(factor - 1, abs=1e-6)
    for one in (noisy, noisier):
        assert one["low"] < factor - 1 < one["high"] and one["high"] - one["low"] < 0.15
    size = [numbers["log_odds_change"][name]["mean"] for name in "123"]
    assert size[0] < size[1] < size[2]  # also where nothing is sharpened (factor 1)


def test_bank_without_two_solutions(scene, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two distinct verified solutions"):
        solution_bank(scene._replace(run_dir=tmp_path), 8)


def test_exchangeable_losses_leave_shared_tokens_alone(run: Path) -> None:
    numbers = run_probe(run, "exchangeability", 1)["numbers"]
    assert numbers["reinforce"]["num_nodes"] > 0
    for name in ("reinforce", "token ratio", "DFPO min"):
        assert numbers[name]["mean"] < 1e-6
    for name in ("sequence ratio", "reinforce, per-sequence mean"):
        assert numbers[name]["mean"] > 1e-5


def test_nodes_where_a_loss_clips_everybody_have_no_excess() -> None:
    """Two prompts, each with a node that keeps the residual of equal weights, one that misses it by
    0.1, one where nobody is left.
    """
    nodes = [
        {
            "loss": loss,
            "group": group,
            "node": node,
            "of_advantage": plain,
            "is_full": False,
            "residual": left,
        }
        for loss in exchangeability.LOSSES
        for group in (0, 1)
        for node, (plain, left) in enumerate([(0.5, 0.5), (0.5, 0.6), (0.5, 0.0)])
    ]
    numbers = exchangeability.summarise({"nodes": pd.DataFrame(nodes)})
    assert all((one["num_nodes"], one["num_empty"]) == (6, 2) for one in numbers.values())
    assert numbers["token ratio, symmetric clip"]["mean"] == pytest.approx(0.05)


def test_value_of_a_finished_prefix_is_its_reward(scene) -> None:
    """A prefix that is one token short of the limit can only be graded as it stands, whatever is
    sampled.
    """
    row = int(scene.rows.row_R[0])
    batch = scene.collected.batch
    ids = batch.token_ids_NT[row][batch.mask_NT[row]].tolist()
    short = scene._replace(
        config=scene.config.model_copy(
            update={
                "rollouts": scene.config.rollouts.model_copy(
                    update={"max_new_tokens": len(ids) - 1}
                )
            }
        )
    )
    (value,) = prefix_values(short, [row], [ids[:-1]], samples=3, seed=0)
    text = scene.policy.tokenizer.decode(ids[:-1], skip_special_tokens=True)
    assert value == scene.task.reward(scene.collected.prompts[int(batch.group_N[row])], text)


def test_matching_takes_the_nearest() -> None:
    boosted = Candidates(np.array([0, 0]), np.array([1, 9]), np.array([0.1, 0.9]), np.array([7, 7]))
    suppressed = Candidates(
        np.array([1, 1, 1]), np.array([8, 2, 5]), np.array([0.8, 0.2, 0.5]), np.array([4, 4, 7])
    )
    assert sorted(match(boosted, suppressed, 2, 0)) == [(0, 1), (1, 0)]
    assert sorted(match(suppressed, boosted, 2, 0)) == [(0, 1), (1, 0)]


@pytest.mark.parametrize("seed", range(4))
def test_matching_within_a_prompt_takes_no_nearer_token_of_another(seed: int) -> None:
    """The token at 9 has its own prompt's partner far away, that at 5 none at all: two of the rarer
    kind are drawn, one pair is left.
    """
    boosted = Candidates(
        np.array([0, 0, 1]), np.array([1, 9, 5]), np.array([0.1, 0.9, 0.5]), np.array([7, 7, 2])
    )
    suppressed = Candidates(
        np.array([1, 2, 2, 2]),
        np.array([2, 8, 1, 3]),
        np.array([0.2, 0.8, 0.1, 0.3]),
        np.array([7, 4, 4, 4]),
    )
    assert match(boosted, suppressed, 2, seed, same_prompt=True) == [(0, 0)]
    assert match(suppressed, boosted, 2, seed, same_prompt=True) == [(0, 0)]
    alone = suppressed._replace(group=np.array([4, 4, 4, 4]))
    assert match(boosted, alone, 2, seed, same_prompt=True) == []


def test_pooled_shares_do_not_weigh_steps_by_their_size() -> None:
    """Reasoning has 3/4 of each variant's change at the first batch and 1/4 at the second;
    positives only change ten times as much at the first.
    """

    def rows(variant: str, sizes: tuple[float, float]) -> list[dict]:
        shares = ((("reasoning", 3.0), ("template", 1.0)), (("reasoning", 1.0), ("template", 3.0)))
        return [
            {
                "variant": variant,
                "group": batch_number * STRIDE + prompt,
                "category": name,
                "delta": -share * sizes[batch_number],
            }
            for batch_number in (0, 1)
            for prompt in (0, 1, 2)
            for name, share in shares[batch_number]
        ]

    table = pd.DataFrame(rows("full", (1.0, 1.0)) + rows("positives", (10.0, 1.0)))
    found = share_difference(table, "full", "positives")
    assert found["reasoning"] == pytest.approx({"mean": 0.0, "low": 0.0, "high": 0.0}, abs=1e-12)
    assert category_shares(table)["positives"]["template"]["mean"] == pytest.approx(0.5)


def test_pooled_steps_count_prompts_apart(run: Path) -> None:
    run_probe(run, "exchangeability", 0)
    run_probe(run, "exchangeability", 1)
    parts = [
        pd.read_parquet(run / "probes" / "exchangeability" / f"batch_{k:06d}" / "nodes.parquet")
        for k in (0, 1)
    ]
    pooled = pool(run, "exchangeability")
    both = pd.concat([part[part["loss"] == "sequence ratio"] for part in parts])
    assert pooled["batches"] == [0, 1]
    assert pooled["numbers"]["sequence ratio"]["num_nodes"] == len(both)
    assert pooled["numbers"]["sequence ratio"]["mean"] == pytest.approx(
        float((both["residual"] - both["of_advantage"]).abs().mean()), rel=1e-5
    )


@pytest.mark.parametrize(
    ("name", "batch_number", "settings", "message"),
    [
        ("counterfactual", 7, {}, "no checkpoint of batch 7 \\(batches with both: 0, 1\\)"),
        ("flip", 1, {}, "unknown probe 'flip'. Did you mean 'flips'"),
        ("value", 1, {"pair": 3}, "unknown setting 'pair'. Did you mean 'pairs'"),
        ("value", 1, {"pairs": "many"}, "pairs must be a whole number"),
        ("flips", 7, {}, "no ledger table of batch 7 \\(there are: 0, 1\\)"),
    ],
)
def test_bad_input_is_one_line(
    name: str, batch_number: int, settings: dict, message: str, run: Path
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        run_probe(run, name, batch_number, settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("default", "good", "bad"),
    [
        (False, (False, True), (0, 1, "false")),
        (4, (1, 9), (0, -1, 1.5, True, "4", None)),
        (0.0, (1, 3e-5), (0, -1.0, True, "1e-5", None)),
    ],
)
def test_a_setting_is_of_its_defaults_kind(default, good, bad) -> None:
    for value in good:
        assert check_settings("value", {"it": value}, {"it": default}) == {"it": value}
    for value in bad:
        with pytest.raises(ValueError, match="probe value: it must be"):
            check_settings("value", {"it": value}, {"it": default})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("drift", "covers the run up to its batch already"),
        ("taxes", "Did you mean 'tax'"),
        ("value", "was not run at any batch yet"),
    ],
)
def test_nothing_to_pool(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        pool(tmp_path, name)


def test_missing_column_is_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    pd.read_parquet(run / "tokens" / "batch_000001.parquet").drop(columns="is_flip").to_parquet(
        tmp_path / "tokens" / "batch_000001.parquet"
    )
    with pytest.raises(ValueError, match="no column 'is_flip'"):
        run_probe(tmp_path, "flips", 1)


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run here"):
        run_probe(tmp_path, "tax", 0)


def test_every_probe_says_what_it_is() -> None:
    assert {name for name, probe in PROBES.items() if probe.help and callable(probe.run)} == set(
        PROBES
    )
    assert PROBES["value"].settings == {"pairs": 40, "samples": 8, "seed": 0, "same_prompt": False}
