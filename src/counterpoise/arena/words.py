"""How the numbers of an arena's tables are written."""

from __future__ import annotations

import math

from counterpoise.arena.outcomes import Rate, Tuning
from counterpoise.arena.statistics import Row, is_share
from counterpoise.maths.intervals import NONE, Interval
from counterpoise.text import percent, points, with_interval


def value(metric: str, interval: Interval) -> str:
    return percent(*interval) if is_share(metric) else with_interval(*interval)


def difference(metric: str, row: Row) -> str:
    value = row.differences.get(metric, NONE)
    if is_share(metric):
        return points(*value)
    return with_interval(*value)


def size(value: float | None) -> str:
    """A size in points, without a sign."""
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.1f}"


def paired(row: Row) -> str:
    return points(*row.paired) if row.num_pairs > 1 else "–"


def p(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return "< .001" if value < 0.001 else f"{value:.3f}".removeprefix("0")


def count(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{int(value):,}" if math.isfinite(value) else "over 100,000"


def runs(row: Row) -> str:
    """Seeds that count, and what became of the others."""
    num = sum(row.stopped.values())
    parts = [f"{num} stopped" * bool(num), f"{row.missing} missing" * bool(row.missing)]
    rest = ", ".join(part for part in parts if part)
    return f"{row.seeds} of {row.planned}" + (f" ({rest})" if rest else "")


def rate(lr: float | None) -> str:
    return "–" if lr is None else f"{lr:g}"


def tuned(rate: Rate) -> str:
    ended = f" ({rate.stopped} stopped)" if rate.stopped else ""
    return f"{percent(rate.sampled.mean)}{ended}"


def choice(tuning: Tuning) -> str:
    """What is to be known of a choice."""
    tied = ", ".join(f"{lr:g}" for lr in tuning.tied)
    notes = [
        "no results" if tuning.chosen is None else "",
        "at the edge of the grid" if tuning.is_at_edge else "",
        f"not told from {tied}" if tied else "",
    ]
    return "; ".join(note for note in notes if note)
