"""What a comparison may say: by t over seeds, together over all methods, and nothing of runs that
cannot be compared.
"""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import typer
import yaml
from scipy import stats as scipy_stats
from typer.testing import CliRunner

from counterpoise.cli.compare import compare
from counterpoise.maths.intervals import over_seeds, welch
from counterpoise.report.compare import comparison
from counterpoise.report.page import write_report
from counterpoise.report.runs import eval_curve, group_runs
from counterpoise.run.read import open_run
from counterpoise.text import percent
from helpers.make_run import make_run

SMALL = {"num_batches": 4, "prompts": 2, "group_size": 4, "ledger_every": 0, "eval_every": 2}


def make_runs(root, methods, seeds, **settings):
    return [
        make_run(root / f"{name}-{seed}", method=name, seed=seed, **(SMALL | settings))
        for name in methods
        for seed in range(seeds)
    ]


def set_final(path, value):
    """The last evaluation of a run with another accuracy."""
    lines = [json.loads(line) for line in (path / "evals.jsonl").read_text().splitlines()]
    lines[-1]["eval/accuracy"] = value
    (path / "evals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def cut(path, batches):
    """A run that was stopped after so many batches."""
    for name, last in (("metrics.jsonl", batches - 1), ("evals.jsonl", batches)):
        rows = [json.loads(line) for line in (path / name).read_text().splitlines()]
        kept = [row for row in rows if row["batch"] <= last]
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in kept))


def compare_groups(paths, **settings):
    return comparison(group_runs([open_run(path) for path in paths]), **settings)


def shown(*args):
    app = typer.Typer()
    app.command()(compare)
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})


def test_a_difference_over_seeds_is_welchs(tmp_path):
    paths = make_runs(tmp_path, ("grpo", "delta"), 5)
    finals = [0.50, 0.52, 0.49, 0.55, 0.51, 0.60, 0.70, 0.55, 0.66, 0.58]
    for path, value in zip(paths, finals):
        set_final(path, value)
    line = compare_groups(paths).lines[1]
    want = scipy_stats.ttest_ind(finals[5:], finals[:5], equal_var=False)
    assert line.difference[1:] == pytest.approx(tuple(want.confidence_interval(0.95)), abs=1e-9)
    assert line.difference_over == "seeds"
    assert line.verdict == "better"


def test_copies_of_a_run_are_no_seeds(tmp_path):
    paths = make_runs(tmp_path, ("grpo", "delta"), 1)
    copies = [shutil.copytree(path, path.with_name(f"copy-{path.name}")) for path in paths]
    result = compare_groups([*paths, *copies, paths[0]])
    assert [line.seeds for line in result.lines] == [1, 1]
    assert result.lines[1].verdict in ("no verdict: one seed", "within noise (one seed)")
    assert "copy-grpo-0 has the seed of grpo-0 (0) and is left out." in result.notes


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"task": {"name": "sums"}}, "no verdict: other task or evaluation"),
        ({"eval": {"every": 2, "prompts": 7}}, "no verdict: other task or evaluation"),
        ({"optimizer": {"lr": 0.5}}, "better"),
    ],
)
def test_what_else_differs_is_said_and_another_task_has_no_verdict(tmp_path, change, verdict):
    paths = make_runs(tmp_path, ("grpo", "delta"), 3)
    for path, value in zip(paths, (0.5, 0.51, 0.52, 0.7, 0.71, 0.72)):
        set_final(path, value)
        config = yaml.safe_load((path / "config.yaml").read_text())
        more = change if "delta" in path.name else {}
        (path / "config.yaml").write_text(yaml.safe_dump(config | more))
    result = compare_groups(paths)
    assert result.lines[1].verdict == verdict
    assert any(f" in {next(iter(change))}." in note for note in result.notes)


def test_prompts_of_graded_rewards_count_as_right_or_not(tmp_path):
    """One run per side, so the difference is over prompts: rewards of 3 are right, 2 is not."""
    paths = make_runs(tmp_path, ("grpo", "delta"), 1)
    for path, rewards in zip(paths, ([2, 2, 2, 3], [3, 3, 3, 2])):
        set_final(path, rewards.count(3) / 4)
        rows = [json.loads(line) for line in (path / "evals.jsonl").read_text().splitlines()]
        rows[-1]["reward_PK"] = [[reward] for reward in rewards]
        (path / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = yaml.safe_load((path / "config.yaml").read_text())
        task = {**config.get("task", {}), "success": 3.0}
        (path / "config.yaml").write_text(yaml.safe_dump(config | {"task": task}))
    assert compare_groups(paths).lines[1].difference.mean == pytest.approx(0.5)


def test_more_methods_need_more_to_be_better(tmp_path):
    # one difference that leaves 0 out alone, and does not beside four other methods
    finals = {"grpo": [0.50, 0.52, 0.49, 0.55, 0.51], "delta": [0.54, 0.60, 0.53, 0.58, 0.56]}
    others = ("fade", "gtpo", "rloo", "dapo")
    paths = make_runs(tmp_path, ("grpo", "delta", *others), 5)
    for at, path in enumerate(paths):
        set_final(path, (finals["grpo"] + finals["delta"] + finals["grpo"] * 4)[at])
    alone, beside = compare_groups(paths[:10]).lines[1], compare_groups(paths).lines[1]
    assert alone.verdict == "better"
    assert beside.verdict.startswith("within noise")
    # Bonferroni: each of five at 99%
    want = scipy_stats.ttest_ind(finals["delta"], finals["grpo"], equal_var=False)
    assert beside.difference[1:] == pytest.approx(tuple(want.confidence_interval(0.99)), abs=1e-9)
    assert any("5 comparisons" in note for note in compare_groups(paths).notes)


def test_variances_of_other_methods_do_not_matter():
    # a pooled variance (Dunnett's test) lets one wild method widen the interval of a calm one
    a, b = [0.50, 0.51, 0.50, 0.51, 0.50], [0.53, 0.54, 0.53, 0.54, 0.53]
    assert welch(a, b, comparisons=2).low > 0
    wild = [0.1, 0.9, 0.3, 0.8, 0.2]
    assert scipy_stats.dunnett(b, wild, control=a).confidence_interval(0.95).low[0] < 0


def test_simultaneous_intervals_cover_all_means_at_once():
    # null runs with unequal variances: at most one table in twenty says anything
    rng = np.random.default_rng(0)
    scale_M = np.array([1.0, 0.2, 3.0, 1.0])
    false = 0
    for _ in range(400):
        value_MS = rng.normal(0, scale_M[:, None], (4, 5))
        bounds = [welch(value_MS[0], value_S, comparisons=3) for value_S in value_MS[1:]]
        false += any(b.low > 0 or b.high < 0 for b in bounds)
    assert false / 400 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 400)


def test_one_seed_decides_nothing(tmp_path):
    paths = make_runs(tmp_path, ("grpo",), 1, gain=0.3)
    paths += make_runs(tmp_path, ("delta",), 1, gain=1.6)
    line = compare_groups(paths).lines[1]
    assert line.difference.low > 0  # surely better on these prompts
    assert line.verdict == "no verdict: one seed" and line.difference_over == "prompts"


def test_an_unfinished_run_gets_no_verdict(tmp_path):
    paths = make_runs(tmp_path, ("grpo", "delta"), 3, gain=0.3)
    paths += make_runs(tmp_path, ("fade",), 3, gain=1.6)
    cut(paths[4], 2)
    lines = compare_groups(paths).lines
    assert lines[1].verdict == "no verdict: unfinished" and lines[1].difference is None
    assert lines[2].verdict == "better"
    text = shown(*paths, "--no-page").stdout
    assert "no verdict: unfinished" in text and "delta-1 has 2 of 4 batches" in text


def test_an_unfinished_baseline_leaves_no_verdict_at_all(tmp_path):
    paths = make_runs(tmp_path, ("grpo", "delta"), 3)
    cut(paths[0], 2)
    assert compare_groups(paths).lines[1].verdict == "no verdict: unfinished"


def test_runs_of_different_length_get_no_verdict(tmp_path):
    paths = make_runs(tmp_path / "short", ("grpo",), 3, num_batches=2)
    paths += make_runs(tmp_path / "long", ("delta",), 3)
    found = compare_groups(paths)
    assert found.lines[1].verdict == "no verdict: other length"
    assert found.lines[1].difference is None
    assert any("grpo: 2" in note and "delta: 4" in note for note in found.notes)


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_one_number_has_one_interval_on_a_page(tmp_path, seeds):
    paths = make_runs(tmp_path, ("grpo", "delta"), seeds)
    path, page = write_report(paths, tmp_path / "page.html")
    assert page.comparison is not None
    card = next(card for card in page.cards["learning"] if card.chart.name == "accuracy")
    html = path.read_text()
    for line, key, group in zip(page.comparison.lines, card.drawing.keys, page.groups):
        assert key.text == percent(*line.final)
        assert html.count(key.text) >= 2  # the table and the chart's legend
        curve = eval_curve(group)
        assert curve is not None
        assert (curve.low[-1], curve.high[-1]) == pytest.approx(line.final[1:])
        if seeds > 1:
            finals = [run.evals[-1]["eval/accuracy"] for run in group.runs]
            assert line.final == pytest.approx(over_seeds(finals))


def test_terminal_and_page_write_the_same_numbers(tmp_path):
    paths = make_runs(tmp_path, ("grpo", "delta"), 3)
    text = shown(*paths, "--out", tmp_path / "page.html").stdout
    html = (tmp_path / "page.html").read_text()
    found = compare_groups(paths)
    for line in found.lines:
        assert percent(*line.final) in text and percent(*line.final) in html
    assert f"reached {100 * found.threshold:.1f}%" in text
    one = write_report(paths[:1], tmp_path / "one.html")[1]
    last = open_run(paths[0]).evals[-1]
    assert one.tiles[0].value == percent(
        *(last[f"eval/accuracy{end}"] for end in ("", "_low", "_high"))
    )
