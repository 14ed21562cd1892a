"""A short run of the demo recipe, in a real browser: what the trainer writes is what the report and
the viewer show, number by number.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from counterpoise.report import tokens as token_numbers
from counterpoise.report.page import content, write_report
from counterpoise.report.runs import group_runs
from counterpoise.report.tokens import ledger_rows
from counterpoise.run.read import open_run
from counterpoise.text import percent
from counterpoise.viewer.api import batch_info
from counterpoise.viewer.tokens import open_batch
from helpers import browser_fixtures as shared
from helpers.browser_fixtures import NEEDS_CHROMIUM, as_shown, inspected, opened, served, settled

browser, page = shared.browser, shared.page
DEMO = Path(__file__).parents[2] / "recipes" / "demo.yaml"
SHORT = [
    *(
        "method.name=delta",
        "num_batches=2",
        "rollouts.prompts=3",
        "rollouts.group_size=6",
        "optimizer.updates_per_batch=2",
    ),
    *("optimizer.warmup=0", "eval.every=2", "eval.prompts=8", "ledger.every=1", "trackers=[]"),
]
COLOURS = {
    "credit",
    "weight",
    "delta",
    "predicted",
    "own",
    "others",
    "own_head",
    "entropy",
    "confidence",
    "cancellation",
    "category",
}
METRIC = {  # label of a row -> key of metrics.jsonl
    "residual": {"residual": "residual/full"},
    "tax": {
        "shared by all": "tax/shared",
        "shared by both signs": "tax/both_signs",
        "forks": "tax/discriminating",
        "elsewhere": "tax/other",
    },
    "entropy": {"common": "entropy/common", "single": "entropy/single"},
    "flips": {"positive": "flip/positive", "negative": "flip/negative"},
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    from counterpoise.trainer.config import load_config
    from counterpoise.trainer.loop import train

    path = tmp_path_factory.mktemp("real") / "run"
    train(load_config(DEMO, [*SHORT, f"run_dir={path}"]))
    return path


@pytest.fixture(scope="module")
def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def address(run_dir):
    yield from served(run_dir)


@pytest.fixture(scope="module")
def table(run_dir):
    return pd.read_parquet(run_dir / "tokens" / "batch_000001.parquet").sort_values(
        ["group", "rollout", "position"]
    )


def test_nothing_is_missing(run_dir):
    found = content([open_run(run_dir)])
    assert found.problems == []
    # one sample per held-out prompt gives no pass@k, three prompts a batch few solutions to follow
    absent = {name: titles for name, titles in found.absent.items() if titles}
    drift = absent.pop("ledger", [])
    assert absent == {"signals": ["pass@k (needs eval.samples above 1)"]}
    assert all(title.startswith("Solution drift: does the favourite gain?") for title in drift)
    assert found.details[0].samples and found.details[0].plan and found.details[0].tops


def test_the_method_is_told_on_its_six_axes(run_dir):
    import counterpoise as cp

    told = {row[0]: row[1] for row in content([open_run(run_dir)]).axes.rows}
    named = cp.method("delta", plan="query_preserved").describe()
    assert (
        told["advantage"] == named["advantage"]["name"]
        and told["plan"] == "query_preserved"
        and told["controller"] == "none"
    )
    assert told["credit"] == "delta" and told["reduction"] == named["reduction"]["name"]
    assert told["loss"] == "clipped (clip_low 0.2, clip_high 0.28, dual_clip 10.0)"


def test_numbers_over_time_are_the_ledgers_own(run_dir, metrics):
    run, seen = open_run(run_dir), set()
    for row in metrics:
        for name, rows in ledger_rows(run, row["batch"]).items():
            for found in rows:
                if found.count:
                    assert found.value.mean == pytest.approx(
                        row[f"ledger/{METRIC[name][found.label]}"], rel=1e-5
                    ), found
                    assert not found.value.low > found.value.mean > found.value.high
                    seen.add(METRIC[name][found.label])
    written = {key.removeprefix("ledger/") for row in metrics for key in row}
    assert seen == {key for keys in METRIC.values() for key in keys.values()} & written


def test_changes_are_the_ledgers_own(run_dir, metrics):
    for row in metrics:
        pair = token_numbers.tokens_of(open_run(run_dir), row["batch"])
        assert pair is not None
        for sign, shares in token_numbers.change_shares(pair[1]).items():
            for share in shares:
                if f"ledger/{share.label}/{sign}" in row:
                    assert share.value.mean == pytest.approx(row[f"ledger/{share.label}/{sign}"])


def test_prediction_and_cancellation_are_the_ledgers_own(run_dir, metrics):
    for row in metrics:
        pair = token_numbers.tokens_of(open_run(run_dir), row["batch"])
        assert pair is not None
        seen = token_numbers.prediction(pair[1])
        assert seen is not None and seen.correlation.mean == pytest.approx(
            row["ledger/predicted/correlation"], abs=1e-6
        )
        both = token_numbers.cancellation_by_sharing(pair[1])[0]
        if both.count:
            assert both.value.mean == pytest.approx(row["ledger/cancellation/both_signs"], rel=1e-5)


def test_the_viewer_has_every_colour(run_dir):
    info = batch_info(open_batch(open_run(run_dir), 1))
    assert {column["name"] for column in info["columns"] if column["kind"] != "none"} >= COLOURS
    assert info["problems"] == [] and info["source"] == "tokens"
    assert all(group["prompt"] and group["answer"] for group in info["groups"])


@pytest.mark.browser
@NEEDS_CHROMIUM[1]
def test_every_section_of_the_report(page, run_dir, metrics):
    path, found = write_report([run_dir])
    page.goto(path.as_uri())
    # a section without charts (turns, in a run without an environment) is not there
    for name in ("run", *(name for name, cards in found.cards.items() if cards), "samples"):
        page.locator(f"nav a[href='#{name}']").click()
        assert page.locator(f"section#{name}").is_visible()
        for card in found.cards.get(name, []):
            plot = page.locator(f"[data-figure='{card.chart.name}']")
            plot.scroll_into_view_if_needed()
            plot.locator("svg.main-svg").first.wait_for()
            shown = page.locator(f"#chart-{card.chart.name}").inner_text()
            assert card.chart.help in shown and card.chart.definition in shown
    drawn = page.evaluate(
        "document.querySelector('[data-figure=reward]').calcdata.at(-1).map((point) => point.y)"
    )
    assert drawn == [row["reward/mean"] for row in metrics]
    flips = {
        row.label: row.value
        for row in ledger_rows(group_runs([open_run(run_dir)])[0].runs[0], 1)["flips"]
        if row.count
    }
    for label, value in flips.items():
        assert (
            f"{label} advantage {percent(*value)}"
            in page.locator("#chart-flips .keys").inner_text()
        )
    rollouts = pd.read_parquet(run_dir / "rollouts" / "batch_000001.parquet").set_index("rollout")
    for sample in page.locator(".rollout").all():
        number = int(sample.locator(".meta").inner_text().split()[1])
        assert sample.locator("pre").inner_text().removesuffix("<eos>") == rollouts["text"][number]
    page.set_viewport_size({"width": 390, "height": 844})
    settled(page, "document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.browser
@NEEDS_CHROMIUM[1]
def test_colours_hover_and_every_number_of_a_token(page, address, table):
    opened(page, address, "#batch=1&prompt=0")
    names = page.locator("#colour option").evaluate_all("options => options.map(o => o.value)")
    assert set(names) >= COLOURS
    rows = table[table["group"] == 0].reset_index(drop=True)
    for name in names:
        page.locator("#colour").select_option(name)
        settled(page, f"location.hash.includes('colour={name}')")
        classes = page.locator(".line .t").evaluate_all(
            "tokens => tokens.map(t => t.className.split(' ')[1])"
        )
        assert len(classes) > 20 and page.locator("#legend .name").inner_text(), name
        if name in ("own", "others"):  # of a sample of tokens: the others have no colour
            assert sum(map(bool, classes)) == rows["own"].notna().sum()
        else:
            assert all(classes), name
    page.locator(".t[data-i='5']").hover()
    settled(page, "document.querySelector('#inspector .token')?.innerText.includes('position 5')")
    values = list(inspected(page).values())
    want = {
        name: value
        for name, value in rows.iloc[5].items()
        if name not in ("batch", "group", "rollout", "text")
    }
    assert len(values) == len(want)
    for name, value in want.items():
        assert as_shown(value) in values, name


@pytest.mark.browser
@NEEDS_CHROMIUM[1]
def test_click_keyboard_and_deep_link(browser, page, address, table):
    prompt = table.groupby("group")["is_flip"].sum().idxmax()
    opened(page, address, f"#batch=1&prompt={prompt}&colour=others")
    rows = table[table["group"] == prompt].reset_index(drop=True)
    page.locator(".t[data-i='3']").click()
    page.wait_for_selector(".twins.list")
    twins = rows[rows["text"] == rows["text"][3]]
    assert f"Its equals in this prompt: {len(twins)}" in page.locator("#inspector").inner_text()
    listed = [
        line.split()[0] for line in page.locator(".twins.list tr[tabindex]").all_inner_texts()
    ]
    strongest_first = twins.loc[
        twins["delta"].abs().sort_values(ascending=False, kind="stable").index
    ]
    assert listed[0] == f"#{strongest_first['rollout'].iloc[0]}" and len(listed) == len(twins)
    page.keyboard.press("f")
    after = [i for i in rows.index if i > 3 and rows["is_flip"][i]]
    settled(
        page,
        "location.hash.includes('marked=1') && document.querySelector('.t.focus')?.dataset.i ==="
        f" '{after[0]}'",
    )
    page.keyboard.press("Escape")
    move, other = ("j", prompt + 1) if prompt == 0 else ("k", prompt - 1)
    for key, wanted in (
        (move, f"prompt={other}"),
        ("[", "batch=0"),
        ("]", "batch=1"),
        ("a", "layout=aligned"),
        ("x", "flips=1"),
    ):
        page.keyboard.press(key)
        settled(page, f"location.hash.includes('{wanted}')")
    page.keyboard.press("Escape")  # a prompt opens on its strongest token
    page.keyboard.press("ArrowRight")
    settled(page, "location.hash.includes('position=0')")
    linked = browser.new_page(viewport={"width": 1440, "height": 900})
    opened(linked, page.url)
    settled(linked, "document.querySelector('#inspector .token')?.innerText.includes('position 0')")
    assert linked.locator("#layout-aligned").get_attribute("aria-pressed") == "true"
    assert linked.locator("#flips").is_checked()
    assert inspected(linked) == inspected(page)
    linked.close()
