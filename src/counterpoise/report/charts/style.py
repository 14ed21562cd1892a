"""Plotly figures in one style: no chart junk, colours that colour-blind readers can tell apart,
every label escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from counterpoise.report.runs import Curve
from counterpoise.report.tokens import Row
from counterpoise.text import chart_label, number, with_interval

# Okabe and Ito's palette, darkened where white paper asks for it
PERCENT = ".3~%"  # ticks of shares: as many digits as tell neighbours apart
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B58900", "#56B4E9", "#6F4E7C", "#7F7F7F")
DASHES = ("solid", "dash", "dot", "dashdot")
SIGN_COLOUR = {"positive": "#0072B2", "negative": "#D55E00"}
SIGN_DASH = {"positive": "solid", "negative": "dash"}
NEUTRAL = "#8A939E"
MAX_BANDS = 4


class Key(NamedTuple):
    """A line of a chart's legend: what the mark stands for and its number.

    ``mark`` is a dash, ``bar``, ``hollow`` or ``point``.
    """

    label: str
    colour: str
    mark: str
    text: str


class Line(NamedTuple):
    """A line over batches whose points carry intervals."""

    label: str
    colour: str
    dash: str
    batches: list[int]
    rows: list[Row]


class Drawing(NamedTuple):
    """A figure with its legend; the page writes the legend as text beside the figure."""

    figure: go.Figure
    keys: list[Key]


def colour(at: int) -> str:
    return PALETTE[at % len(PALETTE)]


def dash(at: int) -> str:
    return DASHES[at // len(PALETTE) % len(DASHES)]


def blank(x: str = "", y: str = "") -> go.Figure:
    """An empty figure in the house style. Colours of axes and text are the reader's page's."""
    axis = {"showline": False, "zeroline": False, "ticks": "", "automargin": True, "gridwidth": 1}
    layout = {
        "template": "none",
        "margin": {"l": 44, "r": 10, "t": 8, "b": 36},
        "height": 250,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "hovermode": "x unified",
        "hoverlabel": {"font": {"size": 12}},
        "font": {"size": 12, "family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"},
        "bargap": 0.25,
        "dragmode": "zoom",
        "xaxis": {**axis, "title": {"standoff": 6, "text": x}, "showgrid": False},
        "yaxis": {
            **axis,
            "title": {"standoff": 6, "text": y},
            "showgrid": True,
            "nticks": 6,
            "exponentformat": "e",
        },
    }
    return go.Figure(layout=layout)  # at once: Plotly's updates of a figure take 14 times as long


def curves(
    series: Sequence[tuple[str, Curve, str]],
    *,
    y: str = "",
    x: str = "batch",
    zero: bool = False,
    markers: bool = False,
) -> Drawing:
    """Lines over batches with bands: (label, curve, text of the legend); a single long run also as
    its running mean.
    """
    figure, keys = blank(x, y), []
    for at, (_, curve, _) in enumerate(series):
        _add_band(figure, curve.batch, curve.low, curve.high, colour(at))
    for at, (label, curve, text) in enumerate(series):
        line = {"color": colour(at), "dash": dash(at)}
        if len(curve.runs) > 1 and len(series) == 1:
            for run in curve.runs:
                _add_line(
                    figure,
                    run.index.to_numpy(),
                    run.to_numpy(),
                    {**line, "width": 0.8},
                    opacity=0.45,
                )
        smooth = (
            _running_mean(curve.mean)
            if len(curve.runs) == 1 and len(curve.mean) >= 30 and not markers
            else None
        )
        if smooth is not None:
            _add_line(figure, curve.batch, curve.mean, {**line, "width": 0.8}, opacity=0.45)
        mode = "lines+markers" if markers or len(curve.mean) == 1 else "lines"
        main = curve.mean if smooth is None else smooth
        _add_line(
            figure,
            curve.batch,
            main,
            {**line, "width": 2},
            name=chart_label(label),
            mode=mode,
            low=curve.low,
            high=curve.high,
        )
        keys.append(Key(label, colour(at), dash(at), text))
    _pad_x(figure, [curve.batch for _, curve, _ in series])
    _limit_y(figure, [curve for _, curve, _ in series])
    if zero:
        figure.update_yaxes(rangemode="tozero")
    return Drawing(figure, keys)


def lines(
    series: Sequence[Line],
    *,
    x: str = "batch",
    y: str = "",
    write: Callable[..., str] = with_interval,
) -> Drawing:
    """Lines from 0 whose points carry intervals, with the last value in the legend; bands of many
    lines would hide each other.
    """
    figure = blank(x, y)
    value = [np.array([row.value for row in line.rows], float).T for line in series]
    for line, (_, low, high) in zip(series, value if len(series) <= MAX_BANDS else []):
        _add_band(figure, np.array(line.batches), low, high, line.colour)
    for line, (mean, low, high) in zip(series, value):
        style = {"color": line.colour, "width": 2, "dash": line.dash}
        name = chart_label(line.label)
        _add_line(
            figure,
            np.array(line.batches),
            mean,
            style,
            name=name,
            mode="lines+markers",
            low=low,
            high=high,
        )
    biggest = max(map(size_of, series))
    keys = [
        Key(line.label, line.colour, line.dash, _last_row(line, biggest, write)) for line in series
    ]
    _pad_x(figure, [np.array(line.batches) for line in series])
    figure.update_yaxes(rangemode="tozero")
    return Drawing(figure, keys)


def size_of(line: Line) -> float:
    """The largest absolute value of a line."""
    return max(abs(row.value.mean) for row in line.rows)


def bars(
    series: Sequence[tuple[str, str, str, Sequence[Row]]], *, y: str = "", unit: str = "tokens"
) -> Drawing:
    """Groups of bars with intervals: (label, colour, bar or hollow, rows); rows of equal label
    stand together.
    """
    figure, keys = blank(y=y), []
    for label, shade, mark, rows in series:
        mean, low, high = (np.array(column, float) for column in zip(*(row.value for row in rows)))
        whisker = {
            "type": "data",
            "symmetric": False,
            "thickness": 1.2,
            "width": 3,
            "color": NEUTRAL,
        }
        figure.add_bar(
            x=[chart_label(row.label) for row in rows],
            y=mean,
            name=chart_label(label),
            marker={
                "color": _faint(shade, 0.25) if mark == "hollow" else shade,
                "line": {"width": 1.5, "color": shade},
            },
            error_y={**whisker, "array": high - mean, "arrayminus": mean - low},
            customdata=_bounds_text(low, high),
            hovertemplate="%{y:.4g}%{customdata}<extra>%{fullData.name}</extra>",
        )
        keys.append(Key(label, shade, mark, f"{sum(row.count for row in rows):,} {unit}"))
    figure.update_layout(barmode="group")
    figure.update_yaxes(rangemode="tozero")
    return Drawing(figure, keys)


def histograms(
    series: Sequence[tuple[str, str, str, np.ndarray]], *, x: str, bins: int = 41
) -> Drawing:
    """Shares of tokens by value as outlines: (label, colour, dash, values); the outermost percent
    falls into the outer bins.
    """
    figure, keys = blank(x, "share of tokens"), []
    value_all = np.concatenate([value for *_, value in series])
    low, high = np.quantile(value_all, [0.005, 0.995])
    low, high = (low - 0.5, high + 0.5) if high - low < 1e-12 else (low, high)
    edges = np.linspace(low, high, bins + 1)
    for label, shade, style, value in series:
        share = np.r_[0, np.histogram(np.clip(value, low, high), edges)[0] / max(1, len(value)), 0]
        centre = np.r_[
            1.5 * edges[0] - 0.5 * edges[1],
            (edges[1:] + edges[:-1]) / 2,
            1.5 * edges[-1] - 0.5 * edges[-2],
        ]
        line = {"color": shade, "width": 1.6, "dash": style, "shape": "hvh"}
        figure.add_scatter(
            x=centre,
            y=share,
            mode="lines",
            line=line,
            name=chart_label(label),
            hovertemplate="%{y:.1%}<extra>%{fullData.name}</extra>",
        )
        keys.append(
            Key(
                label,
                shade,
                style,
                f"median {number(float(np.median(value)))}, {len(value):,} tokens",
            )
        )
    figure.update_yaxes(rangemode="tozero", tickformat=PERCENT)
    return Drawing(figure, keys)


def scatter(
    series: Sequence[tuple[str, str, np.ndarray, np.ndarray, str]], *, x: str, y: str
) -> Drawing:
    """Points with the line of equality: (label, colour, x, y, text of the legend)."""
    figure, keys = blank(x, y), []
    value_all = np.concatenate([np.concatenate([xs, ys]) for _, _, xs, ys, _ in series])
    low, high = (float(v) for v in np.quantile(value_all, [0.005, 0.995]))
    pad = 0.05 * (high - low) or 1e-9
    figure.add_scatter(
        x=[low, high],
        y=[low, high],
        mode="lines",
        line={"color": NEUTRAL, "width": 1, "dash": "dot"},
        hoverinfo="skip",
    )
    for label, shade, xs, ys, text in series:
        marker = {"color": shade, "size": 4, "opacity": 0.5, "line": {"width": 0}}
        template = "predicted %{x:.3g}<br>actual %{y:.3g}<extra>%{fullData.name}</extra>"
        figure.add_scatter(
            x=xs,
            y=ys,
            mode="markers",
            marker=marker,
            name=chart_label(label),
            hovertemplate=template,
        )
        keys.append(Key(label, shade, "point", text))
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(range=[low - pad, high + pad], showgrid=True)
    figure.update_yaxes(range=[low - pad, high + pad])
    return Drawing(figure, keys)


def _add_line(
    figure: go.Figure,
    x: np.ndarray,
    y: np.ndarray,
    line: dict,
    *,
    name: str = "",
    mode: str = "lines",
    opacity: float = 1.0,
    low: np.ndarray | None = None,
    high: np.ndarray | None = None,
) -> None:
    hover = (
        {"hovertemplate": "%{y:.4g}%{customdata}<extra>%{fullData.name}</extra>"}
        if name
        else {"hoverinfo": "skip"}
    )
    bounds = _bounds_text(low, high) if low is not None and high is not None else [""] * len(x)
    figure.add_scatter(
        x=x,
        y=y,
        mode=mode,
        line=line,
        marker={"size": 5},
        name=name,
        showlegend=bool(name),
        opacity=opacity,
        connectgaps=True,
        customdata=bounds if name else None,
        **hover,
    )


def _bounds_text(low: np.ndarray, high: np.ndarray) -> list[str]:
    """The interval as a hover shows it; empty where there is none."""
    return [
        f" [{a:.3g}, {b:.3g}]" if np.isfinite(a) and np.isfinite(b) else ""
        for a, b in zip(low, high)
    ]


def _pad_x(figure: go.Figure, batches: Sequence[np.ndarray]) -> None:
    """Room at both ends, so that a first label at 0 does not meet that of the other axis."""
    low, high = (float(pick([pick(batch) for batch in batches])) for pick in (min, max))
    pad = max(0.02 * (high - low), 0.15) if high > low else 1
    figure.update_xaxes(
        range=[low - pad, high + pad], dtick=1 if high - low < 8 else None
    )  # batches are counted, never halves of them


def _limit_y(figure: go.Figure, curves: Sequence[Curve]) -> None:
    """Few seeds have wide intervals: one that would press the lines flat runs out of the chart."""
    value = np.concatenate([run.to_numpy(float) for curve in curves for run in curve.runs])
    low, high = np.nanmin(value), np.nanmax(value)
    room = 0.75 * max(high - low, 0.05 * abs(high))
    bands = np.concatenate([[low, high], *(c.low for c in curves), *(c.high for c in curves)])
    if np.nanmin(bands) < low - room or np.nanmax(bands) > high + room:
        ends = max(np.nanmin(bands), low - room), min(np.nanmax(bands), high + room)
        figure.update_yaxes(range=[float(end) for end in ends])


def _add_band(
    figure: go.Figure, x: np.ndarray, low: np.ndarray, high: np.ndarray, shade: str
) -> None:
    keep = np.isfinite(low) & np.isfinite(high)
    if not keep.any():
        return
    x, low, high = x[keep], low[keep], high[keep]
    around = {"x": np.concatenate([x, x[::-1]]), "y": np.concatenate([high, low[::-1]])}
    figure.add_scatter(
        **around,
        fill="toself",
        fillcolor=_faint(shade),
        mode="none",
        hoverinfo="skip",
        showlegend=False,
    )


def _last_row(line: Line, biggest: float, write: Callable[..., str]) -> str:
    """The last value with its interval.

    Beside lines whose values reach ``biggest``, rounding errors are 0.
    """
    return "0" if size_of(line) < 1e-5 * biggest else write(*line.rows[-1].value)


def _faint(shade: str, alpha: float = 0.16) -> str:
    red, green, blue = (int(shade[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def _running_mean(value: np.ndarray) -> np.ndarray:
    window = max(3, len(value) // 15)
    weight = np.ones(window)
    known = np.isfinite(value)
    total = np.convolve(np.where(known, value, 0), weight, "same")
    return total / np.maximum(np.convolve(known, weight, "same"), 1)
