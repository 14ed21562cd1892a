"""Read a run folder that somebody else wrote: what is there is shown, what is missing or broken is
named, nothing outside it is opened.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from counterpoise.run.schema import SCHEMA_VERSION
from counterpoise.text import visible

BATCH_FILE = re.compile(r"batch_(\d+)\.(?:parquet|json)")
MAX_CONFIG_BYTES = 1 << 20
TABLES = ("rollouts", "tokens")


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A run as its files tell it.

    ``problems`` grows while files are read: one line for each thing that is missing or broken.
    """

    path: Path
    config: dict[str, Any]
    manifest: dict[str, Any]
    metrics: pd.DataFrame
    timing: pd.DataFrame
    evals: list[dict[str, Any]]
    problems: list[str]
    kept: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.path.name

    def batches(self, folder: str) -> list[int]:
        """Updates that have a file in ``rollouts``, ``tokens`` or ``plan``."""
        return sorted(batch_files(self.path, folder))

    def table(
        self,
        folder: str,
        batch: int,
        columns: Sequence[str] | None = None,
        equal: dict[str, int] | None = None,
    ) -> pa.Table | None:
        """A batch's table, or those of ``columns`` that it has; ``equal`` keeps rows, e.g.
        ``{"group": 3}``. None if it cannot be read.
        """
        file = batch_files(self.path, folder).get(batch)
        if file is None:
            return None
        try:
            return read_columns(file, columns, equal)
        except (pa.ArrowException, OSError, ValueError) as error:
            self.note(
                f"{folder}/{file.name} cannot be read ({_first_line(error)}); it is left out."
            )
            return None

    def types(self, folder: str, batch: int) -> dict[str, pa.DataType]:
        """Columns of a batch and their types; empty if the file is missing or broken.

        Notes a schema from the future.
        """
        file = batch_files(self.path, folder).get(batch)
        if file is None:
            return {}
        try:
            schema = pq.read_schema(file)
        except (pa.ArrowException, OSError) as error:
            self.note(
                f"{folder}/{file.name} cannot be read ({_first_line(error)}); it is left out."
            )
            return {}
        self.note_version(
            f"{folder}/{file.name}", (schema.metadata or {}).get(b"counterpoise_schema")
        )
        return dict(zip(schema.names, schema.types))

    def columns(self, folder: str, batch: int) -> list[str]:
        """Names of a batch's columns."""
        return list(self.types(folder, batch))

    def plan(self, batch: int) -> dict[str, Any] | None:
        """The plan of a batch as the trainer wrote it."""
        file = batch_files(self.path, "plan").get(batch)
        found = _read_json(file, self.problems) if file else None
        return found if isinstance(found, dict) else None

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """``make()``, asked for once and kept: small results that several charts show."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def note(self, problem: str) -> None:
        """Remember a problem, once; names in it may come from the files, so what cannot be seen is
        made visible.
        """
        if visible(problem) not in self.problems:
            self.problems.append(visible(problem))

    def note_version(self, where: str, version: Any) -> None:
        """A problem if ``version`` is not the schema of this program."""
        text = version.decode(errors="replace") if isinstance(version, bytes) else version
        if text is None:
            self.note(f"{where} carries no schema version; it is read as version {SCHEMA_VERSION}.")
        elif str(text) != str(SCHEMA_VERSION):
            self.note(
                f"{where} has schema version {text}, this program knows {SCHEMA_VERSION}: what it"
                " knows is shown."
            )


def open_run(path: str | Path) -> RunFolder:
    """Read the small files of a run; a folder without any is a ValueError."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(
            f"no run folder at {str(path)!r}. Give the folder that holds manifest.json and"
            " metrics.jsonl."
        )
    problems: list[str] = []
    known = ("manifest.json", "metrics.jsonl", *TABLES)
    if not any((path / name).exists() for name in known):
        raise ValueError(f"{str(path)!r} holds no run: none of {', '.join(known)} is there.")
    manifest = _mapping(path, "manifest.json", problems)
    run = RunFolder(
        path=path.resolve(),
        config=_mapping(path, "config.yaml", problems, needed="imported_from" not in manifest),
        manifest=manifest,
        metrics=_numbers(path, "metrics.jsonl", problems),
        timing=_numbers(path, "timing.jsonl", problems, needed=False),
        evals=[
            row
            for row in _rows(path, "evals.jsonl", problems, needed=False)
            if type(row.get("batch")) is int
        ],
        problems=problems,
    )
    if manifest:
        run.note_version("manifest.json", manifest.get("schema_version"))
    return run


def batch_files(run_dir: Path, folder: str) -> dict[int, Path]:
    """batch -> file, for files that truly lie in the run folder (a link that leads out of it is not
    followed).
    """
    root = run_dir.resolve()
    found = {}
    for file in (root / folder).glob("batch_*"):
        match = BATCH_FILE.fullmatch(file.name)
        if match and is_inside(root, file):
            found[int(match[1])] = file
    return found


def is_inside(root: Path, file: Path) -> bool:
    """Whether ``file``, links followed, is a plain file below ``root``."""
    real = file.resolve()
    return real.is_relative_to(root.resolve()) and real.is_file()


def read_columns(
    file: Path, columns: Sequence[str] | None, equal: dict[str, int] | None = None
) -> pa.Table:
    """The columns that are there, filtered by equality; row groups that cannot match are skipped."""
    parquet = pq.ParquetFile(file)
    names = parquet.schema_arrow.names
    wanted = [name for name in names if columns is None or name in columns or name in (equal or {})]
    groups = [
        g for g in range(parquet.num_row_groups) if _may_match(parquet, g, names, equal or {})
    ]
    table = parquet.read_row_groups(groups, columns=wanted)
    for name, value in (equal or {}).items():
        if name in wanted:
            table = table.filter(pc.field(name) == value)
    return table.select([name for name in wanted if columns is None or name in columns])


def _may_match(
    parquet: pq.ParquetFile, row_group: int, names: list[str], equal: dict[str, int]
) -> bool:
    meta = parquet.metadata.row_group(row_group)
    by_path = {
        meta.column(c).path_in_schema: meta.column(c).statistics for c in range(meta.num_columns)
    }
    for name, value in equal.items():
        stats = by_path.get(name)
        if stats is not None and stats.has_min_max and not stats.min <= value <= stats.max:
            return False
    return True


def _mapping(path: Path, name: str, problems: list[str], needed: bool = True) -> dict[str, Any]:
    file = path / name
    if not file.exists() or not is_inside(path, file):
        problems.extend([f"{name} is missing."] if needed else [])
        return {}
    found = _read_yaml(file, problems) if name.endswith(".yaml") else _read_json(file, problems)
    if found is not None and not isinstance(found, dict):
        problems.append(f"{name} is not a mapping; it is left out.")
    return found if isinstance(found, dict) else {}


def _read_json(file: Path, problems: list[str]) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{file.name} cannot be read ({_first_line(error)}); it is left out.")
        return None


def _read_yaml(file: Path, problems: list[str]) -> Any:
    if file.stat().st_size > MAX_CONFIG_BYTES:
        problems.append(f"{file.name} is larger than {MAX_CONFIG_BYTES} bytes; it is left out.")
        return None
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        problems.append(f"{file.name} cannot be read ({_first_line(error)}); it is left out.")
        return None


def _rows(path: Path, name: str, problems: list[str], needed: bool = True) -> list[dict[str, Any]]:
    """Objects of a jsonl file.

    A last line without its end is a run being written; any other broken line is a problem.
    """
    file = path / name
    if not file.exists() or not is_inside(path, file):
        problems.extend([f"{name} is missing."] if needed else [])
        return []
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    rows, broken = [], []
    for at, line in enumerate(lines):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            row = line
        if isinstance(row, dict):
            rows.append(row)
        elif row is not None and at < len(lines) - 1:
            broken.append(at + 1)
    if broken:
        problems.append(
            f"{name}: {len(broken)} broken line(s), first at line {broken[0]}; the others are"
            " shown."
        )
    return rows


def _numbers(path: Path, name: str, problems: list[str], needed: bool = True) -> pd.DataFrame:
    """One row a batch, finite numbers only; the last row of a batch wins."""
    rows = [row for row in _rows(path, name, problems, needed) if type(row.get("batch")) is int]
    frame = pd.DataFrame(rows)
    if frame.empty:
        return pd.DataFrame({"batch": pd.Series(dtype="int64")})
    numeric: Any = frame.apply(lambda column: pd.to_numeric(column, errors="coerce")).replace(
        [math.inf, -math.inf], math.nan
    )
    is_last = ~numeric["batch"].duplicated(keep="last")
    return numeric.loc[is_last].sort_values(by="batch").reset_index(drop=True)


def _first_line(error: BaseException) -> str:
    return visible((str(error).strip().splitlines() or [type(error).__name__])[0][:200])
