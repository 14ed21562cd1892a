"""The page of an arena: ``index.html``, made from the folder's files alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from counterpoise.arena import words
from counterpoise.arena.curves import Card, cards, evaluations_table
from counterpoise.arena.design import Design, read_design
from counterpoise.arena.forest import Axis, Bar, Span, axis_of
from counterpoise.arena.outcomes import DECIDES
from counterpoise.arena.results import Activity, read_activity, read_results
from counterpoise.arena.statistics import Summary, Table, summarise, write_summary
from counterpoise.arena.verdict import INACTIVE_ABOVE
from counterpoise.maths.intervals import NONE
from counterpoise.report import overview
from counterpoise.report.html import asset, render_page
from counterpoise.run.files import write_text
from counterpoise.text import shorten, spans

KINDS = {
    "better": "better",
    "worse": "worse",
    "equal": "equal within the margin",
    "undecided": "not decided",
    "inactive": "inactive here",
    "none": "too few runs",
}


class Forest(NamedTuple):
    """The table of differences: its axis, the margin and the A/A floor behind the bars."""

    table: Table
    axis: Axis
    bars: dict[str, Bar | None]
    margin: Span
    floor: Span | None


class Content(NamedTuple):
    """Everything the page shows, before it is a page."""

    title: str
    design: Design
    summary: Summary
    tiles: list[overview.Tile]
    final: Forest
    equal: Forest | None
    cards: list[Card]
    evaluations: overview.Table
    activity: Mapping[str, Activity]
    facts: overview.Table
    arms: overview.Table
    problems: list[str]


def write_page(out: Path) -> tuple[Path, Summary]:
    """Write ``summary.json`` and ``index.html`` of an arena's folder; returns the page's path and
    what the statistics say.
    """
    page = content(out)
    write_summary(out, page.summary)
    write_text(out / "index.html", render(page))
    return out / "index.html", page.summary


def content(out: Path) -> Content:
    """Read the folder; what cannot be read ends up in ``problems``."""
    problems: list[str] = []
    design, results = read_design(out), read_results(out, problems)
    activity = read_activity(out)
    summary = summarise(design, results, activity)
    num = sum(not arm.repeats and design.control_of(arm.name) is not None for arm in design.arms)
    return Content(
        title=f"{num} {'method' if num == 1 else 'methods'} against {design.control}",
        design=design,
        summary=summary,
        tiles=tiles(summary),
        final=forest(summary.final, design.margin),
        equal=forest(summary.equal, design.margin) if summary.equal else None,
        cards=cards(design, results, summary.final),
        evaluations=evaluations_table(design, results, summary.final),
        activity={arm.name: activity[arm.name] for arm in design.arms if arm.name in activity},
        facts=facts_table(design),
        arms=arms_table(design),
        problems=problems,
    )


def render(page: Content) -> str:
    """The page as HTML."""
    return render_page(
        "arena/arena.html",
        title=page.title,
        source="an arena's folder",
        figures={card.chart.name: card.drawing.figure for card in page.cards},
        own_style=asset("arena.css", "arena"),
        page=page,
        words=words,
        inactive_above=INACTIVE_ABOVE,
    )


def tiles(summary: Summary) -> list[overview.Tile]:
    """How many arms got which verdict, and what the table could have shown."""
    rows = summary.final.rows
    names = {kind: [row.arm for row in rows if row.verdict.kind == kind] for kind in KINDS}
    counts = [
        overview.Tile(label, str(len(names[kind])), shorten(", ".join(names[kind]), 120))
        for kind, label in KINDS.items()
        if names[kind] or kind in ("better", "worse", "equal", "undecided")
    ]
    return [*counts, *power_tiles(summary.final)]


def power_tiles(table: Table) -> list[overview.Tile]:
    """Detectable effect and seeds for one point, of the median arm."""
    judged = [row for row in table.rows if row.arm in table.family]
    if not judged:
        return []
    alone, among = (
        statistics.median(getattr(row, name) for row in judged)
        for name in ("detectable", "detectable_in_family")
    )
    seeds, many = (
        statistics.median_low(getattr(row, name) or math.inf for row in judged)
        for name in ("seeds_for_point", "seeds_for_point_in_family")
    )
    return [
        overview.Tile(
            "detectable effect, points", words.size(alone), _median(words.size(among), len(judged))
        ),
        overview.Tile(
            "seeds per arm for 1 point", words.count(seeds), _median(words.count(many), len(judged))
        ),
    ]


def _median(among: str, num: int) -> str:
    return f"median arm; {among} as one of {num}, at worst" if num > 1 else ""


def forest(table: Table, margin: float) -> Forest:
    """Bars of the differences by arm; the control has none."""
    differences = {row.arm: row.differences.get(DECIDES, NONE) for row in table.rows}
    axis = axis_of(list(differences.values()), margin)
    floor = table.floor
    has_floor = floor is not None and math.isfinite(floor.low)
    return Forest(
        table,
        axis,
        {arm: axis.bar(value) for arm, value in differences.items()},
        axis.span(-margin, margin),
        axis.span(floor.low, floor.high) if floor and has_floor else None,
    )


def facts_table(design: Design) -> overview.Table:
    """The design in words."""
    recipe = {name: overview.in_words(value) for name, value in design.recipe.items()}
    tuning = spans(sorted(design.tuning_seeds)) or "none"
    equal = "none" if design.equal_rate is None else f"{design.equal_rate:g}"
    rows = [
        ["control", design.control],
        ["seeds", f"{len(design.seeds)}: {spans(sorted(design.seeds))}"],
        ["learning rates", ", ".join(f"{lr:g}" for lr in design.rates)],
        ["tuning seeds", tuning],
        ["equal rate", equal],
        ["margin, points", f"{100 * design.margin:g}"],
        ["evaluated after batches", ", ".join(map(str, design.evaluations))],
        ["evaluation", overview.in_words(dict(design.eval))],
        *([name, text] for name, text in recipe.items() if text),
    ]
    return overview.Table(["setting", "value"], rows, [""] * len(rows))


def arms_table(design: Design) -> overview.Table:
    """Every arm, what it is held against and what it sets."""
    rows = [
        [
            arm.name,
            design.control_of(arm.name) or "–",
            f"{arm.repeats} at other seeds"
            if arm.repeats
            else overview.in_words(dict(arm.settings)) or "–",
        ]
        for arm in design.arms
    ]
    return overview.Table(["arm", "held against", "settings"], rows, [""] * len(rows))
