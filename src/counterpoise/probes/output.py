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

    def table(self, name: str, make: Callable[[], Rows]) -> pd.DataFrame:
        """``<name>.parquet``: read if it is there, else made and written."""
        path = self.folder / f"{name}.parquet"
        if not path.is_file():
            rows = make()
            write_table(path, {key: [row[key] for row in rows] for key in (rows[0] if rows else {})})
        return pd.read_parquet(path)

    def finish(self, figure: go.Figure, numbers: dict[str, Any]) -> dict[str, Any]:
        """Write the figure and the summary; returns the summary."""
        page = figure.update_layout(template="plotly_white").to_html(include_plotlyjs=True, full_html=True)
        write_text(self.folder / "figure.html", page)
        summary = {**self.facts, "folder": str(self.folder), "numbers": numbers}
        write_json(self.folder / "summary.json", {key: value for key, value in summary.items() if key != "folder"})
        return summary


def columns_of(frame: pd.DataFrame, where: str, names: tuple[str, ...]) -> pd.DataFrame:
    """The frame, if it has the columns; a missing one is an error that names it."""
    for name in names:
        if name not in frame.columns:
            raise ValueError(f"{where}: no column {name!r}. Train with the ledger on (ledger.every) to write it.")
    return frame
