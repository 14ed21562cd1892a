"""Tests of two arms over seeds: against scipy, against simulation, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from counterpoise.maths.intervals import (
    detectable,
    equivalence_p,
    holm,
    median,
    seeds_for,
    welch,
    welch_p,
)


@pytest.fixture
def sides():
    rng = np.random.default_rng(3)
    return rng.normal(0.70, 0.01, 9), rng.normal(0.71, 0.03, 14)


def test_welch_is_scipys(sides):
    a, b = sides
    theirs = stats.ttest_ind(b, a, equal_var=False)
    assert welch_p(a, b) == pytest.approx(theirs.pvalue, rel=1e-9)
    low, high = theirs.confidence_interval(0.95)
    assert welch(a, b) == pytest.approx((b.mean() - a.mean(), low, high), rel=1e-9)


def test_equivalence_is_two_one_sided_tests_and_the_90_percent_interval(sides):
    a, b = sides
    for margin in (0.005, 0.02, 0.04):
        above = stats.ttest_ind(b, a - margin, equal_var=False, alternative="greater").pvalue
        below = stats.ttest_ind(b, a + margin, equal_var=False, alternative="less").pvalue
        p = equivalence_p(a, b, margin)
        assert p == pytest.approx(max(above, below), rel=1e-9)
        low, high = stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.9)
        assert (p < 0.05) == (-margin < low and high < margin)


def test_holm_by_hand():
    # sorted .005, .011, .02, .04 times 4, 3, 2, 1: .02, .033, .04, .04
    assert holm([0.02, 0.04, 0.005, 0.011]) == pytest.approx([0.04, 0.04, 0.02, 0.033])
    # a later one is never below an earlier one, and none is above 1
    assert holm([0.01, 0.012, 0.9, 0.8]) == pytest.approx([0.04, 0.04, 1.0, 1.0])
    assert holm([]) == []
    assert holm([0.03]) == [0.03]


def test_holm_keeps_the_chance_of_any_false_alarm():
    """Brute force: 12 true nulls, at most 5% of tables have one adjusted p below 5%."""
    rng = np.random.default_rng(0)
    alarms = [min(holm(rng.uniform(size=12).tolist())) < 0.05 for _ in range(4000)]
    assert 0.035 < np.mean(alarms) < 0.06


@pytest.mark.parametrize("num", [3, 8])
def test_the_detectable_effect_is_found_four_times_in_five(num):
    """Of simulated experiments with that true difference, 80% have p < 5%."""
    rng = np.random.default_rng(num)
    noise = rng.normal(0, 1, (2, num, 20_000))
    unit = np.resize([1.0, -1.0], num)
    unit = unit / unit.std(ddof=1)  # the spread of the simulation
    effect = detectable(unit, unit)
    p = stats.ttest_ind(noise[1] + effect, noise[0], axis=0).pvalue
    assert np.mean(p < 0.05) == pytest.approx(0.8, abs=0.01)


def test_more_comparisons_need_a_larger_effect(sides):
    a, b = sides
    effects = [detectable(a, b, comparisons=k) for k in (1, 5, 35)]
    assert effects == sorted(effects) and effects[0] < effects[1] < effects[2]


@pytest.mark.parametrize("spread", [(0.015, 0.015), (0.01, 0.03)])
def test_seeds_for_is_the_first_number_that_detects_the_effect(spread):
    num = seeds_for(0.02, spread[0] ** 2, spread[1] ** 2)

    def effect(n):
        unit = np.resize([1.0, -1.0], n) - np.resize([1.0, -1.0], n).mean()
        a, b = (sd * unit / unit.std(ddof=1) for sd in spread)
        return detectable(a, b)

    assert effect(num) <= 0.02 < effect(num - 1)


def test_a_spread_without_bounds_needs_seeds_without_bounds():
    assert seeds_for(0.01, 100.0, 100.0) is None
    assert seeds_for(0.01, 0.0, 0.0) == 2


def test_without_spread_or_without_seeds():
    assert welch_p([0.5, 0.5], [0.5, 0.5]) == 1.0
    assert welch_p([0.5, 0.5], [0.6, 0.6]) == 0.0
    assert equivalence_p([0.5, 0.5], [0.5, 0.5], 0.01) == 0.0
    assert equivalence_p([0.5, 0.5], [0.6, 0.6], 0.01) == 1.0
    assert detectable([0.5, 0.5], [0.6, 0.6]) == 0.0
    for number in (welch_p([0.5], [0.6, 0.7]), detectable([], [0.6, 0.7]), welch([], []).mean):
        assert math.isnan(number)


@pytest.mark.parametrize("size", [6, 9, 16, 40])
def test_the_interval_of_a_median_holds_it_as_often_as_it_says(size: int) -> None:
    """Heavy tails: the true median of exp(3 z) is 1. Coverage is that of binomial order statistics,
    95% or a little more.
    """
    value_DS = np.exp(3 * np.random.default_rng(0).standard_normal((3000, size)))
    found = [median(value_S) for value_S in value_DS]
    coverage = np.mean([one.low <= 1 <= one.high for one in found])
    assert 0.94 < coverage < 0.985
    assert found[0].mean == np.median(value_DS[0])


def test_a_median_of_few_values_has_no_interval() -> None:
    assert math.isnan(median([1.0, 2.0, 3.0, 4.0, 5.0]).low)
    assert math.isnan(median([]).mean)
