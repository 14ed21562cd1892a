"""A method is labelled by its preset and what a recipe changed."""

from __future__ import annotations

import pytest

import counterpoise as cp
from counterpoise.catalogue.label import label
from counterpoise.report.runs import group_runs
from counterpoise.run.read import open_run
from helpers.make_run import make_run


@pytest.mark.parametrize("name", sorted(cp.methods()))
def test_a_preset_as_it_is_has_its_own_name(name):
    assert cp.method(name).label == name
    assert label(name) == label({"name": name}) == name


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ({"name": "grpo", "plan": "query_preserved"}, "grpo, plan query_preserved"),
        ({"name": "grpo", "plan": "random_rows", "controller": None}, "grpo"),
        ({"name": "grpo", "loss": {"clip_high": 0.3}}, "grpo, loss clip_high=0.3"),
        ({"name": "grpo", "loss": {"clip_high": 0.2}}, "grpo"),
        ({"name": "delta", "credit": []}, "delta, credit none"),
        (
            {"name": "dapo", "credit": ["conflict", {"name": "top_entropy", "fraction": 0.1}]},
            "dapo, credit conflict + top_entropy(fraction=0.1)",
        ),
        ({"name": "mine", "plan": "query_preserved"}, "mine, plan query_preserved"),
    ],
)
def test_what_was_changed_is_named(method, expected):
    assert label(method) == expected


def test_a_method_prints_in_a_few_lines():
    text = repr(cp.method("grpo", plan="query_preserved"))
    assert text.splitlines()[0] == "Method grpo, plan query_preserved"
    assert "clipped(clip_low=0.2, clip_high=0.2)" in text
    assert len(text.splitlines()) <= 8 and max(map(len, text.splitlines())) <= 100


def test_runs_are_grouped_under_their_label(tmp_path):
    import yaml

    for at, plan in (("a", None), ("b", "query_preserved")):
        run = make_run(tmp_path / at, num_batches=1, prompts=2, group_size=2)
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["method"] = {"name": "grpo"} | ({"plan": plan} if plan else {})
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    groups = group_runs([open_run(tmp_path / at) for at in ("a", "b")])
    assert [group.label for group in groups] == ["grpo", "grpo, plan query_preserved"]


def test_a_run_prints_in_a_few_lines(tmp_path):
    text = repr(cp.load_run(make_run(tmp_path / "run", num_batches=3, prompts=2, group_size=2)))
    assert text.startswith(f"Run {str(tmp_path / 'run')!r}: ") and "3 batches" in text
    assert len(text.splitlines()) <= 6 and max(map(len, text.splitlines())) <= 120
