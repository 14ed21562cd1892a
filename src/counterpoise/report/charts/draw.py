"""How each chart of the report is drawn from groups of runs: curves over batches, numbers of one
batch's tokens, the ledger over time.

A drawing is a function of (groups, batch); ``batch`` chooses the tokens table, the last one by
default. None: the files hold nothing to draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from counterpoise.maths.columns import by_sign
from counterpoise.maths.intervals import Interval, over_seeds
from counterpoise.report import tokens
from counterpoise.report.charts import style as figures
from counterpoise.report.charts.style import SIGN_COLOUR, SIGN_DASH, Drawing, Line
from counterpoise.report.runs import (
    LAST,
    Curve,
    Group,
    curve,
    curve_of,
    final,
    is_share,
    timing_curve,
)
from counterpoise.report.tokens import Row, ledger_rows
from counterpoise.run.read import RunFolder
from counterpoise.text import number, percent, with_interval

MAX_LEDGER_BATCHES = 40
MAX_REWARDS = 10
HISTOGRAM_DASH = {
    "positive": "solid",
    "negative": "dot",
}  # outlines of both signs may fall together
Draw = Callable[[Sequence[Group], "int | None"], "Drawing | None"]


def of_metric(key: str, *, zero: bool = False) -> Draw:
    """Curves of one key of metrics.jsonl."""

    def draw(groups: Sequence[Group], batch: int | None) -> Drawing | None:
        return of_curves(groups, key, zero=zero)

    return draw


def of_keys(*names: tuple[str, str]) -> Draw:
    """Several keys of metrics.jsonl in one chart: (key, label).

    With several groups each has a colour, and each key a dash.
    """

    def draw(groups: Sequence[Group], batch: int | None) -> Drawing | None:
        lines = [
            line
            for at, group in enumerate(groups)
            for line in key_lines(group, at, names, len(groups) == 1)
        ]
        return figures.lines(lines) if lines else None

    return draw


def of_evals(groups: Sequence[Group], batch: int | None) -> Drawing | None:
    return of_curves(groups, "eval/accuracy")


def of_pass(groups: Sequence[Group], batch: int | None) -> Drawing | None:
    """The largest k of pass@k that the evaluations have."""
    keys = {key for g in groups for run in g.runs for row in run.evals for key in row}
    known = [int(k) for key in keys if (k := key.removeprefix("eval/pass@")).isdigit()]
    if not known:
        return None
    named = [Group(f"{g.label}, k = {max(known)}", g.runs) for g in groups]
    return of_curves(named, f"eval/pass@{max(known)}")


def of_timing(key: str) -> Draw:
    """Curves of one key of timing.jsonl; of several runs each stands alone."""

    def draw(groups: Sequence[Group], batch: int | None) -> Drawing | None:
        known = [(g.label, c) for g in groups if (c := timing_curve(g, key))]
        series = [(label, c, number(float(np.nanmedian(c.mean)))) for label, c in known]
        return figures.curves(series, zero=True) if series else None

    return draw


def of_rewards(groups: Sequence[Group], batch: int | None) -> Drawing | None:
    """Shares of rollouts by reward at the first and the last batch of each group's first run."""
    series = []
    for at, group in enumerate(groups):
        batches = group.runs[0].batches("rollouts")
        for batch_number in dict.fromkeys([*batches[:1], *batches[-1:]]):
            rows = reward_shares(group.runs[0], batch_number)
            if rows:
                name = f"batch {batch_number}"
                label = name if len(groups) == 1 else f"{group.label}, {name}"
                mark = "hollow" if batch_number == batches[0] else "bar"
                series.append((label, figures.colour(at), mark, rows))
    if not series:
        return None
    drawing = figures.bars(series, y="share of rollouts", unit="rollouts")
    drawing.figure.update_yaxes(tickformat=figures.PERCENT)
    return drawing


def reward_shares(run: RunFolder, batch: int) -> list[Row]:
    """Share of rollouts with each reward; many different rewards in tenths of their range."""
    table = run.table("rollouts", batch, ("reward",))
    if table is None or not table.num_columns:
        return []
    given = pd.to_numeric(table.to_pandas()["reward"], errors="coerce")
    reward_N = np.asarray(given, float)
    reward_N = reward_N[np.isfinite(reward_N)]
    if len(np.unique(reward_N)) > MAX_REWARDS:
        width = np.ptp(reward_N) / MAX_REWARDS
        reward_N = np.round(np.round(reward_N / width) * width, 6)
    return [
        Row(f"{value:g}", Interval(float(num / len(reward_N)), math.nan, math.nan), int(num))
        for value, num in zip(*np.unique(reward_N, return_counts=True))
    ]


def of_curves(groups: Sequence[Group], key: str, *, zero: bool = False) -> Drawing | None:
    """Curves of one key, with its final value in the legend; shares in percent."""
    is_eval = key.startswith("eval/")
    known = [(g, c) for g in groups if (c := curve_of(g, key))]
    if not known:
        return None
    write = percent if is_share(key) else with_interval
    series = [(g.label, c, _final_text(g, key, c, write)) for g, c in known]
    x = "batches trained" if is_eval else "batch"
    drawing = figures.curves(series, markers=is_eval, x=x, zero=zero)
    if is_share(key):
        drawing.figure.update_yaxes(tickformat=figures.PERCENT)
    return drawing


def _final_text(group: Group, key: str, one: Curve, write: Callable[..., str]) -> str:
    is_mean = not key.startswith("eval/") and len(one.mean) >= LAST
    return f"{write(*final(group, key))}{f' last {LAST}' if is_mean else ''}"


def of_positive_share(groups: Sequence[Group], batch: int | None) -> Drawing | None:
    """The band from the least to the most positive update of each batch."""
    low = [curve(group, "plan/positive_frac_min") for group in groups]
    high = [curve(group, "plan/positive_frac_max") for group in groups]
    bands = [
        (g.label, _band(a, b))
        for g, a, b in zip(groups, low, high)
        if a is not None and b is not None
    ]
    if not bands:
        return None
    drawing = figures.curves([(label, band, _last_text(band)) for label, band in bands])
    drawing.figure.update_yaxes(range=[0, 1])
    return drawing


def of_tokens(column: str, x: str) -> Draw:
    """Distribution of a token column by the sign of the advantage."""

    def draw(groups: Sequence[Group], batch: int | None) -> Drawing | None:
        series = []
        for at, (group, frame) in enumerate(_frames(groups, batch)):
            if not tokens.has(frame, column, "sign"):
                continue
            for name, is_in in by_sign(frame["sign"]).items():
                value = np.asarray(frame[column][is_in & frame[column].notna()], float)
                if len(value):
                    series.append(
                        (
                            _label(group, name, groups),
                            _shade(at, name, groups),
                            HISTOGRAM_DASH[name],
                            value,
                        )
                    )
        return figures.histograms(series, x=x) if series else None

    return draw


def of_signed_bars(number_of: Callable[[pd.DataFrame], dict[str, list[Row]]], y: str) -> Draw:
    """Bars of one batch's tokens, positive beside negative; with several groups negative ones are
    hollow.
    """

    def draw(groups: Sequence[Group], batch: int | None) -> Drawing | None:
        series = []
        for at, (group, frame) in enumerate(_frames(groups, batch)):
            for name, rows in number_of(frame).items():
                style = "hollow" if len(groups) > 1 and name == "negative" else "bar"
                series.append((_label(group, name, groups), _shade(at, name, groups), style, rows))
        return figures.bars(series, y=y) if series else None

    return draw


def of_prediction(groups: Sequence[Group], batch: int | None) -> Drawing | None:
    series = []
    for at, (group, frame) in enumerate(_frames(groups, batch)):
        fit = tokens.prediction(frame)
        if fit is not None:
            label = f"{group.label}, batch {frame.attrs['batch']}"
            text = f"r = {with_interval(*fit.correlation, digits=4)}, {fit.num_tokens:,} tokens"
            xs, ys = fit.sample["predicted"].to_numpy(float), fit.sample["delta"].to_numpy(float)
            series.append((label, figures.colour(at), xs, ys, text))
    return (
        figures.scatter(series, x="predicted change of the log-prob", y="actual change")
        if series
        else None
    )


def of_cancellation(groups: Sequence[Group], batch: int | None) -> Drawing | None:
    series = []
    for at, (group, frame) in enumerate(_frames(groups, batch)):
        rows = [row for row in tokens.cancellation_by_sharing(frame) if row.count]
        if rows:
            series.append((group.label, figures.colour(at), "bar", rows))
    return figures.bars(series, y="mean cancellation") if series else None


def of_flips(groups: Sequence[Group], batch: int | None) -> Drawing | None:
    """Flip rate by sign over the batches that have a ledger."""
    lines = []
    for at, group in enumerate(groups):
        for name, (batches, rows) in ledger_series(group, "flips").items():
            lines.append(
                Line(
                    _label(group, name, groups),
                    _shade(at, name, groups),
                    SIGN_DASH[name],
                    batches,
                    rows,
                )
            )
    if not lines:
        return None
    drawing = figures.lines(lines, y="share of tokens", write=percent)
    drawing.figure.update_yaxes(tickformat=figures.PERCENT)
    return drawing


def of_ledger(name: str, *names: tuple[str, str], also: Sequence[tuple[str, str]] = ()) -> Draw:
    """A number of the ledger with its interval over prompts; from metrics.jsonl, without, where the
    run has no tokens for it.

    Args:
        name: of the number in ``ledger_rows``.
        names: (key of metrics.jsonl, label of the row) of its lines.
        also: further lines that only metrics.jsonl has; with several groups those that are 0 are
            left out.
    """

    def draw(groups: Sequence[Group], batch: int | None) -> Drawing | None:
        lines = []
        for at, group in enumerate(groups):
            series = ledger_series(group, name)
            of_tokens = [
                _line(group, at, k, label, *series[label], len(groups) == 1)
                for k, (_, label) in enumerate(names)
                if label in series
            ]
            lines += of_tokens or key_lines(group, at, names, len(groups) == 1)
            others = key_lines(group, at, also, len(groups) == 1, offset=len(names))
            lines += [line for line in others if len(groups) == 1 or figures.size_of(line) > 1e-6]
        return figures.lines(lines) if lines else None

    return draw


def ledger_series(group: Group, name: str) -> dict[str, tuple[list[int], list[Row]]]:
    """label -> batches and rows of every batch that has a tokens table; over seeds where there are
    several runs, else over prompts.
    """
    batches = sorted({batch for run in group.runs for batch in run.batches("tokens")})
    rank = np.linspace(0, len(batches) - 1, min(len(batches), MAX_LEDGER_BATCHES))
    out: dict[str, tuple[list[int], list[Row]]] = {}
    for batch in (batches[k] for k in sorted({round(x) for x in rank})):
        rows_by_run = [
            ledger_rows(run, batch).get(name, [])
            for run in group.runs
            if batch in run.batches("tokens")
        ]
        for label in dict.fromkeys(row.label for rows in rows_by_run for row in rows):
            same = [
                row
                for rows in rows_by_run
                for row in rows
                if row.label == label and np.isfinite(row.value.mean)
            ]
            if same:
                at, rows = out.setdefault(label, ([], []))
                at.append(batch)
                rows.append(same[0] if len(same) == 1 else _over_runs(same))
    return out


def key_lines(
    group: Group, at: int, names: Sequence[tuple[str, str]], is_alone: bool, offset: int = 0
) -> list[Line]:
    """Lines of the ``at``-th group, one per (key of metrics.jsonl, label) that it has."""
    lines = []
    for k, (key, label) in enumerate(names):
        one = curve(group, key)
        if one is not None:
            rows = [
                Row(label, Interval(*map(float, bounds)), 0)
                for bounds in zip(one.mean, one.low, one.high)
            ]
            lines.append(
                _line(
                    group,
                    at,
                    k + offset,
                    label,
                    [int(batch) for batch in one.batch],
                    rows,
                    is_alone,
                )
            )
    return lines


def _line(
    group: Group, at: int, k: int, label: str, batches: list[int], rows: list[Row], is_alone: bool
) -> Line:
    """The ``k``-th line of the ``at``-th group."""
    if is_alone:
        return Line(label, figures.colour(k), "solid", batches, rows)
    return Line(
        f"{group.label}: {label}",
        figures.colour(at),
        figures.DASHES[k % len(figures.DASHES)],
        batches,
        rows,
    )


def _frames(groups: Sequence[Group], batch: int | None) -> list[tuple[Group, pd.DataFrame]]:
    """The tokens of a batch, whole over the runs of each group; prompts of different runs stay
    apart.
    """
    out = []
    for group in groups:
        tables = [tokens.tokens_of(run, batch) for run in group.runs]
        parts = [
            frame.assign(group=_apart(frame, k))
            for k, pair in enumerate(tables)
            if pair is not None
            for _, frame in [pair]
        ]
        if parts:
            whole = pd.concat(parts, ignore_index=True)
            whole.attrs["batch"] = next(pair[0] for pair in tables if pair is not None)
            out.append((group, whole))
    return out


def _apart(frame: pd.DataFrame, run: int) -> pd.Series:
    prompt = frame["group"] if "group" in frame else pd.Series(0, index=frame.index)
    return prompt.fillna(-1).astype("int64") + run * 1_000_000


def _over_runs(rows: list[Row]) -> Row:
    interval = over_seeds([row.value.mean for row in rows])
    return Row(rows[0].label, interval, sum(row.count for row in rows))


def _band(low: Curve, high: Curve) -> Curve:
    return Curve(low.batch, (low.mean + high.mean) / 2, low.mean, high.mean, low.runs[:1], "own")


def _last_text(band: Curve) -> str:
    """From the least to the most at the last batch: no interval."""
    return f"{percent(band.low[-1])} to {percent(band.high[-1])}"


def _label(group: Group, sign: str, groups: Sequence[Group]) -> str:
    return f"{sign} advantage" if len(groups) == 1 else f"{group.label}, {sign}"


def _shade(at: int, sign: str, groups: Sequence[Group]) -> str:
    return SIGN_COLOUR[sign] if len(groups) == 1 else figures.colour(at)
