"""Tables and verdicts on folders whose effects are known."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy import stats

from counterpoise.arena.design import Arm
from counterpoise.arena.outcomes import tuned_rates
from counterpoise.arena.results import Activity, Result, Run, read_activity, read_results
from counterpoise.arena.statistics import summarise, write_summary
from helpers.make_arena import BEST, make_arena, make_design


def summary_of(out, design, **settings):
    make_arena(out, design, **settings)
    return summarise(design, read_results(out), read_activity(out))


def by_arm(table):
    return {row.arm: row for row in table.rows}


def results_of(design, finals, lr=BEST):
    """One last evaluation per run: arm -> sampled (and greedy) by seed."""
    return [
        Result(
            Run(arm, lr, seed), design.last, dict(zip(("sampled", "greedy"), np.atleast_1d(value)))
        )
        for arm, values in finals.items()
        for seed, value in zip(design.seeds_of(arm), values)
    ]


def one_rate(arms, **changes):
    return make_design(arms, rates=(BEST,), equal_rate=None, **changes)


def test_verdicts_of_known_effects(tmp_path):
    arms = ["up", "down", "same", "sharp", "inert"]
    summary = summary_of(
        tmp_path,
        make_design(arms, num_seeds=32),
        effects={"up": 0.03, "down": -0.03, "sharp": 0.03},
        greedy={"sharp": -0.03},
        cosines={"inert": 0.998, "up": 0.5},
        sd=0.008,
    )
    rows = by_arm(summary.final)
    assert {name: row.verdict for name, row in rows.items()} == {
        "grpo": ("control", "control"),
        "grpo again": ("repeat", "grpo at other seeds (A/A)"),
        "up": ("better", "better, sampled and greedy"),
        "down": ("worse", "worse, sampled and greedy"),
        "same": ("equal", "equal within the margin"),
        "sharp": ("better", "better sampled, worse greedy"),
        "inert": ("inactive", "inactive here (cosine .998)"),
    }
    assert summary.final.family == ["up", "down", "same", "sharp"]
    assert [row.arm for row in summary.final.rows][-1] == "down"
    (line,) = summary.warnings  # the noise of these seeds puts it half a point below: one in twenty
    assert line.startswith("inert is called inactive, and is -0.5")
    assert {row.lr for row in summary.final.rows} == {BEST}
    assert summary.equal and {row.lr for row in summary.equal.rows} == {3e-5}


def test_an_inactive_arm_that_ends_elsewhere_is_said(tmp_path):
    """As ``value_tenth`` did over 250 batches: the gate stays, and the page says what it hides."""
    summary = summary_of(
        tmp_path,
        make_design(["still", "slow"], num_seeds=32),
        effects={"slow": 0.03},
        cosines={"still": 0.995, "slow": 0.995},
        sd=0.008,
    )
    rows = by_arm(summary.final)
    assert {rows[name].verdict.kind for name in ("still", "slow")} == {"inactive"}
    (line,) = summary.warnings
    assert line.startswith("slow is called inactive, and is +")
    assert "points from grpo" in line


def test_two_seeds_decide_nothing_and_that_is_said(tmp_path):
    for num, is_said in ((2, True), (3, False)):
        summary = summary_of(tmp_path / str(num), make_design(["up"], num_seeds=num))
        few = [line for line in summary.warnings if "Two seeds decide nothing" in line]
        assert bool(few) == is_said and all(line.startswith("up: fewer than 3") for line in few)


def test_a_row_holds_what_scipy_says():
    design = one_rate(["a", "b"], num_seeds=6)
    rng = np.random.default_rng(1)
    finals = {name: rng.normal(0.7, 0.02, 6) for name in ("grpo", "a", "b")}
    rows = by_arm(summarise(design, results_of(design, finals), {}).final)
    p = {
        name: stats.ttest_ind(finals[name], finals["grpo"], equal_var=False).pvalue
        for name in ("a", "b")
    }
    low, high = sorted(p.values())
    assert rows["a"].p == pytest.approx(p["a"])
    assert sorted([rows["a"].p_holm, rows["b"].p_holm]) == pytest.approx(
        [min(1, 2 * low), max(min(1, 2 * low), high)]
    )
    paired = stats.ttest_rel(finals["a"], finals["grpo"]).confidence_interval()
    assert rows["a"].paired[1:] == pytest.approx((paired.low, paired.high))
    assert rows["a"].num_pairs == 6
    assert rows["grpo again"].seeds == 0 and rows["grpo again"].missing == 6


def test_pairs_are_matched_by_seed_whatever_the_order():
    design = one_rate(["a"], num_seeds=3)
    results = results_of(design, {"grpo": [0.1, 0.2, 0.4], "a": [0.2, 0.3, 0.5]})[::-1]
    row = by_arm(summarise(design, results[:-1], {}).final)["a"]  # grpo's first seed is missing
    assert row.num_pairs == 2
    assert row.paired == pytest.approx((0.1, 0.1, 0.1))


def test_runs_that_stop_are_said_and_are_not_in_the_mean(tmp_path):
    summary = summary_of(
        tmp_path, make_design(["up"], num_seeds=8), effects={"up": 0.1}, stopped={"up": 3}
    )
    row = by_arm(summary.final)["up"]
    assert (row.seeds, row.planned, row.missing) == (5, 8, 0)
    assert row.stopped == {"the loss is not finite": 3}
    assert row.verdict.words.endswith("; over the 5 of 8 runs that did not stop")
    assert any("up 3 of 8" in line for line in summary.warnings)


def test_a_run_that_went_on_after_a_stop_counts():
    design = one_rate(["a"], num_seeds=2)
    results = results_of(design, {"grpo": [0.1, 0.2], "a": [0.2, 0.3]})
    results.append(Result(Run("a", BEST, 100), 12, {}, "killed"))
    row = by_arm(summarise(design, results, {}).final)["a"]
    assert (row.seeds, row.stopped) == (2, {})


def test_arms_without_enough_runs_get_no_verdict_and_are_not_in_the_family():
    design = one_rate(["a", "gone"], num_seeds=3)
    results = results_of(design, {"grpo": [0.1, 0.2, 0.15], "a": [0.2]})
    summary = summarise(design, results, {})
    rows = by_arm(summary.final)
    assert rows["a"].verdict == ("none", "no verdict: it has one finished run, two are needed")
    assert rows["gone"].verdict.kind == "none" and math.isnan(rows["gone"].metrics["sampled"].mean)
    assert summary.final.family == []
    assert summary.final.rows[-1].arm in ("gone", "grpo again")


def test_nothing_at_all_is_a_summary_without_verdicts(tmp_path):
    summary = summarise(make_design(), [], {})
    assert [row.verdict.kind for row in summary.final.rows].count("none") == 1
    write_summary(tmp_path, summary)
    assert json.loads((tmp_path / "summary.json").read_text())["final"]["family"] == []


@pytest.mark.parametrize(
    ("greedy", "words"),
    [
        ([0.6, 0.61, 0.62, 0.63], "better, sampled and greedy"),
        ([0.3, 0.31, 0.32, 0.33], "better sampled, worse greedy"),
        ([0.45, 0.55, 0.48, 0.51], "better sampled, not shown greedy"),
        ([0.50, 0.502, 0.499, 0.501], "better sampled, not greedy (equal within the margin)"),
        ([], "better sampled, greedy not measured"),
    ],
)
def test_a_gain_by_sharpening_is_not_called_better(greedy, words):
    design = one_rate(["a"], num_seeds=4)
    control, ours = [0.40, 0.41, 0.42, 0.43], [0.60, 0.61, 0.62, 0.63]
    flat = [0.50, 0.501, 0.499, 0.502]
    finals = {"grpo": list(zip(control, flat)), "a": list(zip(ours, greedy)) if greedy else ours}
    row = by_arm(summarise(design, results_of(design, finals), {}).final)["a"]
    assert row.verdict == ("better", words)


def test_a_small_sure_difference_says_that_it_is_small():
    design = one_rate(["a"], num_seeds=4)
    finals = {"grpo": [0.500, 0.501, 0.502, 0.503], "a": [0.504, 0.505, 0.506, 0.507]}
    row = by_arm(summarise(design, results_of(design, finals), {}).final)["a"]
    assert row.verdict.words == "better sampled, greedy not measured, by less than the margin"


def test_an_interval_that_leaves_0_out_may_not_survive_holm():
    design = one_rate(["a", *(f"n{k}" for k in range(9))], num_seeds=4)
    control = [0.40, 0.44, 0.48, 0.52]
    finals = {"grpo": control, "a": [x + 0.11 for x in control]}
    finals |= {f"n{k}": control for k in range(9)}
    row = by_arm(summarise(design, results_of(design, finals), {}).final)["a"]
    assert row.differences["sampled"].low > 0 and row.p < 0.05 < row.p_holm
    assert row.verdict.kind == "undecided"
    points = f"{100 * row.detectable:.1f}"
    assert row.verdict.words == f"not decided after Holm (detectable: {points} points)"
    assert row.detectable < row.detectable_in_family


def test_own_controls_and_activity_against_them():
    design = one_rate(["spread", Arm("filter", control="spread")], num_seeds=3)
    finals = {"grpo": [0.1, 0.12, 0.14], "spread": [0.5, 0.52, 0.54], "filter": [0.6, 0.62, 0.64]}
    activity = {"filter": Activity("grpo", [0.999]), "spread": Activity("grpo", [0.5])}
    summary = summarise(design, results_of(design, finals), activity)
    row = by_arm(summary.final)["filter"]
    assert row.differences["sampled"].mean == pytest.approx(0.1)
    assert row.cosine is None and row.verdict.kind == "better"
    assert any(
        "filter: its activity was measured against grpo" in line for line in summary.warnings
    )


def test_the_floor_is_the_a_a_arm_and_a_gap_in_it_is_a_warning():
    design = one_rate(["a"], num_seeds=4)
    control = [0.40, 0.41, 0.42, 0.43]
    finals = {"grpo": control, "a": control, "grpo again": [x + 0.1 for x in control]}
    summary = summarise(design, results_of(design, finals), {})
    assert summary.final.floor and summary.final.floor.mean == pytest.approx(0.1)
    assert any(line.startswith("A/A, at the tuned rates: grpo again") for line in summary.warnings)
    assert "grpo again" not in summary.final.family
    finals["grpo again"] = control
    assert not any("A/A" in x for x in summarise(design, results_of(design, finals), {}).warnings)


def tuning_results(design, by_rate):
    return [
        Result(Run("grpo", lr, seed), design.last, {"sampled": value}, "")
        for lr, values in by_rate.items()
        for seed, value in zip(design.tuning_seeds, values)
    ]


def test_tuning_takes_the_highest_mean_and_says_what_it_cannot_tell():
    design = make_design()
    results = tuning_results(
        design,
        {
            1e-5: [0.3, 0.31, 0.32],
            3e-5: [0.5, 0.52, 0.54],
            1e-4: [0.51, 0.53, 0.55],
            3e-4: [0.1, 0.11, 0.12],
        },
    )
    (tuning, *_) = summarise(design, results, {}).tuning
    assert (tuning.chosen, tuning.is_at_edge, tuning.tied) == (1e-4, False, [3e-5])
    assert tuned_rates(design, results) == {"grpo": 1e-4, "grpo again": 1e-4}


def test_tuning_flags_the_edge_and_avoids_rates_at_which_runs_stop():
    design = make_design()
    rates = {1e-5: [0.5, 0.5, 0.5], 3e-5: [0.4, 0.4, 0.4], 3e-4: [0.9, 0.9]}
    stop = Result(Run("grpo", 3e-4, 2), 5, {}, "the loss is not finite")
    summary = summarise(design, [*tuning_results(design, rates), stop], {})
    tuning = summary.tuning[0]
    assert (tuning.chosen, tuning.is_at_edge) == (1e-5, True)
    assert [rate.stopped for rate in tuning.rates] == [0, 0, 0, 1]
    assert any(": 1e-05 of grpo" in line for line in summary.warnings)


def test_tuning_seeds_judge_nothing_and_rates_may_go_through_float32():
    design = make_design(["a"], num_seeds=2)
    tuning = tuning_results(design, {1e-4: [0.5, 0.6, 0.7]})
    finals = results_of(design, {"grpo": [0.1, 0.2]}, lr=float(np.float32(1e-4)))
    row = by_arm(summarise(design, tuning + finals, {}).final)["grpo"]
    assert row.seeds == 2 and row.metrics["sampled"].mean == pytest.approx(0.15)


def test_summary_json_has_the_tables_and_no_nan(tmp_path):
    summary = summary_of(tmp_path, make_design(["up"], num_seeds=4), effects={"up": 0.1})
    write_summary(tmp_path, summary)
    stored = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    row = next(row for row in stored["final"]["rows"] if row["arm"] == "up")
    assert row["differences"]["sampled"] == pytest.approx(
        list(by_arm(summary.final)["up"][8]["sampled"])
    )
    assert row["verdict"]["kind"] == "better"
    assert set(row["metrics"]) == {
        "sampled",
        "greedy",
        "pass@2",
        "pass@4",
        "pass@8",
        "entropy",
        "length",
    }
