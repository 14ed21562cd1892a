"""What plain TRL survives: rollouts without a reward, without a token of the model, or cut and
masked. They leave the statistics and get credit 0, and the run goes on.
"""

from __future__ import annotations

import json

import pytest
import torch

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
import counterpoise as cp
from counterpoise.run.read import open_run
from counterpoise.run.rollouts import read_rollouts
from helpers import trl_tiny

pytestmark = pytest.mark.hosts
METHODS = ("rloo", "gtpo", "ktae", "delta", "fade", "crf_ntf", "clip_cov", "dfpo_min", "tpo")
LEDGER = {"ledger_every": 1, "max_steps": 4}


def is_cut(completion_ids):
    """Rollouts of ``trl_tiny.told`` that these tests take the reward or the tokens of."""
    return len(completion_ids) > 5


def ungraded(completions, completion_ids, **columns):
    """None for long completions."""
    rewards = trl_tiny.graded(completions)
    return [None if is_cut(ids) else r for ids, r in zip(completion_ids, rewards)]


def nothing(completions, **columns):
    return [None for _ in completions]


def without_model_tokens(prompts, trainer):
    """``told`` where the tokens of long completions are all an environment's."""
    rollouts = trl_tiny.told(prompts, trainer)
    rollouts["env_mask"] = [
        [0 if is_cut(ids) else 1] * len(ids) for ids in rollouts["completion_ids"]
    ]
    return rollouts


def unfinished(prompts, trainer):
    """``told`` where long completions do not end: ``mask_truncated_completions`` masks them."""
    rollouts = trl_tiny.told(prompts, trainer)
    for ids in rollouts["completion_ids"]:
        ids[-1] = 5 if is_cut(ids) else 1
    return rollouts


CASES = {
    "no reward": {"reward_funcs": ungraded, "rollout_func": trl_tiny.told},
    "no model token": {"rollout_func": without_model_tokens},
    "cut and masked": {"rollout_func": unfinished, "args": {"mask_truncated_completions": True}},
}


def trained(folder, case, **args):
    settings = dict(CASES[case])
    trainer = trl_tiny.ours(folder, args=settings.pop("args", {}) | args, **settings)
    start = trl_tiny.weights(trainer)
    trainer.train()
    assert trainer.state.global_step == trainer.args.max_steps
    assert trl_tiny.largest_gap(start, trl_tiny.weights(trainer)) > 1e-4
    assert all(value.isfinite().all() for value in trl_tiny.weights(trainer).values())
    return trainer


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_the_run_goes_on_and_the_rest_gets_the_core_s_credit(case, method, tmp_path):
    """The ledger's rollouts are those that count, with the credit that the core gives to them
    alone; the others are a share in the metrics.
    """
    axes = trl_tiny.axes_of(method)
    trainer = trained(tmp_path, case, method=method, method_axes=axes, **LEDGER)
    run = open_run(tmp_path / "counterpoise")
    assert run.problems == []
    batch = read_rollouts(tmp_path / "counterpoise" / "rollouts" / "batch_000000.parquet").batch
    assert 0 < batch.num_rollouts < 32
    assert not any(is_cut(ids[mask]) for ids, mask in zip(batch.token_ids_NT, batch.mask_NT))
    (row, *_) = [row for row in trainer.state.log_history if "credit/left_out_frac" in row]
    assert row["credit/left_out_frac"] == pytest.approx(1 - batch.num_rollouts / 32)
    if not cp.method(method).needs - {"entropy_NT"} and method != "fade":
        expected_NT = cp.method(method, **axes).assign(batch).credit_NT
        written = run.table("rollouts", 0, ("credit",))["credit"].to_pylist()
        torch.testing.assert_close(
            torch.tensor([c for credit in written for c in credit]),
            expected_NT[batch.mask_NT],
            rtol=1e-5,
            atol=1e-6,
        )


@pytest.mark.skipif(trl.__version__ < "1.16", reason="older TRL counts such rows as failures")
def test_without_a_reward_is_what_trl_does(tmp_path):
    """TRL 1.16 leaves ungraded rollouts out of a group's mean and gives them the advantage 0."""
    args = {"loss_type": "grpo", "epsilon_high": 0.2}
    plain = trl_tiny.plain(tmp_path / "plain", args=args, **CASES["no reward"])
    plain.train()
    ours = trained(tmp_path / "ours", "no reward", method="grpo")
    gap = trl_tiny.largest_gap(trl_tiny.weights(ours), trl_tiny.weights(plain))
    moved = trl_tiny.largest_gap(trl_tiny.weights(plain), dict(trl_tiny.tiny_model().state_dict()))
    assert gap < 1e-3 * moved


@pytest.mark.parametrize("method", ["dapo", "dfpo_min", "clip_cov"])
def test_a_batch_without_any_reward(method, tmp_path):
    """Nothing to learn is no error: weights stay, the next batch is generated."""
    trainer = trl_tiny.ours(
        tmp_path, args={"method": method, "ledger_every": 1}, reward_funcs=nothing
    )
    start = trl_tiny.weights(trainer)
    trainer.train()
    assert trainer.state.global_step == 8
    trl_tiny.assert_identical(trl_tiny.weights(trainer), start)
    lines = (tmp_path / "counterpoise" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["batch"] for line in lines] == [0, 1]
    assert "NaN" not in "".join(lines)


@pytest.mark.parametrize("method", ["dapo", "tpo"])
def test_fewer_prompts_than_updates(method, tmp_path):
    """Of eight prompts one is graded; the plan has four updates of whole prompts, of which three
    are empty.
    """

    def first_prompt(prompts, completions, **columns):
        graded = trl_tiny.graded(completions)
        return [g if p == prompts[0] else None for p, g in zip(prompts, graded)]

    args = {"method": method, "plan": "query_preserved", **LEDGER}
    trainer = trl_tiny.ours(tmp_path, args=args, reward_funcs=first_prompt)
    trainer.train()
    assert trainer.state.global_step == 4
    assert [len(rows) for rows in trainer.credit_plan] == [4]
    (row,) = [row for row in trainer.state.log_history if "credit/left_out_frac" in row]
    assert row["credit/left_out_frac"] == 28 / 32
    tokens = open_run(tmp_path / "counterpoise").table("tokens", 0, ("update",)).to_pandas()
    assert set(tokens["update"].dropna()) == {0}
