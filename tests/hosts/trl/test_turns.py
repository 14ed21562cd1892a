"""Rewards, states and scores of turns that a ``rollout_func`` tells: checks, credit, files."""

from __future__ import annotations

import math
import warnings

import pyarrow.parquet as pq
import pytest
import torch

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
import counterpoise as cp
from counterpoise.hosts.trl import turn_reward
from counterpoise.hosts.trl.ledger import Ledger
from counterpoise.report.page import content, render
from counterpoise.run.read import open_run
from counterpoise.run.rollouts import read_rollouts
from counterpoise.viewer.tokens import open_batch
from counterpoise.viewer.turns import prompt_turns
from helpers import trl_tiny, trl_tools
from helpers.trl_turns import Heard, expected_batch, train

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.filterwarnings("ignore:The tokenizer has a legacy:FutureWarning"),
]
METHODS = {
    "turn_rloo": {},
    "gigpo": {},
    "mt_grpo": {},
    "igpo": {},
    "turn_credit": {},
    "rloo": {},
    "filtered": {
        "method": "turn_rloo",
        "method_axes": {"credit": ["turn_baseline", "negative_token_filter"]},
    },
}


@pytest.mark.parametrize("method", METHODS)
def test_credit_is_the_core_s_on_turns_written_down_by_hand(method, tmp_path):
    """Nothing is left for the environment's tokens."""
    trainer, output, returned = train(tmp_path, **{"method": method} | METHODS[method])
    batch = expected_batch(returned)
    if "sampler_logp_NT" in trainer.credit_setup.method.needs or method == "filtered":
        batch = batch.replace(sampler_logp_NT=output["cp_sampler_logp"] * batch.mask_NT)
    expected = trainer.credit_setup.method.assign(batch, seed=trainer.args.seed)
    torch.testing.assert_close(output["cp_credit"], expected.credit_NT, rtol=0, atol=2e-6)
    assert expected.credit_NT.abs().sum() > 0
    assert (output["cp_credit"][~batch.mask_NT] == 0).all()
    if method != "rloo":
        assert expected.credit_NT[expected.credit_NT != 0].unique().numel() > 32


@pytest.mark.parametrize(
    "method",
    [
        {"method": "turn_rloo"},
        {"method": "crf_ntf", "method_axes": {"credit": ["turn_baseline"]}},
        {"method": "tpo"},
    ],
    ids=lambda axes: axes["method"],
)
def test_the_environment_s_tokens_have_no_coefficient(method, tmp_path, monkeypatch):
    """The loss does not depend on their log-probs, TRL's loss and ours."""
    slopes, note = [], Ledger.note

    def watched(self, inputs, total, logp_NT, loss):
        (slope_NT,) = torch.autograd.grad(total, logp_NT, retain_graph=True)
        slopes.append((slope_NT, inputs["completion_mask"] * inputs["tool_mask"]))
        note(self, inputs, total, logp_NT, loss)

    monkeypatch.setattr(Ledger, "note", watched)
    train(tmp_path, max_steps=4, **method)
    assert len(slopes) == 8
    for slope_NT, mask_NT in slopes:
        assert (mask_NT == 0).any()
        assert (slope_NT[mask_NT == 0] == 0).all()
    assert sum(float(slope_NT.abs().sum()) for slope_NT, _ in slopes) > 0


def test_all_on_the_last_turn_is_credit_without_turn_rewards(tmp_path):
    def last(rollouts):
        rollouts["turn_rewards"] = [
            [0.0] * (len(row) - 1) + [sum(row)] for row in rollouts["turn_rewards"]
        ]
        del rollouts["turn_states"]

    def outcome(completions, turn_rewards=None, total=None, **columns):
        return turn_reward(total or turn_rewards)

    def untold(rollouts):
        rollouts["total"] = rollouts.pop("turn_rewards")
        del rollouts["turn_states"], rollouts["turn_scores"]

    for method in ("turn_rloo", "gigpo", "mt_grpo"):
        _, told, _ = train(tmp_path, last, outcome, method=method)
        _, plain, _ = train(tmp_path, untold, outcome, method=method)
        assert torch.equal(told["cp_credit"], plain["cp_credit"])
        assert told["cp_credit"].abs().sum() > 0


def test_uniform_is_plain_trl(tmp_path):
    """With turn rewards and the ledger too, bit for bit."""
    args = {"max_steps": 4, "max_completion_length": 32}
    settings = {"rollout_func": Heard(), "reward_funcs": turn_reward}
    plain = trl_tiny.plain(tmp_path / "a", args=args, **settings)
    plain.train()
    ours = trl_tiny.ours(tmp_path / "b", args=args | {"ledger_every": 1}, **settings)
    ours.train()
    trl_tiny.assert_identical(trl_tiny.weights(plain), trl_tiny.weights(ours))


def cut(name):
    def change(rollouts):
        row = next(k for k, values in enumerate(rollouts[name]) if k > 2 and len(values) > 1)
        rollouts[name][row] = rollouts[name][row][:-1]

    return change


def put(name, value, row=5):
    return lambda rollouts: rollouts[name].__setitem__(row, value)


@pytest.mark.parametrize("name", ["turn_rewards", "turn_states", "turn_scores"])
def test_one_entry_per_turn(name, tmp_path):
    message = rf"rollout \d+ has (\d) {name}, expected (\d): env_mask has \2 runs of 1. Return one"
    with pytest.raises(ValueError, match=message):
        train(tmp_path, cut(name), method="turn_rloo")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("turn_rewards", None), r"turn_rewards is missing for rollouts \[5\]"),
        (put("turn_rewards", ["a"]), "turn_rewards of rollout 5 is .* one number per turn"),
        (put("turn_rewards", 1.0), "turn_rewards of rollout 5 is '1.0', expected a list"),
        (put("turn_states", "dark"), "turn_states of rollout 5 is 'dark', expected a list"),
        (put("turn_states", [3]), "one str per turn"),
    ],
)
def test_fields_of_another_kind(change, message, tmp_path):
    def one(completions, **columns):
        return [1.0] * len(completions)

    with pytest.raises(ValueError, match=message):
        train(tmp_path, change, one, method="turn_rloo")


def test_the_reward_functions_decide_the_sum(tmp_path):
    """What the turns lack goes to the last one, said once with its numbers."""

    def outcome(completions, turn_rewards, **columns):
        return [sum(row) + 0.5 * (k == 3) for k, row in enumerate(turn_rewards)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, output, returned = train(tmp_path, None, outcome, method="turn_rloo", max_steps=8)
    said = [str(w.message) for w in caught if "turn_rewards of rollout" in str(w.message)]
    total = sum(returned["turn_rewards"][3])
    assert len(said) == 1
    assert f"rollout 3 add up to {total:g}, and its reward is {total + 0.5:g}" in said[0]
    assert "(in 1 of 32 rollouts" in said[0]
    last = len(returned["turn_rewards"][3]) - 1
    returned["turn_rewards"][3][last] += 0.5
    expected = cp.method("turn_rloo").assign(expected_batch(returned)).credit_NT
    torch.testing.assert_close(output["cp_credit"], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "value"), [("turn_rewards", math.nan), ("turn_rewards", -math.inf),
                        ("turn_scores", math.inf)]
)  # fmt: skip
def test_a_number_that_is_not_finite_takes_its_rollout_out(name, value, tmp_path):
    """As a rollout without a reward; the others are compared without it."""

    def change(rollouts):
        rollouts[name][6] = [value, *rollouts[name][6][1:]]

    def outcome(completions, turn_rewards, **columns):
        return [0.25 if k == 6 else sum(row) for k, row in enumerate(turn_rewards)]

    trainer, output, returned = train(tmp_path, change, outcome, method="igpo")
    assert trainer.state.log_history[0]["credit/left_out_frac"] == 1 / 32
    assert (output["cp_credit"][6] == 0).all()
    returned["turn_rewards"][6] = [0.0] * len(returned["turn_rewards"][6])
    kept_R = torch.tensor([row for row in range(32) if row != 6])
    returned["turn_scores"][6] = [None] * len(returned["turn_rewards"][6])
    batch = expected_batch(returned).select(kept_R)
    expected = cp.method("igpo").assign(batch).credit_NT
    torch.testing.assert_close(output["cp_credit"][kept_R], expected, rtol=0, atol=2e-6)


def test_scores_that_are_not_told(tmp_path):
    with pytest.raises(
        ValueError, match="'igpo' reads turn_score_NU, and rollout_func returned no"
    ):
        train(tmp_path, lambda rollouts: rollouts.pop("turn_scores"), method="igpo")


@pytest.mark.skipif(trl.__version__ < "1.16", reason="tools of TRL 1.16")
def test_env_mask_with_tools_is_refused(tmp_path):
    """Before the first update; TRL would train on the environment's tokens."""

    def rollouts(prompts, trainer):
        return Heard()([prompt[0]["content"] for prompt in prompts], trainer)

    trainer = trl_tiny.ours(
        tmp_path,
        args=trl_tools.TOOLS | {"method": "turn_rloo"},
        processing_class=trl_tools.tokenizer(),
        train_dataset=trl_tools.prompts(),
        reward_funcs=trl_tools.graded,
        tools=[trl_tools.look_up],
        rollout_func=rollouts,
    )
    with pytest.raises(ValueError, match="env_mask, and there are tools too"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_the_run_folder_has_turns(tmp_path):
    """Columns of turns as they were told; report and viewer open it; replay gives the credit."""
    trainer, output, returned = train(tmp_path, method="turn_rloo", max_steps=4, ledger_every=1)
    folder = tmp_path / "counterpoise"
    run = open_run(folder)
    assert run.problems == []
    table = pq.read_table(folder / "rollouts" / "batch_000000.parquet").to_pandas()
    for column, field in (("turn_reward", "turn_rewards"), ("turn_state", "turn_states")):
        assert [list(row) for row in table[column]] == returned[field]
    words = trainer.processing_class
    for row in range(32):
        ids, mask = returned["completion_ids"][row], returned["env_mask"][row]
        own = [i for i, m in zip(ids, mask) if m]
        others = [i for i, m in zip(ids, mask) if not m]
        said = " ".join(table["turn_action"][row]).split()
        assert said == words.decode(own, skip_special_tokens=True).split()
        assert " ".join(table["turn_reply"][row]).split() == words.decode(others).split()
    batch = read_rollouts(folder / "rollouts" / "batch_000000.parquet").batch
    again = cp.method("turn_rloo").assign(batch).credit_NT
    torch.testing.assert_close(again, output["cp_credit"], rtol=0, atol=2e-6)
    tokens = pq.read_table(folder / "tokens" / "batch_000000.parquet").to_pandas()
    assert set(tokens["turn"]) == {0, 1, 2, 3}
    assert run.metrics["turns/mean"].iloc[0] == pytest.approx(table["turn_reward"].map(len).mean())
    assert "Turns" in render(content([run]))
    blocks = prompt_turns(open_batch(run, 0), 1)
    assert [[turn["reward"] for turn in talk["turns"]] for talk in blocks] == returned[
        "turn_rewards"
    ][4:8]
