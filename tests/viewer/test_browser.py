"""A real browser on the viewer: colours, hover, keys, links, alignment, the export; hostile text
never runs.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from counterpoise.run.read import open_run
from counterpoise.viewer.export import write_export
from helpers import browser_fixtures as shared
from helpers.browser_fixtures import (
    NEEDS_CHROMIUM,
    PATIENCE_MS,
    as_shown,
    inspected,
    opened,
    served,
    settled,
)
from helpers.make_run import HOSTILE

browser, page, plain_run, hostile_run = (
    shared.browser,
    shared.page,
    shared.plain_run,
    shared.hostile_run,
)
pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def address(plain_run):
    yield from served(plain_run)


@pytest.fixture(scope="module")
def hostile_address(hostile_run):
    yield from served(hostile_run)


@pytest.fixture(scope="module")
def table(plain_run):
    return pd.read_parquet(plain_run / "tokens" / "batch_000002.parquet").sort_values(
        ["group", "rollout", "position"]
    )


def test_viewer_shows_the_files_numbers(page, address, table):
    opened(page, address, "#batch=2&prompt=1")
    rows = table[table["group"] == 1].reset_index(drop=True)
    page.locator(".t[data-i='4']").hover()
    settled(page, "document.querySelector('#inspector .token')?.innerText.includes('position 4')")
    found, want = inspected(page), rows.iloc[4]
    for label, column in {
        "credit": "credit",
        "change (delta)": "delta",
        "predicted: others": "others",
        "entropy": "entropy",
    }.items():
        assert found[label] == as_shown(want[column]), label
    assert found["flip"] == as_shown(bool(want["is_flip"]))
    assert found["category"] == want["category"]
    assert found["sign: positive"] == as_shown(want["part_sign_positive"])


def test_viewer_colours_by_every_column(page, address, table):
    opened(page, address, "#batch=2&prompt=0")
    rows = table[table["group"] == 0].reset_index(drop=True)
    for name in page.locator("#colour option").evaluate_all("options => options.map(o => o.value)"):
        page.locator("#colour").select_option(name)
        settled(page, f"location.hash.includes('colour={name}')")
        css = dict(
            page.locator(".line .t").evaluate_all(
                "tokens => tokens.map(t => [Number(t.dataset.i), t.className.split(' ')[1]])"
            )
        )
        assert len(css) > 10 and all(css.values()), name
        if name in ("credit", "delta", "own_head"):
            limit = np.quantile(table[name].abs(), 0.98)
            for i, got in css.items():
                level = min(10, int(np.ceil(abs(rows[name][i]) / limit * 10 - 1e-9)))
                assert got == (
                    "d-0" if level == 0 else f"d-{'p' if rows[name][i] > 0 else 'n'}{level}"
                )
        assert page.locator("#legend .name").inner_text()
    assert {
        "credit",
        "delta",
        "own",
        "others",
        "own_head",
        "entropy",
        "confidence",
        "sampler_gap",
        "cancellation",
        "category",
    } <= set(page.locator("#colour option").evaluate_all("options => options.map(o => o.value)"))


def test_viewer_sets_positive_and_negative_side_by_side(page, address, table):
    opened(page, address, "#batch=2&prompt=0")
    first = table[table["group"] == 0].groupby("rollout")["sign"].first()
    titles = page.locator(".side").all_inner_texts()
    want = [
        f"{name} advantage · {count}"
        for name, count in (("positive", (first > 0).sum()), ("negative", (first < 0).sum()))
        if count
    ]
    assert titles[: len(want)] == want
    boxes = [page.locator(".side").nth(k).bounding_box() for k in range(len(want))]
    assert len({box["y"] for box in boxes if box}) == 1


def test_viewer_marks_what_rollouts_share(page, address, table):
    opened(page, address, "#batch=2&prompt=0")
    rows = table[table["group"] == 0].reset_index(drop=True)
    for i, css in page.locator(".line .t").evaluate_all(
        "tokens => tokens.map(t => [Number(t.dataset.i), t.className])"
    ):
        up, down = rows["node_positive"][i], rows["node_negative"][i]
        assert ("both" in css.split()) == (up > 0 and down > 0)
        assert ("one" in css.split()) == (not (up > 0 and down > 0) and up + down > 1)
        assert ("flip" in css.split()) == bool(rows["is_flip"][i])


def test_viewer_marks_equal_tokens_the_largest_change_first(page, address, table):
    opened(page, address, "#batch=2&prompt=0")
    rows = table[table["group"] == 0].reset_index(drop=True)
    page.locator(".t[data-i='2']").click()
    page.wait_for_selector(".twins.list")
    twins = rows[rows["text"] == rows["text"][2]]
    assert f"Its equals in this prompt: {len(twins)}" in page.locator("#inspector").inner_text()
    marked = page.locator(".t.same").evaluate_all("tokens => tokens.map(t => Number(t.dataset.i))")
    assert set(marked) <= set(twins.index) and 2 in marked
    listed = page.locator(".twins.list tr[tabindex]")
    assert listed.count() == len(twins)
    strongest = twins.loc[twins["delta"].abs().idxmax()]
    assert listed.first.locator("td").first.inner_text() == f"#{strongest['rollout']}"
    listed.first.click()
    settled(
        page,
        f"location.hash.includes('rollout={strongest['rollout']}') ||"
        " location.hash.includes('marked')",
    )


def test_viewer_filters_by_flips(page, address, table):
    opened(page, address, "#batch=2&prompt=0")
    page.locator("#flips").check()
    rows = table[table["group"] == 0].reset_index(drop=True)
    for i, css in page.locator(".line .t").evaluate_all(
        "tokens => tokens.map(t => [Number(t.dataset.i), t.className])"
    ):
        assert ("dim" in css.split()) == (not rows["is_flip"][i])
    page.locator("#prompt-filter").select_option("flips")
    with_flips = table.groupby("group")["is_flip"].any().sum()
    assert page.locator("#prompt-list li").count() == with_flips


def test_viewer_moves_by_keyboard(page, address, table):
    opened(page, address, "#batch=2&prompt=0")
    page.locator("#pane").focus()
    settled(page, "location.hash.includes('position=')")  # opens with a token chosen
    page.keyboard.press("Escape")
    for key, wanted in [
        ("ArrowRight", "position=0"),
        ("ArrowRight", "position=1"),
        ("ArrowLeft", "position=0"),
    ]:
        page.keyboard.press(key)
        settled(page, f"location.hash.includes('{wanted}')")
    page.keyboard.press("f")
    flips = table[table["group"] == 0].reset_index(drop=True)["is_flip"]
    at = int(flips[flips].index[flips[flips].index > 0][0])
    row = table[table["group"] == 0].reset_index(drop=True).iloc[at]
    settled(page, f"location.hash.includes('rollout={row['rollout']}&position={row['position']}')")
    page.keyboard.press("Enter")
    settled(page, "location.hash.includes('marked=1')")
    page.keyboard.press("Escape")
    settled(page, "!location.hash.includes('marked')")
    for key, wanted in [
        ("j", "prompt=1"),
        ("j", "prompt=2"),
        ("k", "prompt=1"),
        ("[", "batch=1"),
        ("]", "batch=2"),
        ("a", "layout=aligned"),
    ]:
        page.keyboard.press(key)
        settled(page, f"location.hash.includes('{wanted}')")
    page.wait_for_selector(".cells .t")
    page.keyboard.press("x")
    settled(page, "location.hash.includes('flips=1')")
    page.keyboard.press("c")
    settled(page, "location.hash.includes('colour=weight')")  # the next of its family
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("dialog").is_hidden()


def test_viewer_deep_link(page, address, table):
    opened(
        page,
        address,
        "#batch=2&prompt=2&colour=others&layout=aligned&flips=1&rollout=14&position=3&marked=1",
    )
    page.wait_for_selector(".twins.list")
    row = table[(table["rollout"] == 14) & (table["position"] == 3)].iloc[0]
    assert inspected(page)["predicted: others"] == as_shown(row["others"])
    assert page.locator("#colour").input_value() == "others"
    assert page.locator("#layout-aligned").get_attribute("aria-pressed") == "true"
    assert page.locator("#flips").is_checked()
    assert page.locator("#prompt-list [aria-current] b").first.inner_text() == "2"
    assert page.locator(".t.marked").count() == 1


def test_aligned_rows_put_equal_prefixes_in_equal_columns(page, address, table):
    opened(page, address, "#batch=2&prompt=0&layout=aligned")
    rows = table[table["group"] == 0].reset_index(drop=True)
    script = (
        "tokens => tokens.map(t => [Number(t.dataset.i), [t.getBoundingClientRect().left,"
        " t.getBoundingClientRect().top]])"
    )
    place = dict(page.locator(".cells .t").evaluate_all(script))
    start = rows.index[rows["position"] == 0]
    for position in range(5):  # "Let us add:\n" in every rollout
        assert len({round(place[at + position][0], 1) for at in start}) == 1
    for a, b in zip(start, [*start[1:], len(rows)]):
        seen = [place[i] for i in range(a, b) if i in place]
        # read like a text: from left to right, then a band further down
        assert seen == sorted(seen, key=lambda spot: (spot[1], spot[0]))
    assert page.evaluate(
        "document.getElementById('pane').scrollWidth <= document.getElementById('pane').clientWidth"
    )


def test_bands_hold_every_column_once(page, address):
    opened(page, address)
    script = """async ([widths, room]) => {
        const { banded } = await import('/assets/layout.js');
        return banded(widths, 3, room ?? Infinity);
    }"""
    rng = np.random.default_rng(0)
    for room in (40, 100, None):
        widths = rng.integers(5, 60, 50).tolist()
        found = page.evaluate(script, [widths, room])
        assert found["starts"][0] == 0 and found["starts"][-1] == 50
        for first, end in itertools.pairwise(found["starts"]):
            assert found["lefts"][first] == 0
            assert [found["bandOf"][c] for c in range(first, end)] == [
                found["starts"].index(first)
            ] * (end - first)
            for c in range(first + 1, end):
                assert found["lefts"][c] == found["lefts"][c - 1] + widths[c - 1] + 3
                assert room is None or found["lefts"][c] + widths[c] <= room
        assert room is not None or len(found["starts"]) == 2


def test_the_token_stays_while_the_page_moves_under_a_resting_pointer(page, address):
    opened(page, address, "#batch=2&prompt=0")
    page.locator(".t[data-i='2']").click()
    page.wait_for_selector(".twins.list")
    for key in ("a", "a"):
        page.keyboard.press(key)
        page.wait_for_timeout(150)
    assert "position 2" in page.locator("#inspector .token").inner_text()
    page.locator(".t[data-i='9']").hover()
    settled(page, "document.querySelector('#inspector .token').innerText.includes('position 9')")
    page.locator("#run-name").hover()
    settled(page, "document.querySelector('#inspector .token').innerText.includes('position 2')")
    assert page.locator(".twins.list").count() == 1


def test_viewer_on_a_narrow_screen(page, address):
    page.set_viewport_size({"width": 390, "height": 844})
    opened(page, address, "#batch=2&prompt=0")
    page.locator(".t[data-i='1']").click()
    page.wait_for_selector(".twins.list")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    boxes = [side.bounding_box() for side in page.locator(".side").all()]
    assert len({box["x"] for box in boxes if box}) == 1  # positive above negative
    for area in ("#pane", "#inspector", ".prompts"):
        box = page.locator(area).bounding_box()
        assert box is not None and box["width"] > 300 and box["height"] > 60, area


def test_alignment_keeps_a_longest_common_subsequence(page, address):
    opened(page, address)
    rng = np.random.default_rng(0)
    cases = [
        [rng.integers(0, 4, rng.integers(0, 14)).tolist() for _ in range(2)] for _ in range(200)
    ]
    script = (
        "async (cases) => { const { matches } = await import('/assets/align.js'); return"
        " cases.map(([a, b]) => matches(a, b)) }"
    )
    for (a, b), pairs in zip(cases, page.evaluate(script, cases)):
        assert all(a[i] == b[j] for i, j in pairs)
        assert all(p[0] < q[0] and p[1] < q[1] for p, q in itertools.pairwise(pairs))
        assert len(pairs) == longest_common(a, b)


def longest_common(a, b):
    best = np.zeros((len(a) + 1, len(b) + 1), int)
    for i in range(len(a)):
        for j in range(len(b)):
            best[i + 1, j + 1] = (
                best[i, j] + 1 if a[i] == b[j] else max(best[i, j + 1], best[i + 1, j])
            )
    return best[-1, -1]


def test_hostile_text_runs_nothing_in_the_viewer(page, hostile_address):
    opened(page, hostile_address, "#batch=2&prompt=0")
    assert page.locator("#run-name").inner_text() == HOSTILE[0].replace("/", "|")
    shown = page.locator(".line .t").all_inner_texts()
    assert HOSTILE[0] in shown and HOSTILE[1] in shown
    assert any("⟨U+202E⟩right to left" in text for text in shown)
    for colour in ("category", "delta"):
        page.locator("#colour").select_option(colour)
        settled(page, f"location.hash.includes('colour={colour}')")
    page.locator("#colour").select_option(f"part_sign_{HOSTILE[0]}")
    settled(page, "location.hash.includes('colour=part_sign_')")
    for text in (HOSTILE[0], HOSTILE[1], HOSTILE[3]):
        page.locator(".line .t", has_text=text).first.click()
        settled(
            page,
            "document.querySelector('#inspector .token"
            f" code')?.textContent.includes({json.dumps(text)})",
        )
    assert HOSTILE[1] in inspected(page)
    page.keyboard.press("a")
    page.wait_for_selector(".cells .t")
    for group in (1, 2):
        page.locator("#prompt-list button").nth(group).click()
        settled(page, f"location.hash.includes('prompt={group}')")
    assert (
        page.locator("script").count() == 1
        and page.locator("img, iframe, object, embed").count() == 0
    )
    # names of columns and every text of the prompt are shown as text
    assert f"sign: {HOSTILE[0]}" in page.locator("#colour option").all_inner_texts()
    for hostile in HOSTILE[:5]:
        assert (
            hostile in page.locator("#prompt-text").inner_text()
            and hostile in page.locator("#prompt-about").inner_text()
        )


def test_a_broken_step_is_told_on_the_page(browser, plain_run, tmp_path):
    copy = Path(shutil.copytree(plain_run, tmp_path / "run"))
    for folder in ("tokens", "rollouts"):
        file = copy / folder / "batch_000002.parquet"
        file.write_bytes(file.read_bytes()[:64])
    for address in served(copy):
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{address}#batch=2")
        page.locator("#problems p").first.wait_for()
        assert "cannot be read" in page.locator("#problems").inner_text()
        page.locator("#batch").select_option("3")
        page.wait_for_selector(".t[data-i]")
        page.close()


def test_export_opens_from_disk(page, plain_run, table, tmp_path):
    path = write_export(open_run(plain_run), tmp_path / "out", [0, 2])
    opened(page, path.as_uri(), "#batch=2&prompt=1&colour=delta")
    rows = table[table["group"] == 1].reset_index(drop=True)
    page.locator(".t[data-i='4']").click()
    page.wait_for_selector(".twins.list")
    found = inspected(page)
    assert found["change (delta)"] == as_shown(rows["delta"][4])
    assert found["flip"] == as_shown(bool(rows["is_flip"][4]))
    assert found["category"] == rows["category"][4]
    page.locator("#batch-back").click()
    settled(page, "location.hash.includes('batch=0')")
    page.keyboard.press("a")
    page.wait_for_selector(".cells .t")


def test_hostile_export_runs_nothing(page, hostile_run, tmp_path):
    path = write_export(open_run(hostile_run), tmp_path / "out", [2])
    opened(page, path.as_uri())
    page.locator(".line .t", has_text=HOSTILE[3]).first.click()
    page.wait_for_selector(".twins.list")
    assert HOSTILE[3] in page.locator("#inspector").inner_text()
