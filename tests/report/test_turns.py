"""The report of a run with turns: its section, its numbers, replies in the samples."""

from __future__ import annotations

import shutil

import pandas as pd
import pytest

import counterpoise as cp
from counterpoise.report.page import content, render
from counterpoise.report.samples import plan_table
from counterpoise.run.read import open_run, read_jsonl
from helpers.make_run import make_run
from helpers.turns_run import turns_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Replies that are hostile, in every rollout."""
    room = {"name": "helpers.rooms:Counting", "reply": "<script>window.pwned=1</script>\x1b[2J"}
    return turns_run(tmp_path_factory.mktemp("runs") / "turns", room)


def test_the_section_of_turns_has_the_files_numbers(run_dir):
    page = content([open_run(run_dir)])
    cards = {card.chart.name: card.drawing for card in page.cards["turns"]}
    assert list(cards) == ["turn_rewards", "num_turns", "ends", "environment"]
    rows = read_jsonl(run_dir / "metrics.jsonl")
    for trace, row in zip(cards["turn_rewards"].figure.data, rows):
        assert list(trace.x) == ["turn 0", "turn 1", "turn 2"]
        assert list(trace.y) == pytest.approx([row[f"turns/reward_{u}"] for u in range(3)])
    assert [key.label for key in cards["ends"].keys] == ["done"]  # the others never came
    assert [key.label for key in cards["environment"].keys] == ["length"]
    lengths = cards["environment"].figure.data[-1].y
    assert list(lengths) == pytest.approx([row["environment/length"] for row in rows])
    assert "3.00 turns per episode" in page.tiles[-1].note
    html = render(page)
    for card in page.cards["turns"]:
        assert card.chart.definition in html and card.chart.title in html
        assert getattr(cp.plot, card.chart.name)(run_dir).layout.title.text == card.chart.title


def test_the_plan_counts_tokens_of_the_model_alone(run_dir):
    batch, table = plan_table(open_run(run_dir))
    rollouts = pd.read_parquet(run_dir / "rollouts" / f"batch_{batch:06d}.parquet")
    drawn = sum(int(mask.sum()) for mask in rollouts["loss_mask"])
    assert drawn < sum(map(len, rollouts["token_ids"]))
    assert sum(int(row[3].replace(",", "")) for row in table.rows) == drawn


def test_a_comparison_of_runs_with_turns_and_without(run_dir, tmp_path):
    other = make_run(tmp_path / "plain", num_batches=2, prompts=2, group_size=4)
    page = content([open_run(run_dir), open_run(other)])
    ends = next(card.drawing for card in page.cards["turns"] if card.chart.name == "ends")
    assert [key.label for key in ends.keys] == ["turn_rloo: done"]
    assert 'id="turns"' in render(page)


def test_runs_without_turns_have_no_such_section(tmp_path):
    page = content([open_run(make_run(tmp_path / "run", num_batches=2, prompts=2, group_size=4))])
    assert page.cards["turns"] == [] and "turns" not in page.absent
    html = render(page)
    assert 'href="#turns"' not in html and 'id="turns"' not in html


@pytest.mark.parametrize("has_ledger", [True, False])
def test_samples_hold_the_replies_as_text(run_dir, tmp_path, has_ledger):
    copy = shutil.copytree(run_dir, tmp_path / "run")
    if not has_ledger:
        shutil.rmtree(copy / "tokens")
    page = content([open_run(copy)])
    batch = page.details[0].samples[0].batch
    rollouts = pd.read_parquet(copy / "rollouts" / f"batch_{batch:06d}.parquet")
    for prompt in page.details[0].samples:
        for sample in prompt.samples:
            row = rollouts.iloc[sample.rollout]
            assert sample.num_tokens == (row["turn"] >= 0).sum()
            shown = [token.text for token in sample.tokens if token.css == "reply"]
            assert len(shown) == (2 if has_ledger else 0)  # nothing is read after the last turn
            assert all("<script>" in text and "\x1b" not in text for text in shown)
    assert "<script>window" not in render(page)
