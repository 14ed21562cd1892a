"""What the results of an arena say: tuning, tables of differences, verdicts; ``summary.json``.

The verdict is on ``sampled`` at the last evaluation. Differences are against the arm's control,
over seeds (Welch); p-values are adjusted over the arms of a table that get a verdict (Holm).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from counterpoise.arena.design import Design
from counterpoise.arena.outcomes import (
    DECIDES,
    ByArm,
    Outcome,
    Tuning,
    by_arm,
    chosen_rates,
    outcome,
    tunings,
)
from counterpoise.arena.results import Activity, Result
from counterpoise.arena.verdict import Verdict, obstacle, side, verdict
from counterpoise.maths.intervals import (
    NONE,
    Interval,
    detectable,
    equivalence_p,
    holm,
    over_seeds,
    seeds_for,
    welch,
    welch_p,
)
from counterpoise.run.files import Json, write_json
from counterpoise.text import points, shorten

SCHEMA = 1
POINT = 0.01
FEW_SEEDS = 3  # from which a verdict is worth something


class Row(NamedTuple):
    """An arm in a table; differences are against ``control``, in the units of the metric.

    ``stopped`` counts runs by the reason. ``paired`` is the interval of the differences per seed
    over ``num_pairs`` seeds that both have. ``p_holm`` is None for arms without a verdict.
    ``detectable`` is for one comparison, ``detectable_in_family`` for one among as many as the
    family has, at worst. ``seeds_for_point`` and ``seeds_for_point_in_family`` are seeds per arm to
    detect one point.
    """

    arm: str
    control: str | None
    lr: float | None
    planned: int
    seeds: int
    stopped: dict[str, int]
    missing: int
    metrics: dict[str, Interval]
    differences: dict[str, Interval]
    paired: Interval
    num_pairs: int
    p: float
    p_holm: float | None
    equivalence_p: dict[str, float]
    detectable: float
    detectable_in_family: float
    seeds_for_point: int | None
    seeds_for_point_in_family: int | None
    cosine: float | None
    verdict: Verdict


class Table(NamedTuple):
    """All arms, best first; ``family`` are the arms whose p-values are adjusted together, ``floor``
    the difference of the A/A arm.
    """

    name: str
    metrics: list[str]
    family: list[str]
    rows: list[Row]
    floor: Interval | None


class Summary(NamedTuple):
    """What the files of an arena say."""

    control: str
    batch: int
    margin: float
    tuning: list[Tuning]
    final: Table
    equal: Table | None
    warnings: list[str]


def summarise(
    design: Design, results: Sequence[Result], activity: Mapping[str, Activity]
) -> Summary:
    """Every number and verdict; works on what is there, also while runs are missing."""
    own, metrics = by_arm(results), metrics_of(results)
    choices = tunings(design, own)
    cosines, notes = _cosines(design, activity)
    final = _table("final", design, own, chosen_rates(design, choices), cosines, metrics)
    equal = None
    if design.equal_rate is not None:
        rates = {arm.name: design.equal_rate for arm in design.arms}
        equal = _table("equal", design, own, rates, cosines, metrics)
    tables = [final, *([equal] if equal else [])]
    few = _seed_warnings(final)
    runs = [*_run_warnings(final, choices), *few, *_gate_warnings(final)]
    warnings = [*_floor_warnings(design, tables), *runs, *notes]
    return Summary(design.control, design.last, design.margin, choices, final, equal, warnings)


def write_summary(out: Path, summary: Summary) -> None:
    """``summary.json``; a number that is not known is null."""
    write_json(out / "summary.json", {"schema": SCHEMA, **_plain_fields(summary)})


def metrics_of(results: Sequence[Result]) -> list[str]:
    """The metrics that a table shows, of those that the results have."""
    known = {key for one in results for key in one.values}
    passes = [key for key in known if key.startswith("pass@") and key[5:].isdigit()]
    order = ["sampled", "greedy", *sorted(passes, key=lambda key: int(key[5:]))]
    return [key for key in (*order, "entropy", "length") if key in known]


def is_share(metric: str) -> bool:
    """Whether a metric is written in percent."""
    return metric.startswith(("sampled", "greedy", "pass@"))


def _cosines(
    design: Design, activity: Mapping[str, Activity]
) -> tuple[dict[str, float], list[str]]:
    """Mean cosine by arm, where it was measured against the control of the design."""
    controls = {arm.name: design.control_of(arm.name) for arm in design.arms}
    known = {name: one for name, one in activity.items() if name in controls and one.cosine}
    fits = {name: one.mean for name, one in known.items() if one.control == controls[name]}
    notes = [
        f"{name}: its activity was measured against {one.control}, it is held against"
        f" {controls[name]}: the cosine is left out."
        for name, one in known.items()
        if name not in fits and controls[name] is not None
    ]
    return fits, notes


def _table(
    name: str,
    design: Design,
    results: ByArm,
    rates: Mapping[str, float],
    cosines: Mapping[str, float],
    metrics: list[str],
) -> Table:
    ends = {
        arm.name: outcome(
            results.get(arm.name, []), rates.get(arm.name), design.seeds_of(arm.name), design.last
        )
        for arm in design.arms
    }
    reasons = {arm: _reason(design, arm, ends, cosines.get(arm)) for arm in ends}
    family = [arm for arm, reason in reasons.items() if reason is None]
    rows = [
        _row(design, arm, ends, metrics, max(1, len(family)))._replace(
            lr=rates.get(arm), cosine=cosines.get(arm), verdict=reason or Verdict("", "")
        )
        for arm, reason in reasons.items()
    ]
    rows = sorted(_with_verdicts(rows, family), key=_rank)
    floors = [row.differences.get(DECIDES, NONE) for row in rows if design.arm(row.arm).repeats]
    return Table(name, metrics, family, rows, floors[0] if floors else None)


def _reason(
    design: Design, arm: str, ends: Mapping[str, Outcome], cosine: float | None
) -> Verdict | None:
    control = design.control_of(arm)
    seeds = len(ends[arm].values), len(ends[control].values) if control else 0
    return obstacle(control, design.arm(arm).repeats, cosine, seeds)


def _row(
    design: Design, arm: str, ends: Mapping[str, Outcome], metrics: Sequence[str], family: int
) -> Row:
    """The numbers of an arm; its rate, cosine and verdict come later."""
    own, control = ends[arm], design.control_of(arm)
    other = ends[control] if control else Outcome({}, {}, [])
    ours, theirs = own.column(DECIDES), other.column(DECIDES)
    pairs = [
        own.values[seed][DECIDES] - other.values[seed][DECIDES]
        for seed in own.values
        if seed in other.values
    ]
    return Row(
        arm=arm,
        control=control,
        lr=None,
        planned=len(design.seeds_of(arm)),
        seeds=len(ours),
        stopped=dict(Counter(shorten(why, 200) for why in own.stopped.values())),
        missing=len(own.missing),
        metrics={metric: over_seeds(own.column(metric)) for metric in metrics},
        differences={
            metric: welch(other.column(metric), own.column(metric)) for metric in metrics if control
        },
        paired=over_seeds(pairs),
        num_pairs=len(pairs),
        p=welch_p(theirs, ours),
        p_holm=None,
        equivalence_p={
            metric: equivalence_p(other.column(metric), own.column(metric), design.margin)
            for metric in (DECIDES, "greedy")
            if metric in metrics and control
        },
        detectable=detectable(theirs, ours),
        detectable_in_family=detectable(theirs, ours, family),
        seeds_for_point=_seeds_for_point(theirs, ours),
        seeds_for_point_in_family=_seeds_for_point(theirs, ours, family),
        cosine=None,
        verdict=Verdict("", ""),
    )


def _seeds_for_point(
    theirs: Sequence[float], ours: Sequence[float], comparisons: int = 1
) -> int | None:
    if min(len(theirs), len(ours)) < 2:
        return None
    variance_a, variance_b = (float(np.var(side, ddof=1)) for side in (theirs, ours))
    return seeds_for(POINT, variance_a, variance_b, comparisons)


def _with_verdicts(rows: Sequence[Row], family: Sequence[str]) -> list[Row]:
    p_values = {row.arm: row.p for row in rows if row.arm in family}
    adjusted = dict(zip(p_values, holm(list(p_values.values()))))
    judged = [row._replace(p_holm=adjusted.get(row.arm)) for row in rows]
    return [row if row.verdict.kind else row._replace(verdict=verdict(row)) for row in judged]


def _rank(row: Row) -> tuple[bool, float]:
    """Best difference first, the control at 0, arms without numbers last."""
    mean = row.differences[DECIDES].mean if DECIDES in row.differences else 0.0
    is_unknown = not row.seeds or not math.isfinite(mean)
    return is_unknown, 0.0 if is_unknown else -mean


def _floor_warnings(design: Design, tables: Sequence[Table]) -> list[str]:
    """What the A/A arm says of the other differences."""
    if not any(arm.repeats for arm in design.arms):
        return ["No A/A arm: nothing shows how far two arms of one method come apart."]
    words = {"final": "at the tuned rates", "equal": "at the equal rate"}
    return [
        f"A/A, {words[table.name]}: {row.arm} differs from {row.control}, the same method, by"
        f" {points(*row.differences[DECIDES])} points. That happens once in twenty by chance; else"
        " something but the method differs, and no verdict of the table holds."
        for table in tables
        for row in table.rows
        if row.verdict.kind == "repeat" and _leaves_out_0(row)
    ]


def _gate_warnings(final: Table) -> list[str]:
    """Arms that are called inactive and end elsewhere than their control."""
    return [
        f"{row.arm} is called inactive, and is {points(*row.differences[DECIDES])} points from"
        f" {row.control}. By chance that is one arm in twenty; but over many batches small"
        " differences of the updates add up, and a cosine does not see it."
        for row in final.rows
        if row.verdict.kind == "inactive" and _leaves_out_0(row)
    ]


def _leaves_out_0(row: Row) -> bool:
    return DECIDES in row.differences and side(row.differences[DECIDES]) != 0


def _seed_warnings(final: Table) -> list[str]:
    """Arms that got a verdict on too few seeds, their own or their control's."""
    seeds = {row.arm: row.seeds for row in final.rows}
    few = [
        row.arm
        for row in final.rows
        if row.arm in final.family and min(row.seeds, seeds.get(row.control or "", 0)) < FEW_SEEDS
    ]
    if not few:
        return []
    return [
        f"{', '.join(few)}: fewer than {FEW_SEEDS} seeds. Two seeds decide nothing, whatever the"
        f" verdict says; take at least {FEW_SEEDS} (--seeds)."
    ]


def _run_warnings(final: Table, choices: Sequence[Tuning]) -> list[str]:
    """Runs that stopped or are missing, and rates that should have been looked for further out."""
    stopped = [
        f"{row.arm} {sum(row.stopped.values())} of {row.planned}"
        for row in final.rows
        if row.stopped
    ]
    missing = [f"{row.arm} {row.missing} of {row.planned}" for row in final.rows if row.missing]
    at_edge: dict[float | None, list[str]] = {}
    for one in choices:
        if one.is_at_edge:
            at_edge.setdefault(one.chosen, []).append(one.arm)
    edge = [f"{rate:g} of {', '.join(arms)}" for rate, arms in at_edge.items()]
    lines = {
        "Runs stopped; means are over the others, which may be the better ones": stopped,
        "Runs are missing; the tables are of what is there": missing,
        "The best rate is the lowest or highest of the grid, a better one may lie beyond": edge,
    }
    return [f"{text}: {'; '.join(names)}." for text, names in lines.items() if names]


def _plain_fields(value: Summary) -> dict[str, Json]:
    return {key: _plain(one) for key, one in value._asdict().items()}


def _plain(value: object) -> Json:
    """Plain data; an interval is [mean, low, high]."""
    if isinstance(value, Interval):
        return [_plain(bound) for bound in value]
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {key: _plain(one) for key, one in value._asdict().items()}  # type: ignore[attr-defined]
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, int)) else None
