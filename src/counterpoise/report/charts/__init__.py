"""The report's charts in a notebook: ``counterpoise.plot.accuracy("runs/demo")``, a plotly figure.

Each takes a run folder, a ``load_run`` table, or a list of them; runs that differ by the seed alone
become one line with an interval::

    cp.plot.accuracy(["runs/grpo-0", "runs/grpo-1", "runs/delta-0"])
    cp.plot.flips("runs/demo")
    cp.plot.weight("runs/demo", batch=50)

``index`` lists the charts, ``draw`` makes them from runs, ``style`` gives them one look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from counterpoise.report.charts.index import CHARTS
from counterpoise.report.runs import group_runs
from counterpoise.run.read import RunFolder, open_run
from counterpoise.run.tables import Run

if TYPE_CHECKING:
    import plotly.graph_objects as go

Source = str | Path | Run | RunFolder


def chart(name: str, runs: Source | Sequence[Source], batch: int | None = None) -> go.Figure:
    """A chart by name.

    Args:
        name: one of ``names()``.
        runs: a run folder, a loaded run, or several.
        batch: for charts of tokens, which batch; the last one with a ledger by default.
    """
    asked = {chart.name: chart for chart in CHARTS}.get(name)
    if asked is None:
        raise ValueError(f"plot: unknown chart {name!r}. Known: {', '.join(names())}.")
    several = [runs] if isinstance(runs, (str, Path, Run, RunFolder)) else runs
    drawing = asked.draw(group_runs([_folder(run) for run in several]), batch)
    if drawing is None:
        raise ValueError(
            f"plot.{name}: these runs hold no data for {asked.title!r}. {asked.definition}"
        )
    return drawing.figure.update_layout(
        title={"text": asked.title, "x": 0},
        showlegend=True,
        margin={"t": 48},
        height=360,
        template="plotly_white",
    )


def names() -> list[str]:
    """Names of the charts.

    >>> names()[:3]
    ['accuracy', 'reward', 'entropy']
    """
    return [chart.name for chart in CHARTS]


def _folder(run: Source) -> RunFolder:
    if isinstance(run, Run):
        return run.folder
    return run if isinstance(run, RunFolder) else open_run(run)


def __getattr__(name: str) -> Callable[..., go.Figure]:
    asked = next((chart for chart in CHARTS if chart.name == name), None)
    if asked is None:
        raise AttributeError(
            f"counterpoise.plot has no chart {name!r}. Known: {', '.join(names())}."
        )

    def draw(runs: Source | Sequence[Source], batch: int | None = None) -> go.Figure:
        return chart(name, runs, batch)

    draw.__name__ = name
    draw.__doc__ = f"{asked.title}: {asked.help} {asked.definition}"
    return draw


def __dir__() -> list[str]:
    return ["chart", "names", *names()]
