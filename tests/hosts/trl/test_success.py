"""What counts as success: a threshold, or one reward function by its name."""

from __future__ import annotations

import warnings

import pandas as pd
import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
from counterpoise.report.samples import sample_prompts
from counterpoise.run.read import open_run
from helpers import trl_tiny

pytestmark = pytest.mark.hosts
METHODS = ("f_grpo", "ibpo", "nsr", "psr", "w_reinforce", "crf_ntf", "ktae")


def accuracy_reward(completions, **columns):
    """0 or 2."""
    return [2.0 * reward for reward in trl_tiny.graded(completions)]


def format_reward(completions, **columns):
    return [1.0 for _ in completions]


REWARDS = [accuracy_reward, format_reward]


def outputs(folder, reward_funcs=None, **args):
    """TRL's batch with our columns, of the first generation."""
    trainer = trl_tiny.ours(
        folder, args={"max_steps": 1} | args, reward_funcs=reward_funcs or REWARDS
    )
    seen, take = [], trainer._take_batch
    trainer._take_batch = lambda output: seen.append(dict(output)) or take(output)
    trainer.train()
    return seen[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "said", [{"success": 2.0}, {"success_reward": "accuracy_reward"}], ids=["threshold", "name"]
)
def test_success_reaches_every_method(method, said, tmp_path):
    """Accuracy 0 or 2 plus 1 for the format: credit as for rewards 0 and 1, up to its size."""
    told = outputs(tmp_path / "told", method=method, **said)
    unsaid = outputs(tmp_path / "unsaid", method=method)
    plain = outputs(tmp_path / "plain", method=method, reward_funcs=trl_tiny.graded)
    torch.testing.assert_close(told["cp_credit"].sign(), plain["cp_credit"].sign())
    assert not torch.allclose(told["cp_credit"], unsaid["cp_credit"])


def test_the_named_reward_with_a_threshold_of_its_own(tmp_path):
    """2 of 0, 1, 2 is a success; the plan reads it too."""

    def graded_thrice(completions, **columns):
        return [float(k % 3) for k in range(len(completions))]

    args = {"success_reward": "graded_thrice", "success": 2.0, "plan": "reward_balanced"}
    output = outputs(tmp_path, [graded_thrice, format_reward], method="psr", **args)
    positive_N = output["cp_advantage"] > 0
    assert positive_N.tolist() == [k % 3 == 2 for k in range(32)]


def test_the_run_folder_has_the_successes_of_the_named_reward(tmp_path):
    """By the sum of rewards all would be right."""
    args = {"method": "psr", "success_reward": "accuracy_reward", "ledger_every": 1, "max_steps": 1}
    trl_tiny.ours(tmp_path, args=args, reward_funcs=REWARDS).train()
    run = open_run(tmp_path / "counterpoise")
    (file,) = (run.path / "rollouts").iterdir()
    rows = pd.read_parquet(file)
    assert rows["success"].tolist() == (rows["reward"] == 3).tolist()
    assert 0 < rows["success"].sum() < len(rows) and run.problems == []
    counts = rows.groupby("group")["success"].agg(["sum", "count"])
    for prompt in sample_prompts(run):
        assert prompt.solved == "{} of {}".format(*counts.loc[prompt.group])


def test_an_unknown_name(tmp_path):
    args = {"method": "psr", "success_reward": "acuracy_reward"}
    with pytest.raises(
        ValueError, match="success_reward.*'acuracy_reward'. Did you mean 'accuracy_reward'"
    ):
        trl_tiny.ours(tmp_path, args=args, reward_funcs=REWARDS)


def test_success_that_nothing_reads(tmp_path):
    """A setting without effect is said."""
    with pytest.warns(UserWarning, match="success.* is not read: method 'dapo'"):
        trl_tiny.CreditGRPOConfig(
            output_dir=str(tmp_path), method="dapo", success=2.0, **trl_tiny.SMALL
        )


def test_a_threshold_on_one_side_of_all_rewards_is_said_once(tmp_path):
    """Six generations with the reward 1 or 3: all above 0.5."""
    args = {"method": "nsr", "steps_per_generation": 2, "max_steps": 6}
    trainer = trl_tiny.ours(tmp_path, args=args, reward_funcs=REWARDS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(one.message) for one in caught if "tells successes" in str(one.message)]
    assert len(said) == 1
    assert "are successes" in said[0] and "success_reward" in said[0]
    rows = [row for row in trainer.state.log_history if "success/is_suspect" in row]
    assert [row["success/is_suspect"] for row in rows] == [0, 0, 0, 0, 1, 1]
    assert all(row["success/frac"] == 1 for row in rows)
