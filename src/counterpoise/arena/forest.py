"""A forest plot inside a table: one bar per row, over a common axis in points.

Places are percentages of the width, so that the drawing follows the column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from counterpoise.maths.intervals import Interval

STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
MARGIN = 4.0  # percent of the width on both sides, for the marks at the ends
MAX_TICKS = 6
OUTLIER = 4.0  # times the typical reach: further out is cut off


class Span(NamedTuple):
    """From ``low`` to ``high`` on the drawing, in percent of its width."""

    low: float
    high: float

    @property
    def width(self) -> float:
        return max(0.0, self.high - self.low)


class Bar(NamedTuple):
    """The interval of a row; ``mark`` is None where the mean lies outside the axis, ``ends`` say
    where the interval does.
    """

    span: Span
    mark: float | None
    is_cut_low: bool
    is_cut_high: bool


class Axis(NamedTuple):
    """The common axis, in shares."""

    low: float
    high: float

    def at(self, value: float) -> float:
        """Place of a value; one outside lies at the end."""
        inside = min(max(value, self.low), self.high)
        share = (inside - self.low) / (self.high - self.low)
        return round(MARGIN + (100 - 2 * MARGIN) * share, 2)

    def span(self, low: float, high: float) -> Span:
        return Span(self.at(low), self.at(high))

    def bar(self, value: Interval) -> Bar | None:
        """None where there is nothing to draw."""
        if not math.isfinite(value.mean):
            return None
        low, high = (end if math.isfinite(end) else value.mean for end in (value.low, value.high))
        is_in = self.low <= value.mean <= self.high
        mark = self.at(value.mean) if is_in else None
        return Bar(self.span(low, high), mark, low < self.low, high > self.high)

    def ticks(self) -> list[tuple[float, str]]:
        """(place, label in points)."""
        width = 100 * (self.high - self.low)
        step = next((step for step in STEPS if width / step <= MAX_TICKS), STEPS[-1])
        ranks = range(math.ceil(100 * self.low / step), math.floor(100 * self.high / step) + 1)
        return [
            (self.at(rank * step / 100), f"{rank * step:+g}" if rank else "0") for rank in ranks
        ]


def axis_of(values: Sequence[Interval], margin: float) -> Axis:
    """An axis that shows every interval but the far ones, and the margin around 0."""
    known = [value for value in values if math.isfinite(value.mean)]
    ends = [end for value in known for end in value if math.isfinite(end)]
    if not ends:
        return Axis(-2 * margin, 2 * margin)
    typical = sorted(abs(end) for end in ends)[(3 * len(ends)) // 4]
    reach = max(OUTLIER * typical, 2 * margin)
    inside = [end for end in ends if abs(end) <= reach]
    return Axis(min(*inside, -1.5 * margin), max(*inside, 1.5 * margin))
