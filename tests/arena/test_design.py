"""A design that exists makes sense; it goes to a file and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from counterpoise.arena.design import Arm, read_design, write_design
from counterpoise.arena.runs import merge
from counterpoise.catalogue.registry import method as make_method
from counterpoise.cli.arena import arms_of
from counterpoise.errors import ConfigError
from counterpoise.trainer.config import load_config, parse_config
from helpers.make_arena import make_design


def test_a_design_comes_back_from_its_file(tmp_path):
    design = make_design(["delta", Arm("top", {}, control="delta", seeds=(7, 8))])
    write_design(tmp_path, design)
    assert read_design(tmp_path) == design
    stored = json.loads((tmp_path / "design.json").read_text())
    assert stored["schema"] == 1
    assert stored["arms"][1]["repeats"] == "grpo"


def test_an_arm_is_held_against_its_own_control_or_the_designs():
    design = make_design(["delta", Arm("top", {}, control="delta")])
    names = ("grpo", "grpo again", "delta", "top")
    assert [design.control_of(name) for name in names] == [None, "grpo", "grpo", "delta"]


def test_an_arm_that_repeats_has_seeds_of_its_own():
    arms = [Arm("third", repeats="grpo"), Arm("far", {}, seeds=(900, 901))]
    design = make_design(arms, num_seeds=4, tuning_seeds=(0, 500))
    every = [design.seeds_of(arm.name) for arm in design.arms] + [design.tuning_seeds]
    taken = [seed for seeds in every for seed in seeds]
    assert len(taken) == len(set(taken))
    assert len(design.seeds_of("grpo again")) == len(design.seeds_of("third")) == 4


@pytest.mark.parametrize(
    ("arms", "changes", "message"),
    [
        ([], {"seeds": (1,)}, "two different ones"),
        ([], {"seeds": (1, 1)}, "two different ones"),
        ([], {"seeds": (1, 2), "tuning_seeds": (2, 3)}, r"seeds \[2\] are also tuning seeds"),
        ([Arm("a", seeds=(0, 9))], {}, r"seeds \[0\] are also tuning seeds"),
        ([], {"control": "grop"}, "Did you mean 'grpo'"),
        ([Arm("a", control="b")], {}, "control of 'a': no arm is called 'b'"),
        ([Arm("a", repeats="b")], {}, "repeats of 'a': no arm is called 'b'"),
        ([Arm("a", repeats="grpo again")], {}, "repeats an arm that repeats"),
        ([Arm("a", repeats="grpo", seeds=(100, 5))], {}, "the same runs again"),
        (["grpo"], {}, "come twice"),
        ([], {"rates": ()}, "rates"),
        ([], {"rates": (1e-4, 0.0)}, "rates"),
        ([], {"tuning_seeds": ()}, "no tuning_seeds"),
        ([], {"margin": 0}, "margin"),
        ([], {"evaluations": (30, 0)}, "rising"),
        ([], {"evaluations": ()}, "rising"),
    ],
)
def test_a_design_without_sense_is_refused(arms, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_design(arms, **changes)


def test_a_file_without_a_design_says_what_is_wrong(tmp_path):
    with pytest.raises(ConfigError, match="missing"):
        read_design(tmp_path)
    (tmp_path / "design.json").write_text('{"schema": 1, "arms": [{"nam": "grpo"}]}')
    with pytest.raises(ConfigError, match="is no design.*nam"):
        read_design(tmp_path)
    write_design(tmp_path, make_design())
    stored = json.loads((tmp_path / "design.json").read_text())
    (tmp_path / "design.json").write_text(json.dumps(stored | {"schema": 2}))
    with pytest.raises(ConfigError, match="schema 2"):
        read_design(tmp_path)


CLAIMS = sorted((Path(__file__).parents[2] / "benchmarks" / "claims").glob("*.yaml"))


@pytest.mark.parametrize("file", CLAIMS, ids=lambda path: path.stem)
def test_the_arms_of_planned_claims_can_train(file: Path) -> None:
    arms = arms_of([], file)
    recipe = load_config("demo", []).model_dump(mode="json", exclude_unset=True)
    for arm in arms:
        config = parse_config(merge(recipe, arm.settings))
        method, rollouts = make_method(**config.method), config.rollouts
        method.check_group_size(rollouts.group_size, arm.name)
        method.check_plan(rollouts.prompts, rollouts.group_size, config.optimizer.updates_per_batch)
        assert arm.control is None or arm.control in {other.name for other in arms}
