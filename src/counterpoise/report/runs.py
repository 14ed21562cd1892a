"""Runs of one configuration over seeds, and their curves."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import pandas as pd

from counterpoise.catalogue.label import label
from counterpoise.maths.intervals import NONE, Interval, over_seeds
from counterpoise.run.read import RunFolder
from counterpoise.text import shorten

# settings that cannot change what is learnt: what is written, and how a batch is cut to fit the
# memory
OBSERVERS = (
    *(
        "optimizer.token_budget",
        "optimizer.activation_checkpointing",
        "optimizer.compile",
        "optimizer.kernels",
        "rollouts.max_rows",
        "grader_time_limit_s",
        "grader_max_failed_frac",
    ),
    *("seed", "run_dir", "trackers", "project", "ledger", "eval.every"),
    *("checkpoint_every", "keep_checkpoints", "keep_every", "save_rollouts_every"),
)
MAX_SETTINGS = 2000
LAST = 10  # a training metric's final value is the mean of so many last batches
MAX_LABEL = 200


class Group(NamedTuple):
    """Runs that differ by the seed alone."""

    label: str
    runs: list[RunFolder]


class Curve(NamedTuple):
    """One number over batches: each run's values, their mean, and the interval (NaN with one run).

    ``interval`` says what the band is: ``seeds`` (Student's t over the runs), ``own`` (the number
    came with its own interval), or empty.
    """

    batch: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    runs: list[pd.Series]
    interval: str


def group_runs(runs: list[RunFolder]) -> list[Group]:
    """Runs by configuration; the label is the method, with the settings that tell equal methods
    apart.
    """
    settings = [settings_of(run) for run in runs]
    by_key: dict[str, list[int]] = {}
    for at, own in enumerate(settings):
        by_key.setdefault(json.dumps(own, sort_keys=True, default=str), []).append(at)
    members = list(by_key.values())
    labels = _labels(
        [method_name(runs[rows[0]]) for rows in members], [settings[rows[0]] for rows in members]
    )
    return [Group(label, [runs[at] for at in rows]) for label, rows in zip(labels, members)]


def method_name(run: RunFolder) -> str:
    """The method's label from the config or the manifest, or the run's own name."""
    for source in (run.config, run.manifest):
        method = source.get("method")
        name = method.get("name") if isinstance(method, dict) else method
        if isinstance(name, str) and name:
            return shorten(label(method or name), MAX_LABEL)
    return run.name


def seed_of(run: RunFolder) -> object:
    return run.config.get("seed", run.manifest.get("seed"))


def is_share(key: str) -> bool:
    """Whether a metric is a share, to be written in percent: held-out accuracy, pass@k, fractions.

    >>> is_share("eval/accuracy"), is_share("rollouts/cut_frac"), is_share("reward/mean")
    (True, True, False)
    """
    ends = ("_frac", "/frac", "plan/pairs_kept")
    return key.startswith(("eval/accuracy", "eval/pass@")) or key.endswith(ends)


def curve(group: Group, key: str) -> Curve | None:
    """A metric of ``metrics.jsonl`` over batches; None if no run has it."""
    return curve_over([_metric(run, key) for run in group.runs])


def timing_curve(group: Group, key: str) -> Curve | None:
    """A key of ``timing.jsonl`` over batches."""
    return curve_over(
        [
            run.timing.set_index("batch")[key].dropna().astype(float)
            for run in group.runs
            if key in run.timing
        ]
    )


def series_of(run: RunFolder, key: str) -> pd.Series:
    """A number of one run over batches: an evaluation by batches trained, or a metric."""
    return eval_series(run, key) if key.startswith("eval/") else _metric(run, key)


def curve_of(group: Group, key: str) -> Curve | None:
    """The curve of an evaluation or of a metric."""
    return (eval_curve if key.startswith("eval/") else curve)(group, key)


def final_of(run: RunFolder, key: str) -> float:
    """The last evaluation, or the mean of a metric over the last batches."""
    return float(series_of(run, key).iloc[-1 if key.startswith("eval/") else -LAST :].mean())


def final(group: Group, key: str) -> Interval:
    """The final value of a group, the one that tables, tiles and legends show: over seeds by
    Student's t; of one run with the evaluation's own interval, or over its last batches.
    """
    runs = [run for run in group.runs if not series_of(run, key).empty]
    if not runs:
        return NONE
    if len(runs) > 1:
        return over_seeds([final_of(run, key) for run in runs])
    if not key.startswith("eval/"):
        return over_seeds(list(series_of(runs[0], key).iloc[-LAST:]))
    return at_point(Group(group.label, runs), key, -1)


def at_point(group: Group, key: str, at: int) -> Interval:
    """The ``at``-th point of a group's curve with the band there."""
    one = curve_of(group, key)
    return Interval(*(float(x[at]) for x in (one.mean, one.low, one.high))) if one else NONE


def eval_curve(group: Group, key: str = "eval/accuracy") -> Curve | None:
    """A held-out number after so many batches; of one run with the interval that the
    evaluation brought.
    """
    out = curve_over([eval_series(run, key) for run in group.runs])
    if out is None or len(group.runs) > 1:
        return out
    low, high = (eval_series(group.runs[0], f"{key}_{side}") for side in ("low", "high"))
    if low.empty or high.empty:
        return out
    return out._replace(
        low=low.reindex(out.batch).to_numpy(),
        high=high.reindex(out.batch).to_numpy(),
        interval="own",
    )


def eval_series(run: RunFolder, key: str = "eval/accuracy") -> pd.Series:
    """Evaluations by the number of batches trained before; from ``evals.jsonl``, else from
    ``metrics.jsonl``.
    """
    rows = {
        row["batch"]: row[key]
        for row in run.evals
        if isinstance(row.get(key), (int, float)) and math.isfinite(row[key])
    }
    if rows:
        return pd.Series(rows, dtype=float).sort_index()
    series = _metric(run, key)
    return series.set_axis(series.index + 1)


def _metric(run: RunFolder, key: str) -> pd.Series:
    if key not in run.metrics:
        return pd.Series(dtype=float)
    return run.metrics.set_index("batch")[key].dropna().astype(float)


def curve_over(runs: list[pd.Series]) -> Curve | None:
    """One number over batches, from its values in each run; None if no run has any."""
    runs = [series for series in runs if not series.empty]
    if not runs:
        return None
    table = pd.concat(runs, axis=1).sort_index()
    if len(runs) == 1:
        nothing = np.full(len(table), math.nan)
        return Curve(
            table.index.to_numpy(), table.iloc[:, 0].to_numpy(), nothing, nothing, runs, ""
        )
    interval = [over_seeds(list(row)) for row in table.to_numpy()]
    mean, low, high = (np.array(column) for column in zip(*interval))
    return Curve(table.index.to_numpy(), mean, low, high, runs, "seeds")


def settings_of(run: RunFolder) -> dict[str, object]:
    """What decides what a run learns, by path: ``{"optimizer.lr": 1e-4, ...}``."""
    leaves = islice(_leaves("", run.config), MAX_SETTINGS)
    return {
        path: value
        for path, value in leaves
        if path not in OBSERVERS and path.split(".")[0] not in OBSERVERS
    }


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), child)
    else:
        yield path, value


def _labels(names: list[str], settings: list[dict[str, object]]) -> list[str]:
    out = []
    for name, own in zip(names, settings):
        rivals = [
            other for rival, other in zip(names, settings) if rival == name and other is not own
        ]
        apart = [path for path in own if any(other.get(path) != own[path] for other in rivals)]
        lacks = [path for other in rivals for path in other if path not in own]
        out.append(
            " · ".join(
                [
                    name,
                    *(f"{path}={own[path]}" for path in apart),
                    *(f"no {path}" for path in dict.fromkeys(lacks)),
                ]
            )
        )
    return out
