"""What the trainer really writes is what the report and the viewer read: a short run of the bundled model, its numbers told twice alike."""

from __future__ import annotations

import json

import pytest

import browser_fixtures as shared
from browser_fixtures import NEEDS_CHROMIUM
from counterpoise.report import credit_numbers
from counterpoise.report.export import write_export
from counterpoise.report.folder import open_run
from counterpoise.report.page import content, write_report
from counterpoise.report.steps import open_step
from counterpoise.report.viewer_data import step_info

browser, page = shared.browser, shared.page
RECIPE = {
    "model": "bundled",
    "method": {"name": "delta"},
    "num_steps": 2,
    "rollouts": {"prompts": 3, "group_size": 6, "max_new_tokens": 96},
    "optimizer": {"lr": 3e-4, "steps_per_batch": 2},
    "eval": {"every": 2, "prompts": 8},
    "ledger": {"every": 1, "decompose": ["sign"]},
    "trackers": [],
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    from counterpoise.trainer.config import parse_config
    from counterpoise.trainer.loop import train

    path = tmp_path_factory.mktemp("real") / "run"
    train(parse_config({**RECIPE, "run_dir": str(path)}))
    return path


@pytest.fixture(scope="module")
def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_nothing_is_missing(run_dir):
    found = content([open_run(run_dir)])
    assert found.problems == []
    assert {name: titles for name, titles in found.absent.items() if titles} == {"ledger": ["Solution drift"]}
    assert found.samples and found.plan and found.tops


def test_flips_and_changes_are_the_ledgers_own(run_dir, metrics):
    for row in metrics:
        pair = credit_numbers.tokens_of(open_run(run_dir), row["step"])
        assert pair is not None
        for flips in credit_numbers.flip_rates(pair[1]):
            if flips.count:
                assert flips.value.mean == pytest.approx(row[f"ledger/flip/{flips.label}"])
        for sign, shares in credit_numbers.change_shares(pair[1]).items():
            for share in shares:
                if f"ledger/{share.label}/{sign}" in row:
                    assert share.value.mean == pytest.approx(row[f"ledger/{share.label}/{sign}"])


def test_prediction_and_cancellation_are_the_ledgers_own(run_dir, metrics):
    for row in metrics:
        pair = credit_numbers.tokens_of(open_run(run_dir), row["step"])
        assert pair is not None
        seen = credit_numbers.prediction(pair[1])
        assert seen is not None and seen.correlation == pytest.approx(row["ledger/predicted/correlation"], abs=1e-6)
        both = credit_numbers.cancellation_by_sharing(pair[1])[0]
        if both.count:
            assert both.value.mean == pytest.approx(row["ledger/cancellation/both_signs"], rel=1e-5)


def test_the_viewer_has_every_colour(run_dir):
    info = step_info(open_step(open_run(run_dir), 1))
    wanted = {"advantages", "weights", "delta", "predicted", "own", "coupling", "entropy", "confidence", "cancellation", "category"}
    assert wanted <= {column["name"] for column in info["columns"] if column["kind"] != "none"}
    assert info["problems"] == [] and info["source"] == "tokens"
    assert all(group["prompt"] and group["answer"] for group in info["groups"])


@pytest.mark.browser
@NEEDS_CHROMIUM[1]
def test_it_opens_in_a_browser(page, run_dir, tmp_path):
    page.goto(write_report([run_dir])[0].as_uri())
    page.locator("[data-figure='flips']").scroll_into_view_if_needed()
    page.locator("[data-figure='flips'] .main-svg").first.wait_for()
    page.goto(write_export(open_run(run_dir), tmp_path, [1]).as_uri())
    page.locator(".t[data-i='3']").click()
    page.wait_for_selector(".twins.list")
    assert "What moved it" in page.locator("#inspector").inner_text()
