"""The same training with one process and with two: equal credit, equal plans, equal weights, by DDP
and by FSDP2 (gloo, CPU).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
from helpers.trl_ranks import SCENARIOS

pytestmark = pytest.mark.hosts
SCRIPT = Path(__file__).parents[2] / "helpers" / "trl_ranks.py"
SHARDED = ("delta", "dfpo_min", "fade", "ledger")


def launched(out, names, *, world, engine="ddp"):
    """Run the script in its own processes.

    ``accelerate launch --cpu`` would run one process whatever one asks for, hence torchrun.
    """
    command = [sys.executable, str(SCRIPT), str(out), *names]
    if world > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        run = [
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            str(world),
            "--master_port",
            str(port),
        ]
        command = [sys.executable, *run, str(SCRIPT), str(out), *names]
    settings = {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "ENGINE": engine,
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(out)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("one") / "out.pt", SCENARIOS, world=1)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("two") / "out.pt", SCENARIOS, world=2)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("sharded") / "out.pt", SHARDED, world=2, engine="fsdp2")


def assert_same_training(got, expected):
    assert (expected["world"], got["world"]) == (1, 2)
    assert len(got["credit"]) == len(expected["credit"]) == 2
    for credit_NT, expected_NT in zip(got["credit"], expected["credit"]):
        assert expected_NT.abs().sum() > 0
        torch.testing.assert_close(credit_NT, expected_NT, rtol=0, atol=2e-6)
    assert got["plans"] == expected["plans"]
    assert got["plans"][0] is not None
    moved = max(
        float((expected["weights"][name] - expected["start"][name]).abs().max())
        for name in expected["weights"]
    )
    gap = max(
        float((expected["weights"][name] - got["weights"][name]).abs().max())
        for name in expected["weights"]
    )
    assert moved > 1e-4
    assert gap < 1e-3 * moved


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes_by_ddp(name, one, two):
    assert "MULTI_CPU" in two[name]["engine"]
    assert two[name]["num_sharded"] == 0
    assert_same_training(two[name], one[name])


@pytest.mark.parametrize("name", SHARDED)
def test_two_processes_by_fsdp2(name, one, sharded):
    assert sharded[name]["num_sharded"] == len(sharded[name]["weights"])
    assert_same_training(sharded[name], one[name])


def test_controller_state(one, two, sharded):
    expected = one["fade"]["state"]["controller"]
    assert two["fade"]["state"]["controller"] == pytest.approx(expected, abs=1e-6)
    assert sharded["fade"]["state"]["controller"] == pytest.approx(expected, abs=1e-6)


def test_the_ledger_of_two_processes(one, two, sharded):
    """One book of all rows, kept by the main process; a sharded model's holds the columns of the
    loss.
    """
    expected = one["ledger"]["tokens"]
    for got in (two["ledger"]["tokens"], sharded["ledger"]["tokens"]):
        for name in ("rollout", "position", "token_id", "update"):
            assert got[name] == expected[name], name
        for name in ("coef", "scale", "credit", "ratio"):
            assert got[name] == pytest.approx(expected[name], abs=2e-4), name
    assert two["ledger"]["tokens"]["delta"] == pytest.approx(expected["delta"], abs=2e-4)
    assert set(sharded["ledger"]["tokens"]["delta"]) == {None}
