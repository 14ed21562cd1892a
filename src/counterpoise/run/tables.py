"""A run folder as tables, for notebooks. pandas and pyarrow load with the first table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from counterpoise.catalogue.label import label
from counterpoise.run.read import RunFolder, check_batch, open_run
from counterpoise.run.schema import TABLES
from counterpoise.text import shorten, visible

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

Engine = Literal["pandas", "polars"]


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
    """A run's tables; make one with ``load_run``.

    Column descriptions are in ``counterpoise.run.schema``.

    Attributes:
        folder: the files behind the tables; ``counterpoise.plot`` takes it as well.
        engine: ``pandas`` or ``polars``.
    """

    folder: RunFolder
    engine: Engine

    def __repr__(self) -> str:
        folder = self.folder
        tables = ", ".join(f"{table} of {len(self.batches(table))}" for table in TABLES)
        lines = [
            f"Run {str(folder.path)!r}: {len(folder.metric_rows)} batches ({tables}),"
            f" {len(folder.evals)} evaluations",
            f"  method {_method(folder)}, model {self.config.get('model', 'unknown')}",
            "  .metrics .evals .rollouts(batch) .tokens(batch) .config .manifest",
            *(f"  {problem}" for problem in self.problems[:2]),
        ]
        return "\n".join(shorten(visible(line), 100) for line in lines)

    @property
    def config(self) -> dict[str, Any]:
        return self.folder.config

    @property
    def manifest(self) -> dict[str, Any]:
        return self.folder.manifest

    @property
    def problems(self) -> list[str]:
        """What is missing or broken, as far as it was read."""
        return self.folder.problems

    @property
    def metrics(self) -> Any:
        """One row per batch: every number of ``metrics.jsonl``, and of ``timing.jsonl`` where it is
        there.
        """
        metrics, timing = self.folder.metrics, self.folder.timing
        both = metrics if timing.shape[1] < 2 else metrics.merge(timing, on="batch", how="left")
        return self._from_pandas(both)

    @property
    def evals(self) -> Any:
        """One row per evaluation; ``reward_PK`` holds the rewards, one list per prompt."""
        import pandas as pd

        return self._from_pandas(pd.DataFrame(self.folder.evals))

    def batches(self, table: str = "rollouts") -> list[int]:
        """Batches that have a file in ``rollouts`` or ``tokens``."""
        return self.folder.batches(table)

    def rollouts(self, batch: int | None = None, columns: Sequence[str] | None = None) -> Any:
        """One row per rollout, of one batch or of all."""
        return self._table("rollouts", batch, columns)

    def tokens(self, batch: int | None = None, columns: Sequence[str] | None = None) -> Any:
        """One row per response token (the ledger), of one batch or of all."""
        return self._table("tokens", batch, columns)

    def _table(self, folder: str, batch: int | None, columns: Sequence[str] | None) -> Any:
        import pyarrow as pa

        batches = self.batches(folder)
        check_batch(self.folder.path, batch, [folder])
        tables = [
            self.folder.table(folder, at, columns) for at in (batches if batch is None else [batch])
        ]
        readable = [table for table in tables if table is not None]
        if not readable:
            raise ValueError(
                f"{self.folder.name!r}: no readable {folder} tables. {' '.join(self.problems)}"
            )
        return self._from_arrow(pa.concat_tables(readable, promote_options="permissive"))

    def _from_pandas(self, frame: pd.DataFrame) -> Any:
        if self.engine == "pandas":
            return frame
        import pyarrow as pa

        return self._from_arrow(pa.Table.from_pandas(frame, preserve_index=False))

    def _from_arrow(self, table: pa.Table) -> Any:
        return table.to_pandas() if self.engine == "pandas" else _polars().from_arrow(table)


def _method(folder: RunFolder) -> str:
    method = folder.config.get("method", folder.manifest.get("method"))
    return label(method) if isinstance(method, (dict, str)) else "unknown"


def load_run(path: str | Path, engine: Engine = "pandas") -> Run:
    """Tables of a run folder: ``metrics``, ``evals``, ``rollouts(batch)``, ``tokens(batch)``.

    Args:
        path: the run folder.
        engine: ``pandas``, or ``polars`` where it is installed.

    Example::

        run = cp.load_run("runs/demo")
        run.metrics[["batch", "reward/mean", "eval/accuracy"]]
        run.tokens(batch=50).groupby("category")["delta"].mean()
    """
    if engine not in ("pandas", "polars"):
        raise ValueError(f"load_run: engine must be 'pandas' or 'polars', got {engine!r}.")
    if engine == "polars":
        _polars()
    return Run(open_run(path), engine)


def _polars() -> Any:
    try:
        import polars  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            "load_run: polars is not installed. pip install polars, or engine='pandas'."
        ) from None
    return polars
