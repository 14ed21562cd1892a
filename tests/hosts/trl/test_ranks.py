"""The same training with one process and with two: equal credit, equal plans, equal weights, by DDP
and by FSDP2 (gloo, CPU).
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
from helpers.trl_processes import assert_same_training, launched
from helpers.trl_ranks import SCENARIOS, run

pytestmark = pytest.mark.hosts
SCRIPT = Path(__file__).parents[2] / "helpers" / "trl_ranks.py"
SHARDED = ("delta", "dfpo_min", "fade", "ledger", "sdpo")


@pytest.fixture(scope="module")
def one():
    return {name: run(name, world=1) for name in SCENARIOS}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """DDP, then FSDP2: accelerate keeps the engine once it is set."""
    names = [*SCENARIOS, *(f"fsdp2/{name}" for name in SHARDED)]
    return launched(SCRIPT, tmp_path_factory.mktemp("two") / "out.pt", names)


@pytest.fixture(scope="module")
def two(both):
    return {name: both[name] for name in SCENARIOS}


@pytest.fixture(scope="module")
def sharded(both):
    return {name: both[f"fsdp2/{name}"] for name in SHARDED}


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


def test_turns_of_two_processes(one, two):
    """What each turn earned, in which state, from the rollouts of both."""
    expected, got = one["turns"]["rollouts"], two["turns"]["rollouts"]
    for name in ("turn", "turn_reward", "turn_state", "turn_key", "turn_action", "turn_reply"):
        assert got[name] == expected[name], name
    assert len({len(row) for row in expected["turn_reward"]}) > 2
    assert {"dark", "light", ""} == {state for row in expected["turn_state"] for state in row}
