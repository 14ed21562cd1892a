"""Curves of an arena over its evaluations: the control and the arms furthest from it in colour, the
others grey, every number in a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from counterpoise.arena.design import Design
from counterpoise.arena.outcomes import DECIDES, ByArm, at_rate, by_arm
from counterpoise.arena.results import Result
from counterpoise.arena.statistics import Row, Table
from counterpoise.report.charts import style
from counterpoise.report.charts.style import Drawing
from counterpoise.report.overview import Table as Grid
from counterpoise.report.runs import Curve, curve_over
from counterpoise.text import percent

MAX_IN_COLOUR = 8


class Chart(NamedTuple):
    """What a curve shows; ``name`` is the metric."""

    name: str
    title: str
    help: str
    definition: str
    is_wide: bool = False


class Card(NamedTuple):
    """A chart with its drawing."""

    chart: Chart
    drawing: Drawing


BAND = (
    "Mean over the runs that got to the end; band: 95%, Student's t over seeds. At each arm's rate."
)
CHARTS = (
    Chart(
        "sampled",
        "Sampled accuracy",
        "What decides, at the last evaluation.",
        f"Share of samples that solve a held-out prompt. {BAND}",
    ),
    Chart(
        "greedy",
        "Greedy accuracy",
        "An arm that gains in samples and not here has sharpened what it knew.",
        f"Share of held-out prompts that greedy decoding solves. {BAND}",
    ),
)


def cards(design: Design, results: Sequence[Result], table: Table) -> list[Card]:
    """The charts that the results have numbers for."""
    own = by_arm(results)
    drawings = [(chart, _drawing(design, own, table, chart.name)) for chart in CHARTS]
    return [Card(chart, drawing) for chart, drawing in drawings if drawing is not None]


def evaluations_table(design: Design, results: Sequence[Result], table: Table) -> Grid:
    """Mean of every arm at every evaluation."""
    own = by_arm(results)
    curves = {row.arm: _curve(design, own, row, DECIDES) for row in table.rows}
    rows = [[arm, *_cells(design, curve)] for arm, curve in curves.items()]
    head = ["batches", *map(str, design.evaluations)]
    return Grid(head, rows, [""] * len(rows), numeric=tuple(range(1, len(head))))


def _cells(design: Design, curve: Curve | None) -> list[str]:
    known = dict(zip(curve.batch.tolist(), curve.mean.tolist())) if curve else {}
    return [percent(known.get(batch)) for batch in design.evaluations]


def in_colour(table: Table, control: str) -> list[str]:
    """The control, then the arms furthest from it, in the order of the table."""
    known = [row for row in table.rows if row.seeds and row.arm != control]
    far = sorted(known, key=lambda row: -abs(row.differences[DECIDES].mean))
    chosen = {row.arm for row in far[: MAX_IN_COLOUR - 1]}
    return [control, *(row.arm for row in known if row.arm in chosen)]


def _drawing(design: Design, results: ByArm, table: Table, metric: str) -> Drawing | None:
    curves = {row.arm: _curve(design, results, row, metric) for row in table.rows}
    names = [name for name in in_colour(table, design.control) if curves.get(name)]
    series = [(name, one, percent(float(one.mean[-1]))) for name in names if (one := curves[name])]
    if not series:
        return None
    drawing = style.curves(series, x="batches trained", markers=True)
    others = [one for name, one in curves.items() if one and name not in names]
    _add_grey(drawing, others)
    drawing.figure.update_yaxes(tickformat=style.PERCENT)
    keys = [style.Key(f"{len(others)} more", style.NEUTRAL, "solid", "")] if others else []
    return Drawing(drawing.figure, [*drawing.keys, *keys])


def _add_grey(drawing: Drawing, curves: Sequence[Curve]) -> None:
    """Thin lines behind the others."""
    front, line = list(drawing.figure.select_traces()), {"color": style.NEUTRAL, "width": 0.8}
    for curve in curves:
        drawing.figure.add_scatter(
            x=curve.batch, y=curve.mean, mode="lines", line=line, opacity=0.5, hoverinfo="skip"
        )
    back = list(drawing.figure.select_traces())[len(front) :]
    drawing.figure.data = [*back, *front]


def _curve(design: Design, results: ByArm, row: Row, metric: str) -> Curve | None:
    """An arm at its rate, over the seeds that finished; of an arm without any, over all."""
    own = at_rate(results.get(row.arm, []), row.lr)
    own = [one for one in own if metric in one.values and one.run.seed in design.seeds_of(row.arm)]
    ended = {one.run.seed for one in own if one.batch == design.last}
    seeds = ended or {one.run.seed for one in own}
    return curve_over(
        [
            pd.Series(
                {one.batch: one.values[metric] for one in own if one.run.seed == seed}, dtype=float
            ).sort_index()
            for seed in sorted(seeds)
        ]
    )
