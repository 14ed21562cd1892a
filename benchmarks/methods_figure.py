"""The figure of docs/results/comparison.md: accuracy of every method with intervals over seeds,
greedy and pass@k beside it.

python benchmarks/methods_figure.py benchmarks/results/methods_bundled docs/img/methods_bundled.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pictures import write_pngs

COLOURS = {
    "baseline": "#000000",
    "better": "#0072B2",
    "within noise": "#888888",
    "worse": "#D55E00",
}
BESIDE = {"greedy": ("diamond-open", "#009E73"), "pass@8": ("triangle-up-open", "#CC79A7")}


def figure(numbers: dict[str, Any]) -> Any:
    import plotly.graph_objects as go

    order = sorted(numbers, key=lambda name: numbers[name]["final"][0])
    out = go.Figure()
    for verdict, colour in COLOURS.items():
        names = [name for name in order if numbers[name].get("verdict", "baseline") == verdict]
        final = [numbers[name]["final"] for name in names]
        bars = {
            "array": [100 * (high - mean) for mean, _, high in final],
            "color": colour,
            "thickness": 1.5,
        }
        marker = {"color": colour, "size": 9}
        out.add_scatter(
            x=[100 * mean for mean, *_ in final],
            y=names,
            error_x=bars,
            mode="markers",
            marker=marker,
            name=f"sampled, {verdict}",
        )
    for key, (symbol, colour) in BESIDE.items():
        names = [name for name in order if key in numbers[name]]
        marker = {"symbol": symbol, "color": colour, "size": 8}
        out.add_scatter(
            x=[100 * numbers[name][key] for name in names],
            y=names,
            mode="markers",
            marker=marker,
            name=key,
        )
    start = 100 * numbers[order[0]]["start"]
    out.add_vline(
        x=start,
        line={"color": "#999", "dash": "dot"},
        annotation_text="before, sampled",
        annotation_position="top",
    )
    legend = {"orientation": "h", "x": 0, "y": 1.05, "yanchor": "bottom"}
    out.update_layout(
        template="plotly_white",
        font={"size": 13},
        legend=legend,
        margin={"t": 95, "r": 20, "l": 110, "b": 50},
    )
    out.update_yaxes(categoryorder="array", categoryarray=order, dtick=1)
    return out.update_xaxes(title="held-out accuracy, % (bars: 95% intervals over seeds)")


if __name__ == "__main__":
    results, target = Path(sys.argv[1]), Path(sys.argv[2])
    write_pngs(
        {target: figure(json.loads((results / "summary.json").read_text())["numbers"])},
        width=1040,
        height=820,
    )
