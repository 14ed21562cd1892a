"""What a probe leaves behind: ``RUN/probes/<name>/step_N/`` with raw data, a figure and a summary. Parts that are there are not made again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from counterpoise.files import write_json, write_table, write_text
from counterpoise.schema import SCHEMA_VERSION

Rows = list[dict[str, Any]]
Frame = Any  # a pandas DataFrame; what indexing one gives is beyond the type checker
STRIDE = 1_000_000  # above any number of prompts in a batch


class Output:
    """The folder of one probe at one step."""

    def __init__(self, run_dir: Path, name: str, step: int, settings: dict[str, Any], *, fresh: bool = False) -> None:
        self.folder = run_dir / "probes" / name / f"step_{step:06d}"
        self.facts = {"schema_version": SCHEMA_VERSION, "probe": name, "step": step, "settings": settings}
        if fresh:
            shutil.rmtree(self.folder, ignore_errors=True)
        started = self.folder / "started.json"
        if started.is_file() and json.loads(started.read_text()) != json.loads(json.dumps(self.facts)):
            raise ValueError(
                f"{self.folder}: begun with other settings ({started.read_text().strip()}). Take the same ones to go on, or --fresh."
            )
        if not started.is_file():
            write_json(started, self.facts)

    def table(self, name: str, make: Callable[[], Rows]) -> Frame:
        """``<name>.parquet``: read if it is there, else made and written."""
        path = self.folder / f"{name}.parquet"
        if not path.is_file():
            rows = make()
            write_table(path, {key: [row[key] for row in rows] for key in (rows[0] if rows else {})})
        return read(path)

    def finish(self, figure: go.Figure, numbers: dict[str, Any]) -> dict[str, Any]:
        """Write the figure and the summary; returns the summary."""
        return write_summary(self.folder, figure, self.facts, numbers)


def write_summary(folder: Path, figure: go.Figure, facts: dict[str, Any], numbers: dict[str, Any]) -> dict[str, Any]:
    """``figure.html`` and ``summary.json``; returns the summary with the folder it is in."""
    page = figure.update_layout(template="plotly_white").to_html(include_plotlyjs=True, full_html=True)
    write_text(folder / "figure.html", page)
    summary = {**facts, "schema_version": SCHEMA_VERSION, "numbers": numbers}
    write_json(folder / "summary.json", summary)
    return {**summary, "folder": str(folder)}


def pooled_tables(folders: list[Path]) -> dict[str, Frame]:
    """Tables of several steps as one each; groups and pairs of different steps get different numbers."""
    names = [path.stem for path in sorted(folders[0].glob("*.parquet"))]
    return {name: joined([_shifted(read(f / f"{name}.parquet"), k) for k, f in enumerate(folders)]) for name in names}


def read(path: Path) -> Frame:
    return pd.read_parquet(path)


def joined(frames: list[Frame]) -> Frame:
    """Frames one after another, rows numbered anew."""
    return pd.concat(frames, ignore_index=True)


def _shifted(frame: Frame, k: int) -> Frame:
    out = frame.copy()
    for name in ("group", "pair"):
        if name in frame:  # negative numbers are no groups
            out[name] = frame[name].where(frame[name] < 0, frame[name] + k * STRIDE)
    return out


def columns_of(frame: Frame, where: str, names: tuple[str, ...]) -> Frame:
    """The frame, if it has the columns; a missing one is an error that names it."""
    for name in names:
        if name not in frame.columns:
            raise ValueError(f"{where}: no column {name!r}. Train with the ledger on (ledger.every) to write it.")
    return frame
