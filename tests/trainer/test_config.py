"""Recipes: what is in the repository parses, and mistakes get one line."""

from __future__ import annotations

from pathlib import Path

import pytest

import counterpoise as cp
from counterpoise.tasks import task
from counterpoise.trainer.config import (
    USUAL,
    Config,
    ConfigError,
    Section,
    load_config,
    parse_config,
)

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_parses_and_its_method_and_task_exist(path):
    config = load_config(path)
    assert cp.method(**config.method).name == config.method["name"]
    assert config.run_dir == f"runs/{path.stem}"
    if "path" not in config.task:  # a file of the user
        assert next(iter(task(**config.task).prompts("train", 0))).text
    assert ".." not in path.read_text(), "no recipe points outside the repository"


def test_overrides_are_yaml_and_reach_every_depth(tmp_path):
    (tmp_path / "r.yaml").write_text("method: grpo\n")
    config = load_config(
        tmp_path / "r.yaml",
        [
            "method.name=dapo",
            "method.plan=query_preserved",
            "optimizer.lr=1e-5",
            "num_batches=8",
            "rollouts.top_k=5",
            "lora.r=4",
            "chat=false",
        ],
    )
    assert config.method == {"name": "dapo", "plan": "query_preserved"}
    assert config.optimizer.lr == 1e-5
    assert (config.num_batches, config.rollouts.top_k, config.chat) == (8, 5, False)
    assert config.lora is not None and config.lora.r == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nmu_batches: 3\n", "unknown key 'nmu_batches'. Did you mean 'num_batches'"),
        ("optimizer: {lrr: 1}\n", "unknown key 'optimizer.lrr'. Did you mean 'lr'"),
        (
            "optimizer: {learning_rate: 1}\n",
            "'optimizer.learning_rate'. Here it is .*'optimizer.lr'",
        ),
        ("batch_size: 8\n", "unknown key 'batch_size'. Here it is called 'rollouts.prompts'"),
        ("trackers: [foo]\n", r"trackio, wandb, got \['foo'\]\.$"),
        ("lora: {rank: 1}\n", "unknown key 'lora.rank'. Known: alpha, r, target_modules"),
        ("num_batches: many\n", "num_batches: .* got 'many'"),
        ("rollouts: {temperature: 0}\n", "rollouts.temperature: .* got 0"),
        ("trackers: [tensorbord]\n", "unknown tracker 'tensorbord'. Did you mean 'tensorboard'"),
        ("method: {plan: x}\n", "method: expected a name or a mapping with 'name'"),
        ("- 1\n", "must be a mapping"),
        ("a: [1\n", "is not YAML"),
    ],
)
def test_a_wrong_recipe_is_one_clear_line(tmp_path, text, message):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(tmp_path / "r.yaml")
    assert "\n" not in str(caught.value)


def test_missing_file_and_bad_override(tmp_path):
    (tmp_path / "r.yaml").write_text("seed: 0\n")
    with pytest.raises(ConfigError, match="no file 'nowhere.yaml'"):
        load_config("nowhere.yaml")
    with pytest.raises(ConfigError, match="expected a.b=c"):
        load_config(tmp_path / "r.yaml", ["num_batches"])
    with pytest.raises(ConfigError, match="'seed' is 0, not a mapping"):
        load_config(tmp_path / "r.yaml", ["seed.x=1"])


def test_an_empty_recipe_is_the_default():
    config = parse_config({})
    assert (config.model, config.task["name"], config.optimizer.updates_per_batch) == (
        "bundled",
        "arithmetic",
        4,
    )


@pytest.mark.parametrize("key", USUAL.values())
def test_what_usual_names_lead_to_is_there(key):
    *section, name = key.split(".")
    home = Config.model_fields[section[0]].annotation if section else Config
    assert name in home.model_fields  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("section", [Section, *Section.__subclasses__()], ids=lambda s: s.__name__)
def test_every_key_has_a_description(section):
    assert [key for key, field in section.model_fields.items() if not field.description] == []
