"""One notion of success: a threshold of the task or the method, or a column of the host."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

import counterpoise as cp
from counterpoise.errors import MethodWarning
from counterpoise.run.read import read_jsonl
from counterpoise.stage import success_of
from counterpoise.trainer.config import parse_config
from counterpoise.trainer.loop import train
from counterpoise.trainer.progress import Progress

METHODS = {name: cp.method(name) for name in cp.methods()}
# a teacher's demonstrations go by success too, before credit is assigned
READ_SUCCESS = [k for k, one in METHODS.items() if one.reads_success and not one.has_teacher]


def make_batch(reward: list[float], **columns) -> cp.TokenBatch:
    """Two prompts with four rollouts each; the third token tells right answers from wrong ones."""
    ids = [[1, 2, 3 if k % 2 else 4, 5 + k] for k in range(8)]
    logp = [[-0.1 - 0.1 * k, -0.5, -1.0 - 0.1 * k, -2.0] for k in range(8)]
    return cp.TokenBatch.from_lists(
        ids,
        group=[0, 0, 0, 0, 1, 1, 1, 1],
        reward=reward,
        sampler_logp=logp,
        entropy=[[0.1, 0.2, 0.3, 0.4]] * 8,
        **columns,
    )


RIGHT = [False, True, False, True, False, True, True, True]
ZERO_ONE = [float(is_right) for is_right in RIGHT]
# accuracy 0 or 2, and 1 for the format, which everyone gets right
WITH_FORMAT = [2.0 * is_right + 1.0 for is_right in RIGHT]


@pytest.mark.parametrize("name", READ_SUCCESS)
@pytest.mark.parametrize("by", ["method", "batch", "column"])
def test_rewards_of_accuracy_and_format_give_the_signs_of_accuracy_alone(name, by):
    expected = cp.method(name).assign(make_batch(ZERO_ONE)).credit_NT
    method = cp.method(name, success=2.0) if by == "method" else cp.method(name)
    columns = {"batch": {"success": 2.0}, "column": {"success_N": torch.tensor(RIGHT)}}
    got = method.assign(make_batch(WITH_FORMAT, **columns.get(by, {}))).credit_NT
    assert (expected != 0).any()
    assert torch.equal(got.sign(), expected.sign())


def test_methods_that_tell_successes_from_failures_say_so():
    known = {"psr", "nsr", "w_reinforce", "crf_ntf", "f_grpo", "ktae", "ibpo", "fade"}
    assert known <= set(READ_SUCCESS)


def test_the_rest_does_not_move_with_the_threshold():
    for name in cp.methods():
        method = cp.method(name)
        if name in READ_SUCCESS or method.needs - {"entropy_NT"}:
            continue
        one, other = (
            method.assign(make_batch(ZERO_ONE, success=success)).credit_NT for success in (0.5, 9)
        )
        assert torch.equal(one, other), name


def test_the_columns_win_over_the_thresholds_and_the_method_over_the_task():
    reward = [0.0, 1.0, 2.0, 3.0]
    batch = cp.TokenBatch.from_lists(
        [[1]] * 4, group=[0] * 4, reward=reward, sampler_logp=[[-1.0]] * 4, success=1.0
    )
    psr = cp.method("psr")
    assert psr.assign(batch).advantage_N.tolist() == [0, 1, 1, 1]
    assert cp.method("psr", success=3).assign(batch).advantage_N.tolist() == [0, 0, 0, 1]
    column = batch.replace(success_N=torch.tensor([True, False, False, False]))
    assert psr.assign(column).advantage_N.tolist() == [1, 0, 0, 0]
    assert cp.method("psr", success=3).assign(column).advantage_N.tolist() == [1, 0, 0, 0]


def test_the_threshold_is_part_of_a_method_and_of_its_description():
    method = cp.method("nsr", success=2.0)
    assert cp.method(**method.describe()) == method
    assert "success" not in cp.method("nsr").describe()
    with pytest.raises(ValueError, match="method: success must be a finite number or None, got"):
        cp.method("nsr", success="high")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"signs .*threshold.* method.success"):
        cp.method("crf_ntf", advantage={"threshold": 1.0})


def test_plans_and_their_audit_balance_what_counts_as_success():
    batch = make_batch(WITH_FORMAT, success=2.0)
    plain = make_batch(ZERO_ONE)
    method = cp.method("grpo", plan={"name": "reward_balanced", "mode": "per_query"})
    assert method.plan(batch, 1).manifest == method.plan(plain, 1).manifest
    assert cp.audit(method.plan(batch, 1), batch) == cp.audit(method.plan(plain, 1), plain)
    own = cp.method("grpo", plan={"name": "reward_balanced", "mode": "per_query"}, success=2.0)
    by_method = own.plan(make_batch(WITH_FORMAT), 1).manifest
    assert by_method["rows"] == method.plan(plain, 1).manifest["rows"]


def warned(method: cp.Method, batch: cp.TokenBatch, num_batches: int) -> list[str]:
    state, said = None, []
    for number in range(num_batches):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = method.assign(batch, state, batch_number=number)
        state, said = out.state, said + [str(one.message) for one in caught]
    return said


def test_a_warning_once_when_all_rewards_lie_on_one_side():
    (message,) = warned(cp.method("nsr"), make_batch(WITH_FORMAT), 8)
    assert "all 40 rewards of 5 batches are successes" in message
    assert "1 to 3" in message
    assert "method.success" in message
    assert warned(cp.method("nsr", success=2.0), make_batch(WITH_FORMAT), 8) == []
    assert warned(cp.method("nsr"), make_batch(ZERO_ONE), 8) == []
    assert warned(cp.method("grpo"), make_batch(WITH_FORMAT), 8) == []
    (message,) = warned(cp.method("nsr", success=9.0), make_batch(ZERO_ONE), 8)
    assert "all 40 rewards of 5 batches are failures" in message


def test_a_warning_when_rewards_have_more_than_two_values_and_no_threshold_is_set():
    graded = [0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0]
    (message,) = warned(cp.method("psr"), make_batch(graded), 8)
    assert "0, 1, 2, 3" in message
    assert "reward >= 0.5" in message
    assert warned(cp.method("psr", success=2.0), make_batch(graded), 8) == []
    assert warned(cp.method("psr"), make_batch(graded, success=2.0), 8) == []
    column = make_batch(graded, success_N=torch.tensor(RIGHT))
    assert warned(cp.method("psr"), column, 8) == []


def test_the_metrics_say_it_too():
    method, state, seen = cp.method("nsr"), None, []
    for _ in range(6):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = method.assign(make_batch(WITH_FORMAT), state)
        state, seen = out.state, [*seen, out.metrics]
    assert [row["success/is_suspect"] for row in seen] == [0, 0, 0, 0, 1, 1]
    assert [row["success/frac"] for row in seen] == [1.0] * 6
    assert not any(
        "success" in key for key in cp.method("grpo").assign(make_batch(ZERO_ONE)).metrics
    )


def test_the_page_of_a_method_that_reads_success_says_what_counts():
    pages = Path(__file__).parents[2] / "docs" / "methods"
    linked = dict(re.findall(r"\[`(\w+)`\]\((\w+\.md)\)", (pages / "index.md").read_text()))
    for name in cp.methods():
        if name in linked and cp.method(name).reads_success:
            assert "guides/success.md" in (pages / linked[name]).read_text(), linked[name]


def test_a_run_says_it_in_the_terminal_and_in_its_folder(tmp_path, monkeypatch, capsys):
    """Two for a right answer and one for trying, which no setting tells."""
    (tmp_path / "rewards_of_two_kinds.py").write_text(
        "def reward(prompt, text): return 2.0 * (prompt.answer in text) + 1.0"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = {
        "run_dir": str(tmp_path / "run"),
        "num_batches": 6,
        "method": "nsr",
        "task": {"name": "arithmetic", "reward": "rewards_of_two_kinds:reward"},
        "rollouts": {"prompts": 4, "group_size": 4, "max_new_tokens": 16},
        "optimizer": {"updates_per_batch": 1},
        "eval": {"every": 0},
        "ledger": {"every": 0},
        "trackers": [],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error", MethodWarning)
        train(parse_config(recipe), progress=Progress(quiet=True))
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("batches are successes") == 1
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    said = [line for row in rows for line in row.get("warnings", [])]
    assert sum("batches are successes" in line for line in said) == 1
    assert [row["success/is_suspect"] for row in rows] == [0, 0, 0, 0, 1, 1]


def test_a_program_is_right_where_all_its_tests_hold():
    assert success_of({"name": "arithmetic"}) is None
    assert success_of({"name": "code"}) == 1.0
    assert success_of({"name": "code", "success": 0.5}) == 0.5
    assert parse_config({"task": {"name": "code", "path": "x.jsonl"}}).success == 1.0
