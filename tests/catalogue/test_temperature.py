"""A rule that computes probabilities itself does so at the temperature of sampling."""

from __future__ import annotations

from pathlib import Path

import pytest

import counterpoise as cp
from counterpoise.arena.shared import checked_method
from counterpoise.catalogue.temperature import check_temperature
from counterpoise.trainer.config import parse_config
from counterpoise.trainer.loop import train

HEAD = {"name": "delta", "proxy": "head"}
WARM = {"name": "delta", "proxy": "head", "temperature": 0.7}


@pytest.mark.parametrize(
    ("credit", "temperature", "is_fine"),
    [
        ([HEAD], 1.0, True),
        ([HEAD], 0.7, False),
        ([WARM], 0.7, True),
        ([WARM], 1.0, False),
        (["delta"], 0.7, True),  # the other proxies compute no probabilities
        ([{"name": "mix", "rules": ["uniform", HEAD], "weights": [0.5, 0.5]}], 0.7, False),
    ],
)
def test_only_a_rule_that_computes_probabilities_is_held_to_it(
    credit, temperature: float, is_fine: bool
) -> None:
    stages = cp.method("dapo", credit=credit).stages
    if is_fine:
        check_temperature(stages, temperature, "rollouts.temperature")
        return
    with pytest.raises(ValueError, match=f"rollouts.temperature is {temperature:g}. Give the rule"):
        check_temperature(stages, temperature, "rollouts.temperature")


def test_trainer_and_arena_say_it_before_anything_runs(tmp_path: Path) -> None:
    config = parse_config(
        {
            "model": "not_to_be_loaded",
            "run_dir": str(tmp_path / "run"),
            "task": {"name": "arithmetic"},
            "method": {"name": "dapo", "credit": [HEAD]},
            "rollouts": {"temperature": 0.7},
        }
    )
    for start in (train, checked_method):
        with pytest.raises(ValueError, match="delta computes probabilities at temperature 1, and"):
            start(config)
    assert not (tmp_path / "run").exists()
