"""The table and the figure of the probe."""

from __future__ import annotations

import math
from typing import Any

from counterpoise.probes.gradient.batches import ADAMW, GRADIENT, METRICS
from counterpoise.probes.gradient.cosines import ENOUGH
from counterpoise.probes.output import Drawing, error_bars
from counterpoise.probes.sheet import Sheet, merged, number_text

COLOURS = {GRADIENT: "#0072B2", ADAMW: "#D55E00"}
TITLES = {GRADIENT: "gradient", ADAMW: "AdamW's step on it"}
PANELS = {
    "cosine": "one batch: cosine with truth",
    "difference": "minus the control",
    "cosine_of_mean": "mean update: cosine",
    "worth": "worth, plain rollouts",
}
MOST = 1_000_000  # rollouts that are told
HEAD = ["method", "cosine", "- control", "of the mean", "worth", "with control", "verdict"]


def ordered(numbers: dict[str, Any]) -> list[str]:
    """Methods, the nearest to the truth first."""
    mean = {label: row["cosine"]["mean"] for label, row in numbers[GRADIENT].items()}
    return sorted(mean, key=lambda label: 2.0 if mean[label] is None else -mean[label])


def sheet(numbers: dict[str, Any]) -> Sheet:
    """What the terminal shows; methods with one and the same update share a row."""
    rows, has_steps = [], ADAMW in numbers
    for label in ordered(numbers):
        row = numbers[GRADIENT][label]
        cells = [number_text(row[name]) for name in ("cosine", "difference", "cosine_of_mean")]
        cells += [worth_text(row["worth"]), f"{row['with_control']:.3f}", row["verdict"]]
        if has_steps:
            step = numbers[ADAMW][label]
            cells += [number_text(step["cosine"]), number_text(step["difference"]), step["verdict"]]
        rows.append([label, *cells])
    more = ["step: cosine", "step - control", "verdict"] if has_steps else []
    return Sheet(notes(numbers), HEAD + more, merged(rows))


def worth_text(worth: dict[str, Any]) -> str:
    """Rollouts, whole ones; an end beyond a million says no more than that there is none.

    >>> worth_text({"mean": 171.2, "low": 150.0, "high": 4.3e15})
    '171 [150, > 1,000,000]'
    """
    mean, low, high = (worth[name] for name in ("mean", "low", "high"))
    if mean is None:
        return "-"
    bounds = "" if low is None or high is None else f" [{_count(low)}, {_count(high)}]"
    return f"{_count(mean)}{bounds}"


def _count(number: float) -> str:
    return f"{number:,.0f}" if number <= MOST else f"> {MOST:,}"


def notes(numbers: dict[str, Any]) -> list[str]:
    """What the table rests on, and what it cannot tell."""
    size = f"{numbers['num_batches']} batches of {numbers['rollouts_per_batch']} rollouts"
    out = [
        f"  {truth_note(numbers['truth'])}",
        f"  {size}, control {numbers['control']}; differences hold together at 95%",
        "  worth: plain rollouts whose gradient has this cosine with the truth",
    ]
    if ADAMW not in numbers:
        out.append("  no AdamW steps: it has taken no update before this batch")
    return out


def truth_note(truth: dict[str, Any]) -> str:
    """How well the truth is known, and what would be enough."""
    halves, kept = truth["halves"], truth["reliability"]
    text = f"truth of {truth['rollouts']:,} rollouts"
    if halves is None:
        return f"{text}: no prompt has rollouts of different reward, so there is no gradient"
    text += f", cosine of its halves {halves:.2f}"
    if "times_more" not in truth:
        return f"{text}; of all of it with the truth {kept:.2f}, for which cosines are corrected"
    if truth["rollouts_needed"] is None:
        return f"{text}: no direction yet. Take many times more: --set truth=..."
    needed = f"{truth['times_more']:.1f} times as many needed for {ENOUGH}"
    return f"{text}: {needed}, --set truth={truth['rollouts_needed']}"


def figure(numbers: dict[str, Any]) -> Drawing:
    """Cosine of one batch's update with the truth, its difference to the control's, cosine of the
    mean update, worth in plain rollouts. Hollow: the control's update in all but name.
    """
    from plotly.subplots import make_subplots

    labels, titles = ordered(numbers)[::-1], list(PANELS.values())
    out = make_subplots(
        1, len(PANELS), subplot_titles=titles, shared_yaxes=True, horizontal_spacing=0.03
    )
    for metric in METRICS:
        if metric in numbers:
            draw_metric(out, numbers[metric], labels, metric)
    marks = {"difference": 0.0, "cosine_of_mean": 1.0, "worth": numbers["rollouts_per_batch"]}
    for name, x in marks.items():
        place: Any = {"row": 1, "col": 1 + list(PANELS).index(name)}
        out.add_vline(x=x, line={"dash": "dash", "color": "#555"}, **place)
    # ticks a factor of four apart, one of them at a batch
    ticks: Any = {"tick0": math.log10(numbers["rollouts_per_batch"]), "dtick": math.log10(4)}
    out.update_xaxes(type="log", **ticks, row=1, col=len(PANELS))
    return out.update_layout(
        title="How near one update comes to the true policy gradient",
        height=220 + 22 * len(labels),
        scattermode="group",
    )


def draw_metric(out: Drawing, methods: dict[str, Any], labels: list[str], metric: str) -> None:
    hollow = [methods[label]["verdict"] == "inactive here" for label in labels]
    symbols = ["circle-open" if is_hollow else "circle" for is_hollow in hollow]
    for column, name in enumerate(PANELS, 1):
        values = [methods[label].get(name) for label in labels]
        if None in values:  # AdamW's step has no worth
            continue
        out.add_scatter(
            x=[value["mean"] for value in values],
            y=labels,
            error_x=error_bars(values),
            mode="markers",
            marker={"color": COLOURS[metric], "symbol": symbols, "size": 8},
            name=TITLES[metric],
            legendgroup=metric,
            showlegend=column == 1,
            row=1,
            col=column,
        )
