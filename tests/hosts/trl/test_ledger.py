"""The ledger inside TRL: it only looks, its coefficients are those of the update, its files are a
run folder.
"""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
from counterpoise.ledger import book
from counterpoise.run.read import open_run
from counterpoise.run.schema import TOKEN_COLUMNS
from counterpoise.viewer.tokens import open_batch
from helpers import trl_tiny

pytestmark = pytest.mark.hosts
SGD = {
    "optim": "sgd",
    "learning_rate": 0.005,
    "max_grad_norm": 0.5,
    "ledger_every": 1,
    "max_steps": 4,
}
CASES = {
    "trl's loss": {"method": "uniform", "loss_type": "grpo"},
    "trl's loss, our credit and plan": {"method": "delta", "plan": "query_preserved"},
    "our loss": {"method": "dfpo_min"},
    "rows left out": {"method": "dr_grpo", "plan": "reward_balanced"},
}


@pytest.mark.parametrize("case", CASES)
def test_coefficients_are_those_of_the_update(case, tmp_path):
    """With SGD an update is the sum of its tokens' gradients times their coefficients: nothing may
    be left over for "rest".
    """
    trainer = trl_tiny.ours(tmp_path, args=SGD | CASES[case])
    trainer.train()
    tokens = pq.read_table(
        tmp_path / "counterpoise" / "tokens" / "batch_000000.parquet"
    ).to_pandas()
    trained = tokens[tokens["loss_mask"]]
    assert set(trained["update"]) == {0, 1, 2, 3}
    size = trained["predicted"].abs().max()
    assert size > 1e-3
    assert trained["part_sign_rest"].abs().max() < 1e-3 * size
    assert trained[["predicted", "delta"]].corr().iloc[0, 1] > 0.99
    left_out = tokens[~tokens["loss_mask"]]
    assert (len(left_out) > 0) == (case == "rows left out")
    assert left_out["coef"].isna().all()


def test_every_pass_over_a_generation_is_booked(tmp_path):
    """``num_iterations=2``: two updates a pass, four in all; a token has a row for each pass."""
    args = {"method": "dapo", "num_iterations": 2, "steps_per_generation": 4}
    trl_tiny.ours(tmp_path, args=SGD | args).train()
    folder = tmp_path / "counterpoise"
    tokens = pq.read_table(folder / "tokens" / "batch_000000.parquet").to_pandas()
    assert set(tokens["update"]) == {0, 1, 2, 3}
    key = ["rollout", "position"]
    assert (tokens.groupby(key).size() == 2).all()
    first, second = (tokens[tokens["update"].isin(pair)] for pair in ((0, 1), (2, 3)))
    assert len(first) == len(second)
    assert (first["ratio"] - 1).abs().max() < (second["ratio"] - 1).abs().max()
    size = tokens["predicted"].abs().max()
    assert tokens["part_sign_rest"].abs().max() < 1e-3 * size
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
    shown = open_batch(open_run(folder), 0)
    assert len(shown.column("token_id").value_T) == len(first)
    expected = first.sort_values(["group", *key])
    assert shown.column("delta").value_T.tolist() == pytest.approx(expected["delta"].tolist())


def test_training_may_end_between_two_passes(tmp_path):
    args = {"method": "dapo", "num_iterations": 2, "steps_per_generation": 4, "max_steps": 2}
    trl_tiny.ours(tmp_path, args=SGD | args).train()
    tokens = pq.read_table(tmp_path / "counterpoise" / "tokens" / "batch_000000.parquet")
    assert set(tokens["update"].to_pylist()) == {0, 1}


def test_a_batch_that_training_did_not_finish_is_booked_as_far_as_it_came(tmp_path):
    trl_tiny.ours(tmp_path, args=SGD | {"method": "dapo", "max_steps": 3}).train()
    tokens = pq.read_table(
        tmp_path / "counterpoise" / "tokens" / "batch_000000.parquet"
    ).to_pandas()
    assert set(tokens["update"].dropna()) == {0, 1, 2}
    assert 0 < tokens["update"].isna().mean() < 0.5


def test_training_with_the_ledger_is_training_without_it(tmp_path):
    args = {"method": "delta", "plan": "query_preserved"}
    without = trl_tiny.ours(tmp_path / "without", args=args)
    without.train()
    watched = trl_tiny.ours(
        tmp_path / "with", args=args | {"ledger_every": 1, "ledger_decompose": ["sign", "category"]}
    )
    watched.train()
    trl_tiny.assert_identical(trl_tiny.weights(watched), trl_tiny.weights(without))


def test_out_of_memory_costs_a_generation_its_account_and_not_the_run(tmp_path, monkeypatch):
    """The first generation's account fails: no table, its other numbers are there, the second
    generation has both.
    """
    calls = []

    def account(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no memory")
        return real(*args, **kwargs)

    real = book.account
    monkeypatch.setattr(book, "account", account)
    trl_tiny.ours(tmp_path, args=SGD | {"method": "dapo", "max_steps": 8}).train()
    folder = tmp_path / "counterpoise"
    assert [path.name for path in (folder / "tokens").iterdir()] == ["batch_000001.parquet"]
    first, second = (
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    )
    assert "reward/mean" in first and "ledger/flip/all" not in first
    assert "ledger/flip/all" in second


def test_files_and_metrics(tmp_path):
    """Every second generation token by token, the numbers of each; the folder opens as a run, and
    TRL reports the summary.
    """
    trainer = trl_tiny.ours(
        tmp_path, args=SGD | {"method": "top_entropy", "ledger_every": 2, "max_steps": 12}
    )
    trainer.train()
    folder = tmp_path / "counterpoise"
    run = open_run(folder)
    assert run.problems == []
    assert (run.batches("tokens"), run.batches("rollouts")) == ([0, 2], [0, 2])
    assert run.manifest["host"] == "trl"
    assert run.config["method"]["credit"] == [{"name": "top_entropy"}]
    columns = run.columns("tokens", 2)
    assert columns[: len(TOKEN_COLUMNS)] == list(TOKEN_COLUMNS)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["batch"] for row in rows] == [0, 1, 2]
    generated = [row for row in trainer.state.log_history if "reward" in row]
    assert [row["reward/mean"] for row in rows] == pytest.approx(
        [row["reward"] for row in generated]
    )
    assert [row["rollouts/length"] for row in rows] == pytest.approx(
        [row["completions/mean_length"] for row in generated]
    )
    logged = [row for row in trainer.state.log_history if "ledger/flip/all" in row]
    assert [row["ledger/flip/all"] for row in logged] == [
        rows[0]["ledger/flip/all"],
        rows[2]["ledger/flip/all"],
    ]
    assert rows[0]["credit/top_entropy/kept_frac"] == pytest.approx(0.2, abs=0.05)


def test_the_rollout_table(tmp_path):
    trainer = trl_tiny.ours(
        tmp_path, args=SGD | {"method": "dapo", "max_steps": 1}, rollout_func=trl_tiny.told
    )
    trainer.train()
    table = pq.read_table(
        tmp_path / "counterpoise" / "rollouts" / "batch_000000.parquet"
    ).to_pandas()
    assert table["group"].tolist() == [k // 4 for k in range(32)]
    assert table["reward"].tolist() == trl_tiny.graded(table["text"])
    told = trl_tiny.told(table["prompt"].tolist(), trainer)
    assert [ids.tolist() for ids in table["token_ids"]] == told["completion_ids"]
    for row in table.itertuples():
        assert row.credit.tolist() == pytest.approx([row.advantage] * len(row.token_ids))


def test_trls_own_shuffle_is_audited(tmp_path):
    """Without a plan of ours: what TRL's shuffle did is written down and logged.

    The rows are those that were trained on.
    """
    trainer = trl_tiny.ours(tmp_path, args=SGD | {"method": "uniform"})
    trainer.train()
    plan = open_run(tmp_path / "counterpoise").plan(0)
    micros = [sorted(micro["cp_row"].tolist()) for micro in trainer._buffered_inputs]
    assert plan["rows"] == [sorted(micros[k] + micros[k + 1]) for k in range(0, 8, 2)]
    assert plan["plan"] == {"name": "random_rows"}
    (row,) = [row for row in trainer.state.log_history if "plan/pairs_kept" in row]
    assert 0 < row["plan/pairs_kept"] < 0.6
    assert row["plan/prompts_split_frac"] > 0.5


def test_tensorboard_shows_the_numbers(tmp_path, monkeypatch):
    """By TRL's own reporting; W&B and trackio get the same rows."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    args = {"method": "delta", "plan": "query_preserved", "report_to": ["tensorboard"]}
    trainer = trl_tiny.ours(tmp_path, args=SGD | args)
    trainer.train()
    (file,) = (tmp_path / "events").rglob("events.out.*")
    events = event_accumulator.EventAccumulator(str(file)).Reload()
    for name in ("ledger/flip/all", "credit/delta/mass_ratio", "plan/pairs_kept"):
        (expected,) = [row[name] for row in trainer.state.log_history if name in row]
        assert [event.value for event in events.Scalars(f"train/{name}")] == pytest.approx(
            [expected]
        )
