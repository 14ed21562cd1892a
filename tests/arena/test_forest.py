"""The forest plot: places on a common axis."""

from __future__ import annotations

import math

import pytest

from counterpoise.arena.forest import Axis, axis_of
from counterpoise.maths.intervals import NONE, Interval


def test_places_are_linear_between_the_ends():
    axis = Axis(-0.02, 0.06)
    assert [axis.at(x) for x in (-0.02, 0.02, 0.06)] == [4, 50, 96]
    assert axis.at(0.5) == 96 and axis.at(-0.5) == 4


def test_a_bar_has_its_interval_and_says_what_is_cut_off():
    axis = Axis(-0.02, 0.06)
    whole, cut = axis.bar(Interval(0.02, 0.0, 0.04)), axis.bar(Interval(-0.3, -0.4, -0.01))
    assert whole and whole.mark == 50 and whole.span == (axis.at(0.0), axis.at(0.04))
    assert not whole.is_cut_low and not whole.is_cut_high
    assert cut and cut.mark is None and cut.is_cut_low and not cut.is_cut_high
    assert axis.bar(NONE) is None
    alone = axis.bar(Interval(0.02, math.nan, math.nan))
    assert alone and alone.span.width == 0 and alone.mark == 50


def test_the_axis_holds_all_but_far_ones_and_the_margin():
    near = [Interval(x, x - 0.01, x + 0.01) for x in (-0.01, 0.0, 0.01, 0.02)]
    axis = axis_of(near, margin=0.01)
    assert axis == pytest.approx((-0.02, 0.03))
    far = axis_of([*near, Interval(-0.5, -0.6, -0.4)], margin=0.01)
    assert far == pytest.approx((-0.02, 0.03))
    assert axis_of([], margin=0.01) == (-0.02, 0.02)
    assert axis_of([Interval(0.0, 0.0, 0.0)], margin=0.01) == pytest.approx((-0.015, 0.015))


def test_ticks_are_round_points():
    assert [label for _, label in Axis(-0.045, 0.03).ticks()] == ["-4", "-2", "0", "+2"]
    assert Axis(-0.02, 0.02).ticks()[2] == (50, "0")
