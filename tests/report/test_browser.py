"""A real browser on the report: every section, both themes, print; hostile text never runs."""

from __future__ import annotations

import json

import pytest

from counterpoise.report.page import write_report
from counterpoise.text import percent
from helpers import browser_fixtures as shared
from helpers.browser_fixtures import NEEDS_CHROMIUM, SETTINGS, settled
from helpers.make_run import HOSTILE, make_run

browser, page, plain_run, hostile_run = (
    shared.browser,
    shared.page,
    shared.plain_run,
    shared.hostile_run,
)
pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def report(plain_run):
    return write_report([plain_run])


def test_report_draws_every_chart_in_both_themes(page, report, plain_run):
    path, found = report
    page.goto(path.as_uri())
    for name, cards in ((name, cards) for name, cards in found.cards.items() if cards):
        page.locator(f"nav a[href='#{name}']").click()
        for card in cards:
            plot = page.locator(f"[data-figure='{card.chart.name}']")
            plot.scroll_into_view_if_needed()
            plot.locator("svg.main-svg").first.wait_for()
    assert page.locator("section#samples .sample").count() == len(found.details[0].samples)
    rows = [json.loads(line) for line in (plain_run / "metrics.jsonl").read_text().splitlines()]
    drawn = page.evaluate(
        "document.querySelector('[data-figure=reward]').calcdata.at(-1).map((point) => point.y)"
    )
    assert drawn == [row["reward/mean"] for row in rows]
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_report_prints_every_chart(page, report):
    path, found = report
    page.goto(path.as_uri())
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    total = sum(len(cards) for cards in found.cards.values())
    settled(page, f"document.querySelectorAll('.plot .main-svg').length >= {total}")
    assert page.locator(".top-bar").is_hidden()
    assert len(page.pdf()) > 50_000


def test_comparison_page(page, plain_run, tmp_path):
    other = make_run(tmp_path / "grpo", method="grpo", **SETTINGS)
    path, found = write_report([plain_run, other], tmp_path / "page.html")
    page.goto(path.as_uri())
    rows = page.locator("table.comparison tbody tr")
    assert rows.count() == 2
    assert found.comparison is not None
    assert rows.nth(1).locator(".verdict").inner_text() == found.comparison.lines[1].verdict
    for at, line in enumerate(found.comparison.lines):
        assert percent(*line.final) in rows.nth(at).inner_text()
        assert percent(*line.best) in page.locator("table.reach tbody tr").nth(at).inner_text()
    assert page.locator("#samples .scale").count() == 2  # samples of both methods
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.locator("[data-figure='accuracy']").scroll_into_view_if_needed()
    page.locator("[data-figure='accuracy'] .main-svg").first.wait_for()


def test_hostile_report_runs_nothing(page, hostile_run):
    path, found = write_report([hostile_run], hostile_run / "page.html")
    page.goto(path.as_uri().replace("%7C", "|"))
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    settled(
        page,
        "document.querySelectorAll('.plot .main-svg').length >="
        f" {sum(map(len, found.cards.values()))}",
    )
    page.locator("[data-figure='categories']").hover()
    text = page.locator("body").inner_text()
    for hostile in HOSTILE[:5]:
        assert hostile in text
    assert "⟨U+001B⟩[31mred" in text and "\u202e" not in text
