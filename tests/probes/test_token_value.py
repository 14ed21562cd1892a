"""Credit against the true advantage of tokens: known truths, noise taken out, tables that go on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from counterpoise.cli import run_command
from counterpoise.maths.reduce import seeded_generator
from counterpoise.probes import compare_values, open_scene, pool, token_value
from counterpoise.probes.methods import assign, methods_of, sample_more
from counterpoise.probes.scene import Scene
from counterpoise.probes.token_draw import STRATA, draw_tokens, strata
from counterpoise.probes.token_numbers import token_numbers
from counterpoise.probes.token_value import advantages, node_values, other_tokens
from counterpoise.tasks.arithmetic import Arithmetic
from counterpoise.types import Prompt, TokenBatch
from helpers.probe_run import small_run


@dataclasses.dataclass(frozen=True)
class Opening(Arithmetic):
    """The first word decides: 1 for answers that open with "Let", else 0."""

    is_trusted = True

    def reward(self, prompt: Prompt, text: str) -> float:
        return float(text.startswith("Let"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return small_run(tmp_path_factory.mktemp("token_value") / "run", ledger_every=0)


@pytest.fixture(scope="module")
def scene(run: Path) -> Scene:
    return open_scene(run, 1, trust=True)


def test_the_first_word_has_the_value_that_is_known(scene: Scene):
    """Where the first token decides, its advantage is 1 - P(Let) for "Let" and -P(Let) for others,
    and later tokens change nothing.
    """
    scene = scene._replace(task=Opening())
    texts, batch = scene.collected.texts, scene.collected.batch
    first = {text.split()[0]: row for row, text in reversed(list(enumerate(texts)))}
    places = [(row, 0) for row in first.values()] + [(0, 3), (1, 10)]
    values = node_values(scene, places, 64, 0, 0)
    let = next((float(batch.sampler_logp_NT[r, 0].exp()) for w, r in first.items() if w == "Let"))
    for word, (_, _, value, se, with_token) in zip(first, values):
        is_let = word == "Let"
        assert with_token == is_let
        assert value == pytest.approx(1 - let if is_let else -let, abs=1e-4 if is_let else 0.06)
        assert se < 0.05
    assert [one[2] for one in values[len(first) :]] == [0.0, 0.0]


def test_other_tokens_are_drawn_from_the_rest(scene: Scene):
    batch = scene.collected.batch
    most = int((batch.column("entropy_NT") * batch.mask_NT).argmax())
    row, at = divmod(most, batch.mask_NT.shape[1])
    others, rest = other_tokens(scene, [(row, at)], 400, 0)
    token = int(batch.token_ids_NT[row, at])
    assert token not in others[0] and len(others[0]) == 400
    assert rest[0] == pytest.approx(1 - float(batch.sampler_logp_NT[row, at].exp()), abs=1e-4)
    assert len(set(others[0])) > 1


def test_advantages_have_their_mean_and_the_noise_that_is_said():
    """5,000 tokens with p = 0.7 and values 0.9 and 0.4: (1 - p) (0.9 - 0.4) = 0.15."""
    rng = np.random.default_rng(0)
    taken, away = ((rng.random((5000, 32)) < chance).astype(float) for chance in (0.9, 0.4))
    rows = advantages(taken, away, np.full(5000, 0.3), torch.tensor([0.0, 1.0]))
    first, second, value, se, _ = np.array(rows).T
    assert value.mean() == pytest.approx(0.15, abs=0.002)
    assert np.std(value) == pytest.approx(np.sqrt((se**2).mean()), rel=0.12)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert np.allclose(value, (first + second) / 2)


def test_whole_answers_are_graded_as_they_are(scene: Scene):
    """The value after a stop token is the reward of the rollout."""
    batch, stops = scene.collected.batch, torch.tensor(scene.policy.stop_ids)
    row, at = torch.isin(batch.token_ids_NT, stops).logical_and(batch.mask_NT).nonzero()[0].tolist()
    (_, _, _, _, with_token) = node_values(scene, [(row, at)], 4, 0, 0)[0]
    assert with_token == float(batch.reward_N[row])


def test_strata_hold_every_token_and_weights_add_up_to_them(scene: Scene):
    batch = scene.collected.batch
    first_error_N = torch.full_like(batch.group_N, -1)
    failed = int((~batch.is_success_N).nonzero()[0])
    first_error_N[failed] = 2
    stratum_NT = strata(batch, first_error_N)
    assert bool(((stratum_NT >= 0) == batch.mask_NT).all())
    assert stratum_NT[failed, 2] == STRATA.index("first error")
    drawn = pd.DataFrame(draw_tokens(batch, stratum_NT, 20, seeded_generator(0, 0, "x")))
    assert drawn["weight"].sum() == pytest.approx(int(batch.mask_NT.sum()))
    assert not drawn.duplicated(["row", "position"]).any()
    for name, part in drawn.groupby("stratum"):
        size = int((stratum_NT == STRATA.index(str(name))).sum())
        assert part["weight"].sum() == pytest.approx(size)
    assert ((drawn["stratum"] == "sure") == (1 - drawn["probability"] <= 1e-4)).mean() > 0.95


def made(num: int, noise: float, seed: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    """Tokens of 40 prompts: a tenth decide (+-0.5), the others change nothing; noisy halves."""
    rng = np.random.default_rng(seed)
    truth = rng.choice([-0.5, 0.0, 0.5], num, p=[0.05, 0.9, 0.05])
    halves = truth + noise * rng.normal(size=(2, num))
    columns = {"half_1": halves[0], "half_2": halves[1], "value": halves.mean(0)}
    more = {"se": noise / np.sqrt(2), "weight": 1.0, "band": 0.05, "group": np.arange(num) % 40}
    return pd.DataFrame(columns | more), truth


def against(table: pd.DataFrame, **credits: np.ndarray) -> dict:
    zero, uniform = np.zeros(len(table)), {"uniform": (np.ones(len(table)), np.zeros(len(table)))}
    return token_numbers(table, {name: (c, zero) for name, c in credits.items()}, uniform)


def test_the_truth_itself_is_perfect_and_noise_is_taken_out_of_the_cosine():
    """A credit whose cosine with the truth is known, seen through more noise than signal."""
    table, truth = made(2000, 0.3)
    mixed = truth + np.random.default_rng(1).normal(size=len(truth)) * truth.std()
    rules = against(table, truth=truth, mixed=mixed)["rules"]
    known = truth @ mixed / np.linalg.norm(truth) / np.linalg.norm(mixed)
    noisy = table["value"] @ mixed / np.linalg.norm(table["value"]) / np.linalg.norm(mixed)
    assert noisy < known - 0.2
    assert rules["truth"]["cosine"]["mean"] == pytest.approx(1, abs=0.06)
    assert rules["mixed"]["cosine"]["mean"] == pytest.approx(known, abs=0.06)
    assert rules["mixed"]["cosine"]["low"] < known < rules["mixed"]["cosine"]["high"]


def test_without_noise_every_measure_of_the_truth_is_perfect():
    table, truth = made(2000, 1e-4)
    numbers = against(table, truth=truth, against=-truth)
    rules, one = numbers["rules"], numbers["rules"]["truth"]
    assert one["cosine"]["mean"] == pytest.approx(1, abs=1e-3)
    assert (one["sign_agreement"]["mean"], one["null_credit"]["mean"]) == (1, 0)
    assert one["auroc"]["mean"] > 0.9 and one["silent"]["mean"] == 0
    assert rules["against"]["sign_agreement"]["mean"] == 0
    assert numbers["references"]["uniform"]["null_credit"]["mean"] == pytest.approx(
        (truth == 0).mean(), rel=1e-5
    )


def test_ranks_are_corrected_only_where_the_values_are_reliable():
    """Normal truths with as much noise: the corrected rank correlation is near the true one."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=2000)
    for noise, is_enough in ((0.7, True), (9.0, False)):
        halves = truth + noise * rng.normal(size=(2, len(truth)))
        columns = {"half_1": halves[0], "half_2": halves[1], "value": halves.mean(0)}
        more = {"se": noise / 2**0.5, "weight": 1.0, "band": 0.05, "group": np.arange(2000) % 40}
        numbers = against(pd.DataFrame(columns | more), truth=truth)
        rank, fixed = (
            numbers["rules"]["truth"][name]["mean"]
            for name in ("rank_correlation", "rank_correlation_corrected")
        )
        assert (fixed is not None) == is_enough == (not numbers["truth"]["notes"])
        if is_enough:
            assert rank < 0.93 and fixed == pytest.approx(1, abs=0.02)


def test_weights_undo_the_draw():
    """A tenth of the tokens that change nothing, ten times as heavy, give the numbers of all."""
    table, truth = made(2000, 0.02)
    credit = truth + 0.3 * np.random.default_rng(2).normal(size=len(truth))
    keep = (truth != 0) | (np.random.default_rng(3).random(len(truth)) < 0.1)
    part = pd.DataFrame(table[keep])
    weighted = part.assign(weight=np.where(truth == 0, 10.0, 1.0)[keep])
    whole, drawn, plain = (
        against(t, x=c)["rules"]["x"]
        for t, c in ((table, credit), (weighted, credit[keep]), (part, credit[keep]))
    )
    for name in ("cosine", "null_credit"):
        assert drawn[name]["mean"] == pytest.approx(whole[name]["mean"], abs=0.06)
        assert abs(plain[name]["mean"] - whole[name]["mean"]) > 0.2


def test_uniform_credit_says_nothing_within_rollouts():
    batch = TokenBatch.from_lists(
        [[5, 6]] * 4, group=[0, 0, 1, 1], reward=[1.0, 0.0] * 2, sampler_logp=[[-0.1, -0.7]] * 4
    )
    half = [0.1, 0.4, -0.2, -0.3] * 2
    values = {"row": np.repeat(range(4), 2), "position": [0, 1] * 4, "half_1": half, "half_2": half}
    numbers = compare_values(batch, {}, values | {"se": [0.01] * 8})
    assert numbers["references"]["uniform"]["cosine_within"]["mean"] is None
    assert numbers["references"]["1 - p"]["cosine_within"]["mean"] > 0


def test_tokens_at_one_node_are_valued_once(scene: Scene, monkeypatch):
    """Rollouts of a prompt that begin with the same word share its value."""
    calls: list[list[tuple[int, int]]] = []
    plain = node_values

    def count(scene, places, *rest):
        calls.append(places)
        return plain(scene, places, *rest)

    monkeypatch.setattr(token_value, "node_values", count)
    batch = scene.collected.batch
    rows = list(range(batch.num_rollouts))
    drawn = pd.DataFrame({"group": batch.group_N.tolist(), "row": rows, "position": 0})
    drawn["probability"] = batch.sampler_logp_NT[:, 0].exp().tolist()
    table = pd.DataFrame(token_value.value_columns(scene, drawn, 4, 0, 0))
    nodes = list(zip(batch.group_N.tolist(), batch.token_ids_NT[:, 0].tolist()))
    assert len(calls[0]) == len(set(nodes)) < len(nodes)
    assert (table.groupby([str(node) for node in nodes])["value"].nunique() == 1).all()


def test_the_command_goes_on_where_it_stopped_and_batches_are_pooled(run: Path, capsys):
    words = ["--probe", "token_value", "--trust", "--methods", "dapo, crf_ntf"]
    words += ["--set", "tokens=16", "--set", "samples=4"]
    for batch in ("0", "1"):
        with pytest.raises(SystemExit, match="0"):
            run_command("probe", [str(run), "--batch", batch, *words])
    folder = run / "probes" / "token_value" / "batch_000001"
    shown, first = capsys.readouterr().out, json.loads((folder / "summary.json").read_text())
    assert "crf_ntf" in shown and "tokens drawn" in shown
    assert list(first["numbers"]["rules"]) == ["dapo", "crf_ntf"]
    stamp = (folder / "values_01.parquet").stat().st_mtime_ns
    (folder / "values_00.parquet").unlink()
    with pytest.raises(SystemExit, match="0"):
        run_command("probe", [str(run), "--batch", "1", *words])
    assert (folder / "values_01.parquet").stat().st_mtime_ns == stamp
    assert json.loads((folder / "summary.json").read_text()) == first
    assert "<html" in (folder / "figure.html").read_text()[:200]
    both = pool(run, "token_value")["numbers"]["truth"]["num_tokens"]
    parts = [pd.read_parquet(p) for p in (run / "probes" / "token_value").glob("*/tokens.parquet")]
    assert both == sum(map(len, parts))


def test_a_method_that_samples_more_gets_its_corrections_and_nothing_else_changes(scene: Scene):
    """IBPO with corrections: the credit of the saved rows is that of the batch with the added ones,
    and other methods do not see them.
    """
    methods = methods_of("{name: ibpo, credit: {corrections: 4}}, ibpo, dapo")
    label, plain, _ = methods
    state = torch.get_rng_state()
    assigned = assign(scene, methods)
    assert torch.equal(state, torch.get_rng_state())
    more = sample_more(scene, methods[label])
    num, width = scene.collected.batch.mask_NT.shape
    assert more.batch.num_rollouts > num
    whole = methods[label].assign(
        more.batch, seed=scene.config.seed, batch_number=scene.batch_number
    )
    assert torch.equal(assigned[label].credit.credit_NT, whole.credit_NT[:num, :width])
    others = assigned[plain].credit.advantage_N
    assert torch.equal(assigned[label].credit.advantage_N, whole.advantage_N[:num])
    assert not torch.equal(whole.advantage_N[:num], others)  # corrections raise the group's mean
    for one in assigned.values():
        assert one.batch.mask_NT.shape == one.credit.credit_NT.shape == (num, width)
