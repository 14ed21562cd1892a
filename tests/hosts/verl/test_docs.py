"""docs/hosts/verl.md: its command line is one that verl's configuration and our checks accept, its
table is what the code does.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys

import pytest

pytest.importorskip(
    "verl.trainer.ppo.v1",
    reason="verl has its own environment: scripts/make_verl_env.sh .venv/bin/python .venv-verl",
)

import counterpoise as cp
from counterpoise.hosts.verl import checks as verl_checks
from counterpoise.hosts.verl import conversations as verl_conversations
from counterpoise.hosts.verl import data as verl_data
from counterpoise.hosts.verl import method as verl_method
from counterpoise.hosts.verl import plan as verl_plan
from counterpoise.hosts.verl import register
from counterpoise.hosts.verl.checks import check_config, mode_of
from counterpoise.hosts.verl.method import agg_mode, loss_trouble, setup, trainer_trouble
from counterpoise.policy import locate
from helpers.verl.page import PAGE, commands, overrides

pytestmark = [pytest.mark.hosts, pytest.mark.verl]
register()


def composed(**changed):
    from hydra import compose, initialize_config_module

    lines = [f"{key}={value}" for key, value in (overrides() | changed).items()]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=lines)


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_the_command_line_is_accepted_by_verl_and_by_us(nodes):
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils.config import validate_config

    top = {"+algorithm.counterpoise.credit": "[{name:top_entropy,fraction:0.2}]"}
    config = composed(**top, **{"trainer.nnodes": nodes})
    validate_config(
        config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
    )
    assert get_trainer_cls(config.trainer.v1.trainer_mode).__name__ == "CreditSync"
    credit, plan = check_config(config, mode_of(config.trainer.v1.trainer_mode))
    assert credit is not None and plan is not None
    assert credit.method.describe()["credit"] == [{"name": "top_entropy", "fraction": 0.2}]
    assert plan.method.describe()["plan"] == {"name": "query_preserved"}


def test_the_commands_differ_in_the_number_of_nodes():
    machine, cluster = commands()
    assert machine["trainer.nnodes"] == "1"
    assert cluster == machine | {"trainer.nnodes": "2"}


def test_a_key_that_verl_does_not_have_is_an_error():
    from hydra.errors import ConfigCompositionException

    with pytest.raises(ConfigCompositionException, match="ppo_minibatch_size"):
        composed(**{"actor_rollout_ref.actor.ppo_minibatch_size": "64"})


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            {"actor_rollout_ref.rollout.n": "1"},
            "counterpoise/ktae with actor_rollout_ref.rollout.n=1: group_zscore compares",
        ),
        (
            {
                "model_engine": "megatron",
                "actor_rollout_ref.actor.megatron.dynamic_context_parallel": "True",
            },
            "actor.megatron.dynamic_context_parallel=True",
        ),
        (
            {
                "model_engine": "torchtitan",
                "actor_rollout_ref.actor.torchtitan.context_parallel_size": "2",
            },
            "actor.torchtitan.context_parallel_size=2",
        ),
        ({"actor_rollout_ref.actor.shuffle": "True"}, "actor.shuffle=True"),
        (
            {
                "algorithm.rollout_correction.bypass_mode": "True",
                "algorithm.adv_estimator": "counterpoise/fade",
            },
            "bypass_mode=True",
        ),
    ],
)
def test_settings_that_are_refused_are_settings_of_verl(changed, line):
    with pytest.raises(ValueError, match=line):
        check_config(composed(**changed), "sync")


@pytest.mark.parametrize(
    "changed",
    [
        {"actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": "2"},
        {"model_engine": "megatron", "actor_rollout_ref.actor.megatron.context_parallel_size": "2"},
        {"model_engine": "torchtitan"},
        {
            "actor_rollout_ref.rollout.n": "1",
            "algorithm.adv_estimator": "counterpoise/reinforce_pp",
        },
    ],
)
def test_settings_that_are_accepted(changed):
    assert check_config(composed(**changed), "sync")[1] is not None


def test_the_pages_python_runs(tmp_path):
    """In a fresh process, where verl has loaded the plug-in by itself."""
    registered, data = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", data + registered],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().splitlines()[-1] == "[]"
    files = sorted(file.name for file in (tmp_path / "guess").iterdir())
    assert files == ["test.parquet", "train.parquet"]


def test_the_settings_of_turns_are_accepted():
    """The lines of the section "Turns", on top of the page's command."""
    (lines,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    changed = dict(line.split("=", 1) for line in shlex.split(lines))
    changed["actor_rollout_ref.model.path"] = locate("bundled_turns").place
    changed["+algorithm.counterpoise.turns.chat"] = "False"
    credit, _ = check_config(composed(**changed), "sync")
    assert credit is not None and credit.has_turns and credit.method.name == "turn_rloo"


def test_examples_in_docstrings():
    for module in (verl_checks, verl_method, verl_plan, verl_conversations, verl_data):
        done = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
        assert done.attempted > 0 and done.failed == 0


def credit_place(made):
    if made.method.reads_rewards_only:
        return "alone"
    if trainer_trouble(made) is None:
        return "trainer"
    return "no" if trainer_trouble(made._replace(has_turns=True)) else "turns"


def test_the_table_is_what_the_code_does():
    line = r"^\| `(\w+)` \| ((?:alone|trainer|turns|no) \| .*) \|$"
    rows = dict(re.findall(line, PAGE, re.MULTILINE))
    expected = {}
    for name in cp.methods():
        try:
            credit = credit_place(setup(name))
        except ValueError:
            credit = "no"
        method = cp.method(name)
        expected[name] = f"{credit} | {'no' if loss_trouble(method) else agg_mode(method)}"
    assert rows == expected
