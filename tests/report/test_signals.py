"""The report's first screen and its signals: the curve in sight, warnings said, numbers of the
files.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd
import pytest

from counterpoise.report.page import content, write_report
from counterpoise.report.warnings import warnings_of
from counterpoise.run.files import write_table
from counterpoise.run.read import open_run
from helpers.browser_fixtures import NEEDS_CHROMIUM, browser, page
from helpers.make_run import make_run

SMALL = {"num_batches": 6, "prompts": 2, "group_size": 4, "ledger_every": 3, "eval_every": 2}
SIGNALS = {"constant_groups", "rewards", "cut", "clipped", "sampler_gap", "grader", "throughput"}
_ = browser, page  # fixtures


@pytest.fixture
def run_dir(tmp_path):
    return make_run(tmp_path / "run", **SMALL)


def rewrite(path, change):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(change(row)) + "\n" for row in rows))


@pytest.mark.browser
@NEEDS_CHROMIUM[1]
def test_the_first_screen_has_the_curve(page, run_dir, tmp_path):
    other = make_run(tmp_path / "other", method="grpo", **SMALL)
    for paths in ([run_dir], [run_dir, other]):
        path, _ = write_report(paths, tmp_path / "page.html")
        page.goto(path.as_uri())
        page.locator("[data-figure='accuracy'] .main-svg").first.wait_for()
        box = page.locator("[data-figure='accuracy']").bounding_box()
        assert box is not None and box["y"] + box["height"] <= 900
        assert page.locator("[data-figure='accuracy']").count() == 1


def test_the_standard_signals_are_there(run_dir):
    found = content([open_run(run_dir)])
    cards = {card.chart.name: card for card in found.cards["signals"]}
    assert set(cards) == SIGNALS | {"pass"}
    assert found.absent["signals"] == []
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    shown = cards["clipped"].drawing.figure.data[-1]
    assert list(shown.y) == [row["loss/clipped_frac"] for row in rows]
    assert "k = 4" in cards["pass"].drawing.keys[0].label
    speed = cards["throughput"].drawing.figure.data[-1]
    assert set(speed.y) == {9000.0}


def test_the_rewards_are_those_of_the_rollouts(run_dir):
    card = next(
        c for c in content([open_run(run_dir)]).cards["signals"] if c.chart.name == "rewards"
    )
    for trace, batch in zip(card.drawing.figure.data, (0, 5)):
        rollouts = pd.read_parquet(run_dir / "rollouts" / f"batch_{batch:06d}.parquet")
        want = rollouts["reward"].value_counts(normalize=True).sort_index()
        assert [float(x) for x in trace.x] == want.index.tolist()
        assert list(trace.y) == pytest.approx(want.tolist())


def test_many_different_rewards_fall_into_bins(run_dir):
    path = run_dir / "rollouts" / "batch_000005.parquet"
    table = pd.read_parquet(path)
    table["reward"] = [k / 7 for k in range(len(table))]
    write_table(path, {name: table[name].tolist() for name in ("rollout", "group", "reward")})
    card = next(
        c for c in content([open_run(run_dir)]).cards["signals"] if c.chart.name == "rewards"
    )
    assert sum(card.drawing.figure.data[-1].y) == pytest.approx(1.0)
    assert len(card.drawing.figure.data[-1].x) <= 11


def test_warnings_of_the_run_are_on_the_page(run_dir, tmp_path):
    said = "nothing to learn for 3 batches: every reward is 0. Look <b>there</b>."

    def warn(row):
        failed = f"the grader failed on {row['batch'] + 1} of 8 rollouts. First, p{row['batch']}: x"
        return row | {"warnings": [failed, *([said] if row["batch"] == 3 else [])]}

    rewrite(run_dir / "metrics.jsonl", warn)
    path, found = write_report([run_dir], tmp_path / "page.html")
    assert found.warnings == [
        "batch 0 and 5 more times: the grader failed on 1 of 8 rollouts. First, p0: x",
        f"batch 3: {said}",
    ]
    html = path.read_text()
    assert 'id="warnings"' in html and "Look &lt;b&gt;there&lt;/b&gt;" in html


def test_nothing_to_learn_is_found_where_nobody_said_it(run_dir):
    assert warnings_of(open_run(run_dir)) == []
    rewrite(
        run_dir / "metrics.jsonl",
        lambda row: row | {"reward/constant_group_frac": 1.0 if row["batch"] in (1, 2, 3) else 0.5},
    )
    assert warnings_of(open_run(run_dir)) == [
        "batch 1 to 3: nothing to learn: the rewards of each prompt are equal, so no rollout has an"
        " advantage."
    ]


def test_nothing_to_learn_is_found_from_the_rollouts_alone(run_dir):
    def forget(row):
        return {key: value for key, value in row.items() if key != "reward/constant_group_frac"}

    rewrite(run_dir / "metrics.jsonl", forget)
    for batch in (2, 3, 4, 5):
        path = run_dir / "rollouts" / f"batch_{batch:06d}.parquet"
        table = pd.read_parquet(path)
        write_table(path, {"group": table["group"].tolist(), "reward": [0.0] * len(table)})
    assert warnings_of(open_run(run_dir))[0].startswith("batch 2 to 5: nothing to learn")


def test_the_report_follows_no_planted_name(run_dir, tmp_path):
    """Neither a link under the temporary name, nor one in place of the page, nor of its folder."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (run_dir / "report").mkdir()
    for name in (".index.html.tmp", "index.html"):
        (run_dir / "report" / name).symlink_to(victim)
    path, _ = write_report([run_dir])
    assert victim.read_text() == "mine"
    assert path.is_file() and not path.is_symlink()
    (run_dir / "report").rename(tmp_path / "moved")
    os.symlink(tmp_path / "moved", run_dir / "report")
    with pytest.raises(ValueError, match="link that leads elsewhere"):
        write_report([run_dir])
    assert Path(tmp_path / "moved" / "index.html").is_file()
