"""A table of rules with several measures each: for the terminal and as a figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from counterpoise.probes.output import Drawing, NumberDict, error_bars

Rules = Mapping[str, dict[str, Any]]  # label -> measure -> number with its interval
COLOURS = ("#0072B2", "#009E73", "#D55E00", "#CC79A7")


class Sheet(NamedTuple):
    """What the terminal shows of a probe: lines, then a table."""

    notes: list[str]
    head: list[str]
    rows: list[list[str]]


def ordered(rules: Rules, references: Rules, measure: str) -> dict[str, dict[str, Any]]:
    """Rules by a measure, the largest mean first, then references in parentheses.

    >>> one, two = ({"x": {"mean": mean}} for mean in (1.0, 2.0))
    >>> list(ordered({"a": one, "b": two, "c": {}}, {"uniform": one}, "x"))
    ['b', 'a', 'c', '(uniform)']
    """

    def key(item: tuple[str, dict[str, Any]]) -> float:
        mean = (item[1].get(measure) or {}).get("mean")
        return np.inf if mean is None else -mean

    named = {f"({label})": one for label, one in references.items()}
    return dict(sorted(rules.items(), key=key)) | dict(sorted(named.items(), key=key))


def number_text(number: NumberDict | None) -> str:
    """A number with its interval, three digits behind the point; a dash where it is not defined.

    >>> number_text({"mean": -0.0001, "low": -0.41, "high": 0.6}), number_text(None)
    ('.000 [-.410, .600]', '-')
    """
    mean, low, high = ((number or {}).get(name) for name in ("mean", "low", "high"))
    if mean is None:
        return "-"
    return _short(mean) + (
        "" if low is None or high is None else f" [{_short(low)}, {_short(high)}]"
    )


def _short(value: float) -> str:
    return (
        f"{round(value, 3) + 0.0:.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3f}"
    )


def merged(rows: list[list[str]]) -> list[list[str]]:
    """Rows that differ in their label alone as one.

    >>> merged([["a", "1"], ["b", "2"], ["c", "1"]])
    [['a, c', '1'], ['b', '2']]
    """
    labels: dict[tuple[str, ...], list[str]] = {}
    for label, *cells in rows:
        labels.setdefault(tuple(cells), []).append(label)
    return [[", ".join(names), *cells] for cells, names in labels.items()]


def rule_figure(
    title: str, rows: Rules, measures: Mapping[str, str], control: dict[str, Any]
) -> Drawing:
    """One panel per measure with a bar per rule and its interval; dashed: the control's value."""
    from plotly.subplots import make_subplots

    out = make_subplots(
        1,
        len(measures),
        subplot_titles=list(measures.values()),
        shared_yaxes=True,
        horizontal_spacing=0.04,
    )
    labels = list(rows)[::-1]
    for at, name in enumerate(measures, 1):
        numbers = [rows[label].get(name) or {} for label in labels]
        bar = {"x": [one.get("mean") for one in numbers], "error_x": error_bars(numbers)}
        colour = COLOURS[(at - 1) % len(COLOURS)]
        out.add_bar(**bar, y=labels, orientation="h", marker_color=colour, row=1, col=at)
        mean = (control.get(name) or {}).get("mean")
        if mean is not None:
            out.add_vline(x=mean, line={"dash": "dash", "color": "#555"}, row=1, col=at)  # pyright: ignore[reportArgumentType]
    height = 190 + 22 * len(labels)
    return out.update_layout(title=title, showlegend=False, height=height)
