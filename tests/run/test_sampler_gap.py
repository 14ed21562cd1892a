"""The gap between sampler and trainer, token by token: in the files, and as the viewer reads it."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from counterpoise.run.read import open_run
from counterpoise.trainer.config import parse_config
from counterpoise.trainer.loop import train
from counterpoise.viewer.tokens import open_batch


def run_of(folder, method, every):
    config = {
        "run_dir": str(folder),
        "model": "bundled",
        "device": "cpu",
        "task": {"name": "helpers.probe_run:Coin"},
        "method": method,
        "num_batches": 2,
        "rollouts": {"prompts": 2, "group_size": 4, "max_new_tokens": 8, "temperature": 0.8},
        "optimizer": {"lr": 1e-3, "updates_per_batch": 2},
        "eval": {"every": 0},
        "ledger": {"every": every},
        "trackers": [],
    }
    train(parse_config(config))
    return [
        pq.read_table(folder / "rollouts" / f"batch_{k:06d}.parquet").column_names for k in range(2)
    ]


def test_a_ledger_knows_the_gap_of_tokens_of_later_updates_too(tmp_path):
    with_ledger, without = run_of(tmp_path / "run", {"name": "grpo"}, 2)
    assert "trainer_logp" in with_ledger and "trainer_logp" not in without
    table = pq.read_table(tmp_path / "run" / "tokens" / "batch_000000.parquet").to_pandas()
    assert table["update"].nunique() == 2
    assert table["sampler_gap"].abs().max() < 1e-4
    later = table[table["update"] == 1]
    moved = (later["trainer_logp"] - later["sampler_logp"] - later["sampler_gap"]).abs()
    assert moved.max() > 1e-3  # what the first update did is no part of it


def test_without_a_ledger_it_is_there_where_the_method_measures_it(tmp_path):
    method = {"name": "dapo", "credit": [{"name": "mismatch_weight"}]}
    first, second = run_of(tmp_path / "run", method, 0)
    assert "trainer_logp" in first and "trainer_logp" in second
    tokens = open_batch(open_run(tmp_path / "run"), 1)
    gap_T = tokens.column("sampler_gap").value_T
    expected_T = tokens.column("trainer_logp").value_T - tokens.column("sampler_logp").value_T
    assert gap_T == pytest.approx(expected_T) and np.abs(gap_T).max() < 1e-4
