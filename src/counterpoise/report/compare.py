"""Methods against each other, over seeds: final, best, how soon, and whether a difference is more
than noise.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np

from counterpoise.errors import nearest
from counterpoise.maths.intervals import (
    NONE,
    Interval,
    first_at_least,
    over_seeds,
    paired_bootstrap,
    welch,
)
from counterpoise.report.runs import (
    Group,
    at_point,
    eval_series,
    final,
    final_of,
    is_share,
    seed_of,
    series_of,
    settings_of,
)
from counterpoise.run.read import RunFolder
from counterpoise.text import percent, points, visible, with_interval

ACCURACY = "eval/accuracy"
SAME = ("task.", "eval.")  # settings that have to be equal for numbers to mean the same
MOST = 8  # settings that a note names


class Reach(NamedTuple):
    """How soon a threshold was reached: mean, least and most over the runs that reached it."""

    reached: int
    total: int
    batches: Interval
    tokens: Interval


class Line(NamedTuple):
    """One group in the comparison.

    ``difference_over`` says what the interval of the difference is over: ``seeds``, ``prompts``, or
    nothing.
    """

    label: str
    seeds: int
    first: Interval
    final: Interval
    best: Interval
    reach: Reach
    difference: Interval | None
    difference_over: str
    verdict: str


class Comparison(NamedTuple):
    """The table, what it is about, and what a reader must know of it."""

    metric: str
    baseline: str
    threshold: float
    lines: list[Line]
    notes: list[str]


class Settings(TypedDict, total=False):
    """What a comparison is about: the arguments of ``comparison``."""

    metric: str
    baseline: str | None
    threshold: float | None


def comparison(
    groups: Sequence[Group],
    *,
    metric: str = ACCURACY,
    baseline: str | None = None,
    threshold: float | None = None,
) -> Comparison:
    """Compare groups of runs by one number.

    Args:
        groups: runs by configuration (``group_runs``).
        metric: ``eval/accuracy``, or any key of metrics.jsonl; of those the final value is the mean
            over the last batches.
        baseline: label of the group that the others are held against; the first one by default.
        threshold: for batches and tokens to a threshold; the baseline's final mean by default.
    """
    notes: list[str] = []
    if metric == ACCURACY and all(eval_series(run).empty for group in groups for run in group.runs):
        metric = "reward/mean"
        notes.append("No run has held-out evaluations: compared by training reward.")
    comparable = [
        Group(group.label, [run for run in group.runs if not series_of(run, metric).empty])
        for group in groups
    ]
    notes += [
        f"{g.label}: {len(g.runs) - len(k.runs)} run(s) without {metric}."
        for g, k in zip(groups, comparable)
        if len(g.runs) > len(k.runs)
    ]
    comparable = [group for group in comparable if group.runs]
    comparable, repeated = _of_distinct_seeds(comparable)
    notes += repeated
    if not comparable:
        keys = {key for group in groups for run in group.runs for key in run.metrics.columns}
        if not keys - {"batch"}:
            raise ValueError(
                "compare: no run has a line in metrics.jsonl. Give runs of one batch or more."
            )
        close = difflib.get_close_matches(metric, sorted(keys), n=1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"compare: no run has {metric!r}. {hint}Keys are in metrics.jsonl, for example"
            " reward/mean."
        )
    base = _baseline(comparable, baseline)
    threshold = final(base, metric).mean if threshold is None else threshold
    count = sum(_obstacle(group, base, metric) == "" for group in comparable if group is not base)
    lines = [_line(group, base, metric, threshold, count) for group in comparable]
    return Comparison(
        metric, base.label, threshold, lines, notes + _caveats(comparable, base, metric, count)
    )


class Words(NamedTuple):
    """How numbers of a metric are written, in the terminal and on the page alike."""

    value: Callable[..., str]
    difference: Callable[..., str]
    unit: str


def words(metric: str) -> Words:
    """Shares in percent and points, other metrics as numbers."""
    if is_share(metric):
        return Words(percent, points, ", points")
    return Words(with_interval, with_interval, "")


def as_json(result: Comparison) -> dict[str, Any]:
    """The comparison for machines; numbers that are not known are null."""
    lines = [
        {
            "label": line.label,
            "seeds": line.seeds,
            **{name: _clean(getattr(line, name)) for name in ("first", "final", "best")},
            "reached": [line.reach.reached, line.reach.total],
            "batches_to_threshold": _clean(line.reach.batches),
            "tokens_to_threshold": _clean(line.reach.tokens),
            "difference": _clean(line.difference) if line.difference else None,
            "difference_over": line.difference_over,
            "verdict": line.verdict,
        }
        for line in result.lines
    ]
    return {
        "metric": result.metric,
        "baseline": result.baseline,
        "threshold": result.threshold,
        "groups": lines,
        "notes": result.notes,
    }


def _line(group: Group, base: Group, metric: str, threshold: float, count: int) -> Line:
    series = [series_of(run, metric) for run in group.runs]
    difference, over, verdict = None, "", "baseline"
    if group is not base:
        obstacle = _obstacle(group, base, metric)
        if not obstacle:
            difference, over = _difference(group, base, metric, count)
        verdict = obstacle or _verdict(difference or NONE, over)
    return Line(
        label=group.label,
        seeds=len(group.runs),
        first=at_point(group, metric, 0),
        final=final(group, metric),
        best=over_seeds([s.max() for s in series]),
        reach=_reach(group, metric, threshold),
        difference=difference,
        difference_over=over,
        verdict=verdict,
    )


def _difference(group: Group, base: Group, metric: str, count: int) -> tuple[Interval, str]:
    """Over seeds where both sides have several; else, of held-out accuracy, over prompts."""
    ours, theirs = ([final_of(run, metric) for run in side.runs] for side in (group, base))
    if min(len(ours), len(theirs)) > 1:
        return welch(theirs, ours, count), "seeds"
    a_P, b_P = _by_prompt(base, metric), _by_prompt(group, metric)
    if a_P is None or b_P is None:
        return welch(theirs, ours), ""
    return paired_bootstrap(a_P, b_P).difference, "prompts"


def _verdict(difference: Interval, over: str) -> str:
    """Better or worse only where an interval over seeds leaves 0 out: a mean alone says nothing,
    and one seed does not know the noise between seeds.
    """
    if not over:
        return "one run: no interval"
    if difference.low <= 0 <= difference.high:
        return "within noise" if over == "seeds" else "within noise (one seed)"
    if over == "prompts":
        return "no verdict: one seed"
    return "better" if difference.mean > 0 else "worse"


def _obstacle(group: Group, base: Group, metric: str) -> str:
    """Why two groups cannot be held against each other; empty if they can."""
    if any(map(_missing, [*group.runs, *base.runs])):
        return "no verdict: unfinished"
    if any(path.startswith(SAME) for path in _apart(group, base)):
        return "no verdict: other task or evaluation"
    return "" if len(_ends([group, base], metric)) == 1 else "no verdict: other length"


def _apart(group: Group, base: Group) -> list[str]:
    """Settings by which two groups differ, those of the method left out."""
    ours, theirs = (settings_of(side.runs[0]) for side in (group, base))
    paths = [path for path in {**theirs, **ours} if path.partition(".")[0] != "method"]
    return [path for path in paths if ours.get(path) != theirs.get(path)]


def _of_distinct_seeds(groups: Sequence[Group]) -> tuple[list[Group], list[str]]:
    """Of runs with one seed the first alone, and notes on the others: a copy is no evidence."""
    out, notes = [], []
    for group in groups:
        first: dict[object, RunFolder] = {}
        for run in group.runs:
            seed = seed_of(run)
            kept = first.setdefault(run.path if seed is None else seed, run)
            if kept is not run:
                notes.append(f"{run.name} has the seed of {kept.name} ({seed}) and is left out.")
        out.append(Group(group.label, list(first.values())))
    return out, notes


def _missing(run: RunFolder) -> str:
    """What an unfinished run lacks; empty for a finished one, and where the files do not tell."""
    asked, trained = run.config.get("num_batches"), _num_batches(run)
    is_short = isinstance(asked, int) and trained < asked
    return f"{run.name} has {trained} of {asked} batches" if is_short else ""


def _num_batches(run: RunFolder) -> int:
    return int(run.metrics["batch"].max()) + 1 if len(run.metrics) else 0


def _ends(groups: Sequence[Group], metric: str) -> set[tuple[int, int]]:
    """Batches trained and the batch of the last value, of every run."""
    return {
        (_num_batches(run), int(series_of(run, metric).index[-1]))
        for group in groups
        for run in group.runs
    }


def _baseline(groups: Sequence[Group], label: str | None) -> Group:
    if label is None:
        return groups[0]
    for group in groups:
        if group.label == label:
            return group
    presets = [group for group in groups if group.label.partition(",")[0] == label]
    if len(presets) == 1:
        return presets[0]
    known = [visible(group.label) for group in groups]
    raise ValueError(f"compare: no group {label!r}. {nearest(label, known)}")


def _caveats(groups: Sequence[Group], base: Group, metric: str, count: int) -> list[str]:
    notes = []
    short = [_missing(run) for group in groups for run in group.runs if _missing(run)]
    if short:
        notes.append(f"Unfinished: {', '.join(short)}. Finish with counterpoise train --resume.")
    if len(_ends(groups, metric)) > 1:
        ends = [(g.label, sorted({end for _, end in _ends([g], metric)})) for g in groups]
        text = ", ".join(f"{label}: {'/'.join(map(str, at))}" for label, at in ends)
        notes.append(
            f"Runs end at different batches ({text}): final values are not at equal budgets."
        )
    for group in groups:
        if apart := _apart(group, base):
            more = f" and {len(apart) - MOST} more" if len(apart) > MOST else ""
            named = ", ".join(apart[:MOST])
            notes.append(f"{group.label} differs from {base.label} in {named}{more} too.")
    if count > 1:
        notes.append(
            f"{count} comparisons: the intervals of all differences hold together at 95%"
            " (Bonferroni)."
        )
    return notes


def _reach(group: Group, metric: str, threshold: float) -> Reach:
    batches, tokens = [], []
    for run in group.runs:
        series = series_of(run, metric)
        at = first_at_least([int(batch) for batch in series.index], series.tolist(), threshold)
        if at is not None:
            batches.append(float(at))
            tokens.append(_tokens_until(run, int(at), metric))
    return Reach(len(batches), len(group.runs), _range(batches), _range(tokens))


def _tokens_until(run: RunFolder, batch: int, metric: str) -> float:
    """Response tokens sampled before the value at ``batch``: an evaluation at batch k comes after k
    batches, a metric within its batch.
    """
    if "rollouts/num_tokens" not in run.metrics:
        return math.nan
    is_before = (
        run.metrics["batch"] < batch if metric == ACCURACY else run.metrics["batch"] <= batch
    )
    return float(run.metrics["rollouts/num_tokens"][is_before].sum())


def _range(values: list[float]) -> Interval:
    """Mean, least and most; of a single run its value alone."""
    if not values:
        return NONE
    return Interval(
        float(np.mean(values)),
        *((min(values), max(values)) if len(values) > 1 else (math.nan, math.nan)),
    )


def _by_prompt(group: Group, metric: str) -> np.ndarray | None:
    """Share of right answers to each prompt at the last evaluation, mean over the runs; None where
    the files do not have it.
    """
    rows = [_prompts(run) for run in group.runs] if metric == ACCURACY else []
    if not rows or len({len(row) for row in rows}) != 1 or len(rows[0]) < 2:
        return None
    return np.mean(rows, axis=0)


def _prompts(run: RunFolder) -> list[float]:
    last = max(
        (row for row in run.evals if _is_rewards(row.get("reward_PK"))),
        key=lambda row: row["batch"],
        default={"reward_PK": []},
    )
    return [float(np.mean(np.array(row) >= run.success)) for row in last["reward_PK"]]


def _is_rewards(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(row, list) and row and _are_numbers(row) for row in value)
    )


def _are_numbers(row: list[object]) -> bool:
    return all(isinstance(x, (int, float)) and math.isfinite(x) for x in row)


def _clean(interval: Interval) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in interval]
