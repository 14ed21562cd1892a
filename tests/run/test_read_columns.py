"""What was measured for a method's rules is in the ledger, and the viewer can colour by it."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from counterpoise.run.read import open_run
from counterpoise.run.schema import TOKEN_READ_COLUMNS
from counterpoise.trainer.config import parse_config
from counterpoise.trainer.loop import train
from counterpoise.viewer.api import batch_info
from counterpoise.viewer.tokens import open_batch

MEASURED = {
    "value": {"name": "vine_ppo", "credit": {"samples": 2}},
    "teacher_gap": {"name": "opsd"},
    "importance": {"name": "oar"},
}


def table_of(folder, method):
    config = {
        "run_dir": str(folder),
        "model": "bundled",
        "device": "cpu",
        "task": {"name": "arithmetic"},
        "method": method,
        "num_batches": 1,
        "rollouts": {"prompts": 4, "group_size": 4, "max_new_tokens": 64},
        "eval": {"every": 0},
        "ledger": {"every": 1},
        "trackers": [],
    }
    train(parse_config(config))
    return pq.read_table(folder / "tokens" / "batch_000000.parquet").to_pandas()


@pytest.mark.parametrize("name", MEASURED)
def test_the_ledger_has_what_the_rule_read_and_the_viewer_shows_it(name, tmp_path):
    table = table_of(tmp_path / "run", MEASURED[name])
    assert table[name].notna().any() and table[name].nunique() > 1
    assert not (TOKEN_READ_COLUMNS.keys() - {name}) & set(table.columns)
    run = open_run(tmp_path / "run")
    tokens = open_batch(run, 0)
    assert np.isfinite(tokens.column(name).value_T).any()
    kinds = {column["name"]: column["kind"] for column in batch_info(tokens)["columns"]}
    assert kinds[name] == ("diverging" if name == "teacher_gap" else "sequential")


def test_a_method_that_reads_none_of_them_has_no_such_columns(tmp_path):
    assert not TOKEN_READ_COLUMNS.keys() & set(table_of(tmp_path / "run", {"name": "grpo"}).columns)
