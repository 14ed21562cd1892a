"""What a probe leaves behind: ``RUN/probes/<name>/update_N/`` with raw data, a figure and a
summary.

Parts that are there are not made again.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from counterpoise.maths.intervals import Interval, interval_of, ratios_by_cluster
from counterpoise.run.files import inside, write_json, write_table, write_text
from counterpoise.run.own import PROBE_FILE
from counterpoise.run.schema import SCHEMA_VERSION

Columns = dict[str, Any]
Rows = list[dict[str, Any]]
Frame = Any  # a pandas DataFrame; what indexing one gives is beyond the type checker
Drawing = Any  # a plotly figure
NumberDict = dict[str, "float | None"]  # mean, low, high of a number; None where not defined
Report = Callable[[str, int, int], None]  # of what, how many are finished, of how many
Item = TypeVar("Item")
LEAST_CLUSTERS = 3  # a number that rests on fewer prompts has no interval
STRIDE = 1_000_000  # above any number of prompts in a batch


class Output:
    """The folder of one probe at one batch."""

    def __init__(
        self,
        run_dir: Path,
        name: str,
        batch_number: int,
        settings: dict[str, Any],
        *,
        fresh: bool = False,
        report: Report | None = None,
    ) -> None:
        self.report = report
        self.folder = inside(run_dir, "probes", name, f"batch_{batch_number:06d}")
        self.facts = {
            "schema_version": SCHEMA_VERSION,
            "probe": name,
            "batch": batch_number,
            "settings": settings,
        }
        for file in self.folder.iterdir() if fresh and self.folder.is_dir() else ():
            if PROBE_FILE.fullmatch(file.name):
                file.unlink()
        started = self.folder / "started.json"
        if started.is_file() and json.loads(started.read_text()) != json.loads(
            json.dumps(self.facts)
        ):
            raise ValueError(
                f"{self.folder}: begun with other settings or by another version"
                f" ({json.dumps(json.loads(started.read_text())['settings'])}). Take the same ones"
                " to go on, or --fresh, which drops what is there."
            )
        if not started.is_file():
            write_json(started, self.facts)

    def table(self, name: str, make: Callable[[], Rows | Columns]) -> Path:
        """``<name>.parquet``, made and written if it is not there."""
        path = self.folder / f"{name}.parquet"
        if not path.is_file():
            data = make()
            write_table(
                path,
                (
                    data
                    if isinstance(data, dict)
                    else {key: [row[key] for row in data] for key in (data or [{}])[0]}
                ),
            )
        return path

    def track(self, items: Sequence[Item], what: str) -> Iterator[Item]:
        """The items one by one; ``report`` hears before each how many are finished, so that a long
        probe tells how far it is and prints nothing itself.
        """
        for num, item in enumerate(items):
            if self.report:
                self.report(what, num, len(items))
            yield item
        if self.report:
            self.report(what, len(items), len(items))

    def tables(self) -> dict[str, Frame]:
        """Everything that was written, by name."""
        return {path.stem: read(path) for path in sorted(self.folder.glob("*.parquet"))}


def write_summary(
    folder: Path, facts: dict[str, Any], numbers: dict[str, Any], draw: Callable[[], Drawing]
) -> dict[str, Any]:
    """``summary.json`` and ``figure.html`` (where plotly is installed); returns the summary with
    the folder it is in.
    """
    summary = {**facts, "schema_version": SCHEMA_VERSION, "numbers": numbers}
    write_json(folder / "summary.json", summary)
    if importlib.util.find_spec("plotly") is None:
        return {
            **summary,
            "folder": str(folder),
            "no_figure": "plotly is not installed: pip install 'counterpoise[report]'",
        }
    write_text(folder / "figure.html", dress(draw()).to_html(include_plotlyjs=True, full_html=True))
    return {**summary, "folder": str(folder)}


def dress(figure: Drawing) -> Drawing:
    """The common looks: a legend in one line under the title, exponents as powers of ten."""
    height = figure.layout.height  # a tall figure's legend is as near to it as a short one's
    above = 0.1 if height is None else 32 / (height - 205)
    legend = {"orientation": "h", "x": 0, "y": 1 + above, "yanchor": "bottom"}
    figure.update_layout(
        template="plotly_white",
        font={"size": 13},
        legend=legend,
        margin={"t": 125, "r": 20},
        title={"y": 0.97},
    )
    return figure.update_yaxes(exponentformat="power")


def pooled_tables(folders: list[Path]) -> dict[str, Frame]:
    """Tables of several batches as one each; groups and pairs of different batches get different
    numbers.
    """
    names = [path.stem for path in sorted(folders[0].glob("*.parquet"))]
    return {
        name: join_frames([_shift(read(f / f"{name}.parquet"), k) for k, f in enumerate(folders)])
        for name in names
    }


def read(path: Path) -> Frame:
    import pandas as pd

    return pd.read_parquet(path)


def join_frames(frames: list[Frame]) -> Frame:
    """Frames one after another, rows numbered anew."""
    import pandas as pd

    return pd.concat(frames, ignore_index=True)


def _shift(frame: Frame, k: int) -> Frame:
    out = frame.copy()
    for name in ("group", "pair"):
        if name in frame:  # negative numbers are no groups
            out[name] = frame[name].where(frame[name] < 0, frame[name] + k * STRIDE)
    return out


def columns_of(path: Path, names: tuple[str, ...]) -> Columns:
    """Columns of a ledger table as lists; a missing one is an error that names it."""
    from counterpoise.run.parquet import require_columns

    advice = "Train with the ledger on (ledger.every) to write it."
    return require_columns(path, names, advice).to_pydict()


def means(
    value: ArrayLike, sets: Mapping[str, ArrayLike], cluster: ArrayLike
) -> dict[str, NumberDict]:
    """Mean of a column over named sets of rows, with intervals; an empty set is left out."""
    masks = {name: np.asarray(mask, float) for name, mask in sets.items() if np.any(mask)}
    if not masks:
        return {}
    flat = np.nan_to_num(np.asarray(value, float))
    ratio_BK = ratios([flat * m for m in masks.values()], list(masks.values()), cluster)
    return {name: number_dict(ratio_BK[:, k]) for k, name in enumerate(masks)}


def mean_difference(
    value: ArrayLike, first: ArrayLike, second: ArrayLike, cluster: ArrayLike
) -> NumberDict:
    """Mean over the first set minus mean over the second, clusters drawn jointly."""
    flat = np.nan_to_num(np.asarray(value, float))
    masks = [np.asarray(first, float), np.asarray(second, float)]
    ratio_BK = ratios([flat * m for m in masks], masks, cluster)
    return number_dict(ratio_BK[:, 0] - ratio_BK[:, 1])


def ratios(
    values: Sequence[ArrayLike], weights: Sequence[ArrayLike], cluster: ArrayLike
) -> np.ndarray:
    """Ratios of sums with draws over clusters (``ratios_by_cluster``)."""
    return ratios_by_cluster(values, weights, cluster, least=LEAST_CLUSTERS)


def number_dict(value_B: np.ndarray) -> NumberDict:
    """The estimate and its 95% interval, six digits, for a summary; None where it is not defined.

    >>> number_dict(np.array([0.5, 0.5, 0.5]))
    {'mean': 0.5, 'low': 0.5, 'high': 0.5}
    """
    return interval_dict(interval_of(value_B))


def interval_dict(interval: Interval) -> NumberDict:
    """An interval for a summary, six digits; None where it is not defined."""
    return {
        name: float(f"{value:.6g}") if np.isfinite(value) else None
        for name, value in interval._asdict().items()
    }


def error_bars(intervals: Sequence[NumberDict]) -> dict[str, object]:
    """Plotly's error bars of some intervals; NaN, which draws no bar, where there is no interval.

    >>> bars = error_bars([{"mean": 2.0, "low": 1.0, "high": 2.5}, {"mean": 3.0, "high": None}])
    >>> bars["array"].tolist()
    [0.5, nan]
    """
    # arrays and not lists: those reach the page as null, which plotly takes for a bar of length 0
    mean, up, down = (
        np.array([one.get(side) for one in intervals], float) for side in ("mean", "high", "low")
    )
    bars = {"array": np.abs(up - mean), "arrayminus": np.abs(down - mean)}
    return {"type": "data", "symmetric": False, **bars}
