"""The page of an arena, from files alone: full, small, broken and hostile folders; in a browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoise.arena.design import Arm
from counterpoise.arena.page import content, render, write_page
from counterpoise.text import points
from helpers import browser_fixtures as shared
from helpers.browser_fixtures import NEEDS_CHROMIUM, settled
from helpers.make_arena import make_arena, make_design
from helpers.make_run import HOSTILE

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "arena.md"
browser, page = shared.browser, shared.page


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    arms = [*(f"m{k}" for k in range(12)), Arm("filter", {}, control="m1")]
    return make_arena(
        tmp_path_factory.mktemp("arena"),
        make_design(arms, num_seeds=6),
        effects={"m1": 0.06, "m2": -0.06},
        stopped={"m3": 2, "m4": 6},
        cosines={"m5": 0.9991, "m1": 0.3},
    )


def visible_text(html):
    """What a reader sees: without scripts, styles and tags."""
    bare = re.sub(r"<(script|style)\b.*?</\1>", "", html, flags=re.S)
    return " ".join(re.sub(r"<[^>]+>", " ", bare).split())


def test_the_page_shows_every_arm_best_first_with_its_verdict(folder):
    path, summary = write_page(folder)
    text = visible_text(path.read_text())
    table = text[text.index("arm and verdict") : text.index("Holm's family")]
    places = [table.index(f" {row.arm} ") for row in summary.final.rows]
    assert places == sorted(places)
    for row in summary.final.rows:
        assert f" {row.arm} " in table and row.verdict.words in table
        if row.seeds and row.control:
            assert points(*row.differences["sampled"]) in table
    assert "inactive here (cosine .999)" in table and "filter against m1" in table
    assert "4 of 6 (2 stopped)" in table and "the loss is not finite" in table
    assert json.loads((folder / "summary.json").read_text())["final"]["family"]


@pytest.mark.parametrize("is_tuned", [True, False])
def test_tuning_is_shown_where_rates_were_chosen(is_tuned, tmp_path):
    fixed = {} if is_tuned else {"rates": (1e-4,), "equal_rate": None, "tuning_seeds": ()}
    html = render(content(make_arena(tmp_path, make_design(num_seeds=2, **fixed))))
    assert ('id="tuning"' in html) == ('href="#tuning"' in html) == is_tuned


def test_the_page_needs_no_torch(folder):
    code = (
        "import sys; from pathlib import Path; from counterpoise.arena.page import write_page;"
        f" write_page(Path({str(folder)!r})); assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_a_gap_between_the_two_a_a_arms_is_the_first_warning(tmp_path):
    out = make_arena(tmp_path, make_design(), effects={"grpo again": 0.1})
    shown = content(out)
    assert shown.summary.warnings[0].startswith("A/A, at the tuned rates: grpo again differs")
    assert "A/A, at the tuned rates" in visible_text(render(shown))


@pytest.mark.parametrize("kind", ["stopped", "absent", "cut", "one rate"])
def test_folders_with_holes_have_a_page(tmp_path, kind):
    changes = {"rates": (1e-4,), "equal_rate": None} if kind == "one rate" else {}
    design = make_design(num_seeds=3, **changes)
    everyone = {arm.name: 3 for arm in design.arms} if kind == "stopped" else {}
    make_arena(tmp_path, design, stopped=everyone)
    lines = tmp_path / "results.jsonl"
    if kind == "absent":
        lines.unlink()
        (tmp_path / "activity.json").unlink()
    if kind == "cut":
        lines.write_text("".join(x for x in lines.open() if '"delta"' not in x)[:-20])
    text = visible_text(write_page(tmp_path)[0].read_text())
    is_judged = kind == "one rate"
    assert ("no verdict: it has no finished run, two are needed" in text) != is_judged
    assert ("Equal rate" in text) != is_judged
    assert ("No run has an evaluation yet." in text) == (kind == "absent")
    assert ("Runs stopped" in text) == (kind == "stopped")


def test_the_guide_runs(tmp_path, monkeypatch, capsys):
    make_arena(tmp_path / "runs" / "arena", make_design(num_seeds=2))
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    exec(code, {})
    assert "grpo again grpo at other seeds (A/A)\n" in capsys.readouterr().out


def test_hostile_names_are_text(tmp_path):
    arms = [Arm(name, {"method": {"name": name}}) for name in dict.fromkeys(HOSTILE)]
    out = make_arena(tmp_path, make_design(arms, num_seeds=2), stopped={HOSTILE[0]: 1})
    html = render(content(out))
    plain = render(content(make_arena(tmp_path / "plain", make_design(num_seeds=2))))
    assert html.count("<script") == plain.count("<script")
    for name in HOSTILE:
        if "<" in name:
            assert name not in html


@pytest.mark.parametrize("mark", [pytest.param("", marks=NEEDS_CHROMIUM)])
@pytest.mark.parametrize("width", [380, 1400])
def test_in_a_browser(page, folder, mark, width):
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(write_page(folder)[0].as_uri())
    for name in ("sampled", "greedy"):
        page.locator(f"[data-figure='{name}']").scroll_into_view_if_needed()
        page.locator(f"[data-figure='{name}'] svg.main-svg").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    fits = "t => t.scrollWidth <= t.parentElement.clientWidth"
    assert width < 1000 or page.locator("#verdicts table.verdicts").evaluate(fits)
    bars = "document.querySelectorAll('#verdicts svg.forest .mark').length"
    assert page.evaluate(bars) == 14  # of 15 arms, one of which has no run
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    settled(page, f"getComputedStyle(document.body).backgroundColor != '{before}'")
