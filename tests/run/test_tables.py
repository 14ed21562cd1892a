"""The notebook door as a user opens it: ``import counterpoise as cp``, nothing else."""

from __future__ import annotations

import subprocess
import sys

import pandas as pd
import pytest

import counterpoise as cp
from helpers.make_run import make_run


def test_load_run_and_plot_hang_on_the_package(tmp_path):
    path = make_run(
        tmp_path / "run", num_batches=2, prompts=2, group_size=4, ledger_every=1, eval_every=1
    )
    table = pd.read_parquet(path / "tokens" / "batch_000001.parquet")
    assert cp.load_run(path).tokens(batch=1)["delta"].tolist() == table["delta"].tolist()
    assert cp.plot.flips(path).layout.title.text == "Flips"
    assert {"load_run", "plot"} <= set(dir(cp))
    with pytest.raises(AttributeError, match="no attribute 'lod_run'"):
        cp.lod_run  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_the_core_alone_imports_neither():
    script = (
        "import sys, counterpoise; print(sorted({'pandas', 'plotly', 'pyarrow'} &"
        " set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
