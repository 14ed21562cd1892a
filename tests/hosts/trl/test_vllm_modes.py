"""TRL's two vLLM modes, with a stand-in for vLLM that samples on a CPU: in the trainer's process
(colocate), and behind TRL's client (server) with one process and with two, by DDP and by FSDP2.

TRL imports vllm when it is imported, so the trainings run in processes of their own.
"""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
from helpers import trl_tiny
from helpers.trl_processes import assert_same_training, launched

pytestmark = pytest.mark.hosts
HELPERS = Path(__file__).parents[2] / "helpers"
GROUP = trl_tiny.SMALL["num_generations"]
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
METHODS = ("delta", "ntf_whitened", "fade", "whole_prompts")
UNSENT = ("unsent", "asleep_unsent")
SERVED = ("server/plain", "server/delta", "server/fade", "server/dfpo_min")
BY_DDP = ("server/plain", "server/ledger", "server/delta", "server/fade")
BY_FSDP2 = ("server/plain", "server/ledger", "server/delta", "server/dfpo_min", "asleep")
COLOCATE = (
    *(f"{name}/{mode}" for name in ("plain", "ledger") for mode in MODES),
    *("uniform", *METHODS, "asleep", *UNSENT),
)
TWO = (*BY_DDP, *(f"fsdp2/{name}" for name in BY_FSDP2))
PLANNED = [name for name in TWO if name.endswith(("delta", "fade", "dfpo_min"))]


def trained(tmp_path_factory, names, world):
    out = tmp_path_factory.mktemp("vllm") / "out.pt"
    path = [HELPERS / "vllm_stand_in"]
    return launched(HELPERS / "trl_vllm.py", out, names, world=world, path=path)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return trained(tmp_path_factory, [*COLOCATE, *SERVED], 1)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return trained(tmp_path_factory, TWO, 2)


def gap(first, second):
    return trl_tiny.largest_gap(first["weights"], second["weights"])


def assert_rows_are_requests(result):
    """Each rollout belongs to the prompt for which it was drawn and has the reward of its text."""
    assert len(result["rows"]) == len(result["requests"]) == 2
    for rows, requests in zip(result["rows"], result["requests"]):
        prompts, completions, groups, rewards = zip(*rows)
        assert list(zip(prompts, completions)) == requests
        assert list(groups) == [row // GROUP for row in range(len(rows))]
        assert len({tuple(prompt) for prompt in prompts}) == len(rows) // GROUP == 4
        assert all(prompts[row] == prompts[row - row % GROUP] for row in range(len(rows)))
        assert rewards == pytest.approx([reward_of(ids) for ids in completions])


def reward_of(ids):
    """By hand: the words of the tiny tokenizer are w0, w1, ... from token 2 on."""
    text = " ".join(f"w{token - 2}" for token in ids if token > 1)
    return sum(map(ord, text)) % 7 / 6


@pytest.mark.parametrize("mode", MODES)
def test_uniform_is_plain_trl(mode, one):
    """Bit for bit, with the ledger: the method's whole path runs."""
    plain, ours = one[f"plain/{mode}"], one[f"ledger/{mode}"]
    trl_tiny.assert_identical(ours["weights"], plain["weights"])
    assert ours["requests"] == plain["requests"] and ours["losses"] == plain["losses"]
    assert len(plain["losses"]) == 4 and all(plain["losses"])


@pytest.mark.parametrize("mode", MODES)
def test_the_ledger_has_the_gap_between_sampler_and_trainer_that_trl_logs(mode, one):
    result = one[f"ledger/{mode}"]
    assert len(result["ledger_gaps"]) == 2 and min(result["ledger_gaps"]) > 1e-6
    # TRL logs with every generation's first update
    assert result["ledger_gaps"] == pytest.approx(
        result["trl_gaps"][:: len(result["trl_gaps"]) // 2], rel=1e-4
    )


def test_uniform_without_the_ledger_is_plain_trl(one):
    trl_tiny.assert_identical(one["uniform"]["weights"], one["plain/token_mask"]["weights"])


def test_the_four_corrections_differ(one):
    """Else the tests above would compare one correction four times."""
    plain = [one[f"plain/{mode}"] for mode in MODES]
    assert min(gap(first, second) for first, second in combinations(plain, 2)) > 1e-6


@pytest.mark.parametrize("name", METHODS)
def test_methods_train(name, one):
    """Two generations of two updates; the credit is the method's."""
    result = one[name]
    assert len(result["losses"]) == 4 and all(map(math.isfinite, result["losses"]))
    assert len(result["credit"]) == 2
    assert gap(result, one["server/plain"]) > 1e-4
    assert_rows_are_requests(result)


def test_whole_prompts_stay_whole(one):
    for plan in one["whole_prompts"]["plans"]:
        assert len(plan) == 2
        for rows in plan:
            assert len(rows) == 2 * GROUP and len({row // GROUP for row in rows}) == 2


@pytest.mark.parametrize("name", [name for name in (*COLOCATE, *SERVED) if name not in UNSENT])
def test_weights_are_sent(name, one):
    """Whenever it draws, vLLM has the trainer's weights."""
    assert one[name]["gaps"] == [0, 0]


@pytest.mark.parametrize("name", TWO)
def test_weights_are_sent_by_two_processes(name, two):
    """To one server, or to the engine of each process."""
    assert two[name]["gaps"] == [0, 0] * (1 if "server" in name else 2)


def test_weights_that_are_not_sent_show(one):
    """The same with sending left out after the first generation: vLLM stays behind."""
    unsent, sent = one["unsent"], one["whole_prompts"]
    assert unsent["gaps"][0] == 0 and unsent["gaps"][1] > 1e-4
    assert unsent["requests"][0] == sent["requests"][0]
    assert gap(unsent, sent) > 1e-4


def test_sleep_changes_nothing(one):
    asleep, awake = one["asleep"], one["whole_prompts"]
    assert asleep["requests"] == awake["requests"]
    trl_tiny.assert_identical(asleep["weights"], awake["weights"])


def test_sleep_forgets_the_weights(one):
    """The stand-in cannot draw after it slept and nothing was sent."""
    result = one["asleep_unsent"]
    assert "send the weights first" in result["error"] and len(result["requests"]) == 1


def test_both_modes_train_alike(one):
    """From equal seeds; nothing but vLLM draws from numpy's global state."""
    assert one["server/delta"]["requests"] == one["whole_prompts"]["requests"]
    trl_tiny.assert_identical(one["server/delta"]["weights"], one["whole_prompts"]["weights"])


@pytest.mark.parametrize("name", PLANNED)
def test_two_processes_with_a_server(name, one, two):
    """The rollouts are those of one process, and so is what is made of them. (TRL's own shuffle
    depends on the number of processes, a plan does not.)
    """
    got, expected = two[name], one[name.removeprefix("fsdp2/")]
    assert got["requests"] == expected["requests"]
    assert got["num_sharded"] == (len(got["weights"]) if name.startswith("fsdp2/") else 0)
    assert_rows_are_requests(got)
    assert_same_training(got, expected)


@pytest.mark.parametrize("engine", ["", "fsdp2/"], ids=["ddp", "fsdp2"])
def test_uniform_with_a_server_is_plain_trl(engine, two):
    plain, ours = two[f"{engine}server/plain"], two[f"{engine}server/ledger"]
    trl_tiny.assert_identical(ours["weights"], plain["weights"])
    assert ours["requests"] == plain["requests"]
    assert_rows_are_requests(ours)


def test_the_controller_of_two_processes(one, two):
    expected = one["server/fade"]["controller"]
    assert two["server/fade"]["controller"] == pytest.approx(expected, abs=1e-6)


def test_an_engine_in_each_of_two_processes(two):
    """Colocate, FSDP2 and sleep: each engine draws for the prompts of its own process."""
    result = two["fsdp2/asleep"]
    assert result["num_sharded"] == len(result["weights"])
    assert_rows_are_requests(result)
    half = len(result["requests"][0]) // 2
    assert [ids for _, ids in result["requests"][0][:half]] != [
        ids for _, ids in result["requests"][0][half:]
    ]
    assert len(result["losses"]) == 4 and all(map(math.isfinite, result["losses"]))
