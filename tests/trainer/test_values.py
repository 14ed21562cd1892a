"""Values of prefixes by fresh completions: what is sampled, whether it is right and repeatable."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import counterpoise as cp
from counterpoise.policy import load_model
from counterpoise.policy.offsets import tokens_from
from counterpoise.probes import open_scene
from counterpoise.probes.methods import assign, every_preset, methods_of
from counterpoise.probes.value import prefix_values
from counterpoise.run import checkpoint
from counterpoise.run.read import read_jsonl
from counterpoise.run.rollouts import read_rollouts
from counterpoise.tasks.arithmetic import Arithmetic
from counterpoise.trainer.collect import RolloutSampler, collect, measure_columns
from counterpoise.trainer.completions import State, alike
from counterpoise.trainer.config import ConfigError, parse_config
from counterpoise.trainer.loop import train
from counterpoise.types import Prompt

SMALL = {
    "model": "bundled",
    "task": {"name": "arithmetic"},
    "num_batches": 3,
    "rollouts": {"prompts": 3, "group_size": 4, "max_new_tokens": 80},
    "optimizer": {"lr": 1e-4, "updates_per_batch": 2},
    "eval": {"every": 0},
    "ledger": {"every": 0},
    "checkpoint_every": 1,
    "keep_every": 1,
    "save_rollouts_every": 1,
    "trackers": [],
}
VINE = {"name": "vine_ppo", "credit": {"samples": 3}}


def recipe(run_dir: Path, **more) -> dict:
    return {**SMALL, "run_dir": str(run_dir), **more}


def go(run_dir: Path, resume: bool = False, **more) -> Path:
    train(parse_config(recipe(run_dir, **more)), resume=resume)
    return run_dir


@pytest.fixture(scope="module")
def policy():
    torch.set_num_threads(1)
    return load_model("bundled", dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return go(tmp_path_factory.mktemp("values") / "run", method=VINE)


def collected(policy, task, tmp_path, method, **rollouts):
    settings = {**SMALL["rollouts"], **rollouts}
    config = parse_config(recipe(tmp_path / "run", method=method, rollouts=settings))
    chosen = cp.method(**config.method)
    sampler = RolloutSampler(policy, task, config, 0, needs=chosen.needs)
    return collect(chosen, sampler), sampler


@dataclasses.dataclass(frozen=True)
class Opening(Arithmetic):
    """The first word decides: 1 for answers that open with "Let", else 0."""

    is_trusted = True

    def reward(self, prompt: Prompt, text: str) -> float:
        return float(text.startswith("Let"))


def test_where_the_first_word_decides_all_credit_is_on_the_first_step(policy, tmp_path):
    """V(start) is the chance of "Let" up to the noise of 64 draws; every later state has the
    rollout's own reward, exactly, and so later steps have credit 0.
    """
    axes = {"name": "vine_ppo", "credit": {"samples": 64}}
    out, _ = collected(policy, Opening(), tmp_path, axes)
    batch = out.batch
    let = next(t for t, text in zip(batch.token_ids_NT[:, 0], out.texts) if text.startswith("Let"))
    is_let_N = batch.token_ids_NT[:, 0] == let
    chance = float(batch.sampler_logp_NT[is_let_N, 0][0].exp())
    assert batch.value_NT[:, 0].tolist() == pytest.approx([chance] * 12, abs=3 * 0.5 / 8)
    later_NT = batch.mask_NT & (batch.segment_NT > 0)
    assert int(batch.segment_NT.max()) >= 7
    assert torch.equal(
        batch.value_NT[later_NT], batch.reward_N[:, None].expand_as(later_NT)[later_NT]
    )
    credit_NT = cp.credit.prefix_value(torch.zeros(batch.mask_NT.shape), batch)
    assert not credit_NT[later_NT].any()
    first_NT = batch.mask_NT & (batch.segment_NT == 0)
    gain_NT = (batch.reward_N - batch.value_NT[:, 0])[:, None].expand_as(first_NT)
    assert torch.equal(credit_NT[first_NT], gain_NT[first_NT])


def test_segments_are_the_sentences_of_the_text(policy, tmp_path):
    out, sampler = collected(policy, Arithmetic(), tmp_path, VINE)
    batch = out.batch
    for row, text in enumerate(out.texts):
        parts = []
        for segment in range(int(batch.segment_NT[row].max()) + 1):
            ids = batch.token_ids_NT[row][batch.segment_NT[row] == segment].tolist()
            parts.append(policy.tokenizer.decode(ids, skip_special_tokens=True))
        assert "".join(parts) == text
        assert all(part.rstrip().endswith(".") for part in parts[:-1])
        assert [part.count(". ") for part in parts[1:]] == [0] * (len(parts) - 1)
    groups = batch.group_N.tolist()
    starts = {(g, float(v)) for g, v in zip(groups, batch.value_NT[:, 0])}
    assert len(starts) == 3  # one value of each prompt
    states = {
        (groups[i], *batch.token_ids_NT[i][:t].tolist())
        for i in range(12)
        for t in range(int(batch.length_N[i]))
        if t == 0 or batch.segment_NT[i, t] != batch.segment_NT[i, t - 1]
    }
    assert sampler.num_more == 3 * len(states)
    assert sampler.num_more_tokens > batch.mask_NT.sum() and sampler.more_s > 0


def test_values_agree_with_the_probe(run):
    """Values of the run's states with three completions, and by the probe's own path with 40."""
    scene = open_scene(run, 1)
    batch = scene.collected.batch
    ids_NT = batch.token_ids_NT.tolist()
    first_NT = torch.nn.functional.pad(batch.segment_NT[:, :-1], (1, 0), value=-1)
    places = (batch.mask_NT & (batch.segment_NT != first_NT)).nonzero().tolist()
    prefixes = [ids_NT[i][:t] for i, t in places]
    probed = torch.tensor(prefix_values(scene, [i for i, _ in places], prefixes, 40, 7))
    own = torch.tensor([float(batch.value_NT[i, t]) for i, t in places])
    assert len(places) > 80 and probed.std() > 0.2
    assert float(torch.corrcoef(torch.stack([own, probed.float()]))[0, 1]) > 0.75
    assert abs(float((own - probed).mean())) < 0.06


def test_the_file_keeps_values_and_a_scene_has_the_credit_of_the_run(run):
    saved = read_rollouts(run / "rollouts" / "batch_000001.parquet").batch
    assert saved.segment_NT is not None and int(saved.segment_NT.max()) > 3
    scene = open_scene(run, 1)
    credit = cp.method(**VINE).assign(scene.collected.batch)
    import pyarrow.parquet as pq

    written = pq.read_table(run / "rollouts" / "batch_000001.parquet")["credit"].to_pylist()
    for row, numbers in enumerate(written):
        torch.testing.assert_close(
            credit.credit_NT[row, : len(numbers)], torch.tensor(numbers), rtol=1e-6, atol=1e-6
        )


def test_a_run_that_was_cut_off_goes_on_as_if_it_had_not_been(run, tmp_path):
    part = go(tmp_path / "part", method=VINE, num_batches=1)
    go(part, resume=True, method=VINE)
    for name in ("metrics", "timing"):
        ours, theirs = (read_jsonl(one / f"{name}.jsonl") for one in (part, run))
        assert len(ours) == len(theirs) == 3
        if name == "metrics":
            assert ours == theirs
    from safetensors.torch import load_file

    last = [load_file(checkpoint.checkpoints(one)[-1] / "model.safetensors") for one in (part, run)]
    assert all(torch.equal(last[0][key], last[1][key]) for key in last[0])


def test_the_cost_is_in_the_numbers(run):
    row, timing = (read_jsonl(run / f"{name}.jsonl")[1] for name in ("metrics", "timing"))
    assert row["sampling/more_rollouts"] % 3 == 0
    assert row["sampling/more_tokens"] > row["rollouts/num_tokens"]
    assert 0 < timing["sample_more_s"] < timing["sample_s"]
    assert row["credit/prefix_value/segments"] > 5
    assert abs(row["credit/prefix_value/start_gap"]) < 0.5


def test_spo_chain_trains(tmp_path):
    axes = {"name": "spo_chain", "credit": {"samples": 2}}
    run_dir = go(tmp_path / "run", method=axes, num_batches=1)
    row = read_jsonl(run_dir / "metrics.jsonl")[0]
    assert row["credit/prefix_value/cut_frac"] > 0.9 and row["loss/grad_norm"] > 0
    assert row["sampling/more_rollouts"] > 12


def test_an_environment_is_refused_before_a_model_loads(tmp_path):
    axes = {"task": {"name": "guess", "n": 8}, "model": "no such model", "method": VINE}
    with pytest.raises(ConfigError, match="an environment cannot be set back there"):
        train(parse_config(recipe(tmp_path / "run", **axes)))


def test_graders_that_fail_on_completions_are_counted(policy, tmp_path):
    calls = {"num": 0}

    class Broken(Arithmetic):
        is_trusted = True

        def reward(self, prompt, text):
            calls["num"] += 1
            if calls["num"] > 12 and calls["num"] % 10 == 0:
                raise RuntimeError("no")
            return super().reward(prompt, text)

    out, sampler = collected(policy, Broken(), tmp_path, VINE)
    assert out.num_grader_failures == sum(k % 10 == 0 for k in range(13, calls["num"] + 1)) > 0


def test_a_completion_is_no_longer_than_a_rollout_may_be(policy, tmp_path):
    """A limit that cuts every answer: completions end there too, and none is paid."""
    out, _ = collected(policy, Arithmetic(), tmp_path, VINE, max_new_tokens=20)
    assert int(out.batch.length_N.min()) == 20
    assert not out.batch.value_NT.any()


def test_states_of_similar_length_are_sampled_together():
    states = [State([1] * 4, [5] * num) for num in range(0, 80, 2)]
    parts = alike(states, limit=80, positions=None)
    assert sorted(sum(parts, [])) == list(range(40)) and 4 <= len(parts) <= 8
    tight = alike(states, limit=80, positions=84)
    assert [len(part) for part in tight] == [1] * 40


class Spaced:
    """A tokenizer that puts a space between tokens, so that pieces do not add up."""

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(f"w{k}." for k in ids)

    def batch_decode(self, rows, skip_special_tokens=True):
        return [self.decode(row) for row in rows]


def test_tokens_from_characters():
    text = Spaced().decode([1, 2, 3])
    assert text == "w1. w2. w3."
    assert tokens_from(Spaced(), [[1, 2, 3]], [text], [[0, 3, 4, 5, 11]]) == [[0, 1, 2, 2, 3]]


def test_probes_leave_them_out_of_all_and_take_them_by_name(run):
    assert not {"vine_ppo", "spo_chain"} & set(every_preset())
    scene = open_scene(run, 1)
    methods = methods_of("grpo, {name: spo_chain, credit: {samples: 2}}")
    out = assign(scene, methods)
    label = next(name for name in out if name.startswith("spo_chain"))
    assert out[label].credit.credit_NT.any()
    without = scene.collected.batch.replace(value_NT=None, segment_NT=None)
    bare = scene.collected._replace(batch=without)
    with pytest.raises(ConfigError, match="reads value_NT, which fresh completions give"):
        measure_columns(scene.policy, cp.method("vine_ppo"), scene.config, bare, scene.reference)
