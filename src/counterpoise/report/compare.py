"""Methods against each other, over seeds: final, best, how soon, and whether a difference is more
than noise.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
import pandas as pd

from counterpoise.maths.intervals import (
    NONE,
    Interval,
    Paired,
    first_at_least,
    over_seeds,
    paired_bootstrap,
    welch,
)
from counterpoise.report.runs import Group, eval_series
from counterpoise.run.read import RunFolder
from counterpoise.text import visible

ACCURACY = "eval/accuracy"
LAST = 10  # a training metric's final value is the mean of so many last batches


class Reach(NamedTuple):
    """How soon a threshold was reached: mean, least and most over the runs that reached it."""

    reached: int
    total: int
    batches: Interval
    tokens: Interval


class Line(NamedTuple):
    """One group in the comparison."""

    label: str
    seeds: int
    first: Interval
    final: Interval
    best: Interval
    reach: Reach
    against: Paired | None
    over_seeds: Interval | None
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
        Group(group.label, [run for run in group.runs if not _series(run, metric).empty])
        for group in groups
    ]
    notes += [
        f"{g.label}: {len(g.runs) - len(k.runs)} run(s) without {metric}."
        for g, k in zip(groups, comparable)
        if len(g.runs) > len(k.runs)
    ]
    comparable = [group for group in comparable if group.runs]
    if not comparable:
        raise ValueError(
            f"compare: no run has {metric!r}. Keys are in metrics.jsonl, for example reward/mean."
        )
    base = _baseline(comparable, baseline)
    threshold = (
        over_seeds([_final(run, metric) for run in base.runs]).mean
        if threshold is None
        else threshold
    )
    return Comparison(
        metric,
        base.label,
        threshold,
        [_line(g, base, metric, threshold) for g in comparable],
        notes + _caveats(comparable, metric),
    )


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
            "difference": _clean(line.against.difference) if line.against else None,
            "difference_over_seeds": _clean(line.over_seeds) if line.over_seeds else None,
            "is_paired": line.against.is_paired if line.against else None,
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


def _line(group: Group, base: Group, metric: str, threshold: float) -> Line:
    series = [_series(run, metric) for run in group.runs]
    against = over = None
    if group is not base:
        against = paired_bootstrap(_per_prompt(base, metric), _per_prompt(group, metric))
        over = welch(
            [_final(run, metric) for run in base.runs], [_final(run, metric) for run in group.runs]
        )
    return Line(
        label=group.label,
        seeds=len(group.runs),
        first=over_seeds([s.iloc[0] for s in series]),
        final=over_seeds([_final(run, metric) for run in group.runs]),
        best=over_seeds([s.max() for s in series]),
        reach=_reach(group, metric, threshold),
        against=against,
        over_seeds=over,
        verdict=_verdict(against, over, metric) if against and over else "baseline",
    )


def _verdict(against: Paired, over: Interval, metric: str) -> str:
    """Better or worse only if the paired interval, and with seeds on both sides Welch's too, leaves
    0 out.
    """
    single = min(against.num_seeds) < 2
    if single and (metric != ACCURACY or against.num_prompts < 2):
        return "one run: no interval"
    inside = against.is_noise or (not single and over.low <= 0 <= over.high)
    word = "within noise" if inside else "better" if against.difference.mean > 0 else "worse"
    return f"{word} (one seed: noise between seeds unknown)" if single else word


def _baseline(groups: Sequence[Group], label: str | None) -> Group:
    if label is None:
        return groups[0]
    for group in groups:
        if group.label == label:
            return group
    known = [group.label for group in groups]
    close = difflib.get_close_matches(label, known, 1)
    raise ValueError(
        f"compare: no group {label!r}. {f'Did you mean {close[0]!r}? ' if close else ''}Known:"
        f" {visible(', '.join(known))}."
    )


def _caveats(groups: Sequence[Group], metric: str) -> list[str]:
    notes = []
    ends = {
        group.label: {int(_series(run, metric).index[-1]) for run in group.runs} for group in groups
    }
    if len(set().union(*ends.values())) > 1:
        text = ", ".join(
            f"{label}: {'/'.join(map(str, sorted(batches)))}" for label, batches in ends.items()
        )
        notes.append(
            f"Runs end at different batches ({text}): final values are not at equal budgets."
        )
    if (
        metric == ACCURACY
        and len({len(row) for group in groups for row in _per_prompt(group, metric)}) > 1
    ):
        notes.append(
            "Runs were evaluated on different numbers of prompts: differences are not paired."
        )
    return notes


def _reach(group: Group, metric: str, threshold: float) -> Reach:
    batches, tokens = [], []
    for run in group.runs:
        series = _series(run, metric)
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


def _series(run: RunFolder, metric: str) -> pd.Series:
    if metric.startswith("eval/"):
        return eval_series(run, metric)
    return (
        run.metrics.set_index("batch")[metric].dropna()
        if metric in run.metrics
        else pd.Series(dtype=float)
    )


def _final(run: RunFolder, metric: str) -> float:
    series = _series(run, metric)
    return (
        float(series.iloc[-1]) if metric.startswith("eval/") else float(series.iloc[-LAST:].mean())
    )


def _per_prompt(group: Group, metric: str) -> list[np.ndarray]:
    """Rewards of the last evaluation, one value per prompt and one array per run; without them the
    final value alone.
    """
    return [_prompts(run, metric) for run in group.runs]


def _prompts(run: RunFolder, metric: str) -> np.ndarray:
    last = max(
        (row for row in run.evals if _is_rewards(row.get("reward_PK"))),
        key=lambda row: row["batch"],
        default=None,
    )
    if metric != ACCURACY or last is None:
        return np.array([_final(run, metric)])
    return np.array([float(np.mean(samples)) for samples in last["reward_PK"]])


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
