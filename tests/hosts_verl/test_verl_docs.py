"""docs/hosts/verl.md: its command line is one that verl's configuration and our checks accept, its table is what the code does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip(
    "verl.trainer.ppo.v1", reason="verl has its own environment: scripts/make_verl_env.sh .venv/bin/python .venv-verl"
)

import counterpoise as cp
from counterpoise.hosts.verl import register
from counterpoise.hosts.verl_checks import check_config, mode_of
from counterpoise.hosts.verl_methods import agg_mode, loss_trouble, setup, trainer_trouble

pytestmark = [pytest.mark.hosts, pytest.mark.verl]
register()
PAGE = (Path(__file__).parents[2] / "docs" / "hosts" / "verl.md").read_text()


def composed(*more):
    from hydra import compose, initialize_config_module

    command = re.search(r"python3 -m verl.trainer.main_ppo \\\n(.*?)```", PAGE, re.DOTALL)
    assert command is not None
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*shlex.split(command[1].replace("\\\n", " ")), *more])


def test_the_command_line_is_accepted_by_verl_and_by_us():
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils.config import validate_config

    made = composed("+algorithm.counterpoise.credit=[{name:top_entropy,fraction:0.2}]")
    validate_config(made, use_reference_policy=need_reference_policy(made), use_critic=need_critic(made))
    assert get_trainer_cls(made.trainer.v1.trainer_mode).__name__ == "CreditSync"
    credit, plan = check_config(made, mode_of(made.trainer.v1.trainer_mode))
    assert credit is not None and plan is not None
    assert credit.method.describe()["credit"] == [{"name": "top_entropy", "fraction": 0.2}]
    assert plan.method.describe()["plan"] == {"name": "query_preserved"}


def test_the_table_is_what_the_code_does():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE))
    expected = {}
    for name in cp.methods():
        try:
            made = setup(name)
            credit = "alone" if made.is_reward_only else "no" if trainer_trouble(made) else "trainer"
        except ValueError:
            credit = "no"
        method = cp.method(name)
        expected[name] = f"{credit} | {'no' if loss_trouble(method) else agg_mode(method)}"
    assert rows == expected
