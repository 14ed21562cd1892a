"""Credit on the first wrong token: by hand, against the control, and through the command."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import counterpoise as cp
from counterpoise.cli import run_command
from counterpoise.policy import load_model
from counterpoise.probes import first_error_tokens, localise, open_scene
from counterpoise.probes.localisation import scene_rows
from counterpoise.rollouts import RolloutBatch
from counterpoise.tasks.arithmetic import Arithmetic, demonstration
from counterpoise.types import TokenBatch
from helpers.probe_run import small_run


def four_rollouts() -> TokenBatch:
    """Two prompts, each with a success and a failure of four and of five tokens."""
    lengths = (3, 4, 2, 5)
    return TokenBatch.from_lists(
        [list(range(n)) for n in lengths],
        group=[0, 0, 1, 1],
        reward=[1.0, 0.0, 1.0, 0.0],
        sampler_logp=[[-0.1] * 3, [-0.1, -3.0, -0.1, -0.2], [-0.1] * 2, [-0.1] * 4 + [-2.0]],
        entropy=[[0.3] * n for n in lengths],
    )


ERROR_N = torch.tensor([0, 1, -1, 4])  # the first rollout is a success and does not enter


def test_uniform_credit_is_chance():
    credit_NT = cp.method("dapo").assign(four_rollouts()).credit_NT
    numbers = localise(four_rollouts(), {"dapo": credit_NT}, ERROR_N)
    assert numbers["num_rollouts"] == 2
    for one in (numbers["rules"]["dapo"], numbers["references"]["uniform"]):
        assert one["share"]["mean"] == pytest.approx((1 / 4 + 1 / 5) / 2)
        assert one["above_uniform"]["mean"] == pytest.approx(0, abs=1e-6)
        assert one["auroc"]["mean"] == 0.5
        assert one["num_without"] == 0


def test_all_credit_on_the_error_is_perfect_and_elsewhere_the_worst():
    batch = four_rollouts()
    hit_NT = torch.zeros(batch.mask_NT.shape)
    hit_NT[1, 1] = hit_NT[3, 4] = -1.0
    credits = {"right": hit_NT, "wrong": -(batch.mask_NT.float() + hit_NT)}
    rules = localise(batch, credits, ERROR_N)["rules"]
    for measure in ("share", "auroc", "reciprocal_rank"):
        assert rules["right"][measure]["mean"] == 1
    assert rules["wrong"]["share"]["mean"] == rules["wrong"]["auroc"]["mean"] == 0
    assert rules["wrong"]["reciprocal_rank"]["mean"] == pytest.approx((1 / 4 + 1 / 5) / 2)


def test_positive_credit_in_a_failed_rollout_is_no_negative_credit():
    """Credit (+5, -1, -3, 0) with the error at the second token: a quarter of the negative mass,
    below one of three others.
    """
    batch = four_rollouts()
    credit_NT = torch.zeros(batch.mask_NT.shape)
    credit_NT[1, :4] = torch.tensor([5.0, -1.0, -3.0, 0.0])
    one = localise(batch, {"x": credit_NT}, torch.tensor([-1, 1, -1, -1]))["rules"]["x"]
    assert one["share"]["mean"] == 0.25
    assert one["auroc"]["mean"] == pytest.approx(2 / 3, rel=1e-5)
    assert one["reciprocal_rank"]["mean"] == 0.5


def test_rollouts_without_negative_credit_are_counted_and_in_no_mean():
    batch = four_rollouts()
    credit_NT = torch.zeros(batch.mask_NT.shape)
    credit_NT[1, 1] = -1.0
    one = localise(batch, {"x": credit_NT}, ERROR_N)["rules"]["x"]
    assert (one["num_without"], one["share"]["mean"], one["auroc"]["mean"]) == (1, 1.0, 1.0)
    nothing = localise(batch, {"x": 0 * credit_NT}, ERROR_N)["rules"]["x"]
    assert nothing == {"num_without": 2}


def test_surprise_finds_the_surprising_token():
    references = localise(four_rollouts(), {}, ERROR_N)["references"]
    for name in ("-logp", "1 - p", "max(0, -logp - entropy)"):
        assert references[name]["reciprocal_rank"]["mean"] == 1
    assert references["max(0, -logp - entropy)"]["share"]["mean"] == 1
    assert references["entropy"]["auroc"]["mean"] == 0.5


def test_the_token_of_a_changed_number_is_that_of_its_digit():
    """Demonstrations with one digit changed, encoded by the bundled tokenizer with a stop token."""
    policy, task, rng = load_model("bundled"), Arithmetic(), random.Random(0)
    prompts = [next(task.prompts("train", seed)) for seed in range(20)]
    texts, ids, expected = [], [], []
    for prompt in prompts:
        text = demonstration(prompt, rng)
        at = rng.choice([k for k, letter in enumerate(text) if letter.isdigit()])
        text = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
        row = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
        pieces = [policy.tokenizer.decode([one]) for one in row]
        expected.append([k for k, piece in enumerate(pieces) for _ in piece][at])
        texts.append(text)
        ids.append([*row, policy.stop_ids[0]])
    batch = TokenBatch.from_lists(
        ids,
        group=list(range(20)),
        reward=[0.0] * 20,
        sampler_logp=[[-1.0] * len(row) for row in ids],
    )
    rollouts = RolloutBatch(prompts, [[1]] * 20, texts, ["stop"] * 20, batch, 0, [])
    assert first_error_tokens(policy, task, rollouts).tolist() == expected


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return small_run(tmp_path_factory.mktemp("localisation") / "run", ledger_every=0)


def test_the_command_prints_a_table_and_leaves_numbers_and_a_figure(run: Path, capsys):
    words = [str(run), "--probe", "localisation", "--trust", "--methods", "dapo, crf_ntf"]
    with pytest.raises(SystemExit, match="0"):
        run_command("probe", words)
    shown = capsys.readouterr().out
    folder = run / "probes" / "localisation" / "batch_000001"
    numbers = json.loads((folder / "summary.json").read_text())["numbers"]
    assert list(numbers["rules"]) == ["dapo", "crf_ntf"]
    assert f"{numbers['num_rollouts']} failed rollouts with a known first error" in shown
    assert "crf_ntf" in shown and "(1 - p)" in shown
    assert "<html" in (folder / "figure.html").read_text()[:200]
    table = pd.read_parquet(folder / "rollouts.parquet")
    control = table[table["is_reference"] & (table["rule"] == "uniform")]
    assert np.allclose(control["share"], 1 / control["length"])
    assert (control["position"] < control["length"]).all()


def test_a_task_that_does_not_tell_is_one_line(run: Path):
    scene = open_scene(run, 1, trust=True)._replace(task=object())
    with pytest.raises(ValueError, match=r"does not say where an answer goes wrong.*first_error"):
        scene_rows(scene, "dapo")
