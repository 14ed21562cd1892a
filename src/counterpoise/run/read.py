"""The one reader of run folders: what is there is shown, what is missing or broken is named,
nothing outside the folder is opened.

Opens without torch, pandas and pyarrow; each comes with the first thing that needs it. Folders of
version 1 read as if they were written now: files are found by ``batch_files``, names translated by
``run.parquet`` (tables) and ``_current`` (the rest) from the lists in ``run.schema``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from counterpoise.run.files import batch_of
from counterpoise.run.find import check_run
from counterpoise.run.schema import (
    RENAMED_CONFIG_KEYS,
    RENAMED_KEYS,
    SAME_FILES,
    SCHEMA_VERSION,
    TABLES,
)
from counterpoise.run.solved import SUCCESS_COLUMN, solved
from counterpoise.stage import SUCCESS, success_of
from counterpoise.text import load_yaml, spans, visible

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


T = TypeVar("T")
Row = dict[str, Any]
BATCH_FILE = re.compile(r"(?:batch|step)_\d+\.(?:parquet|json)")
CHECKPOINT = re.compile(r"(?:batch|step)_\d+")
MAX_CONFIG_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A run as its files tell it.

    ``problems`` grows while files are read: one line for each thing that is missing or broken.
    """

    path: Path
    config: Row
    manifest: Row
    metric_rows: list[Row]
    timing_rows: list[Row]
    evals: list[Row]
    problems: list[str]
    kept: dict[Hashable, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        """What the run called itself (inside TRL), else the folder's name."""
        name = self.manifest.get("name")
        return name if isinstance(name, str) and name else self.path.name

    @property
    def success(self) -> float:
        """A reward of at least this much is a success (``task.success`` of the recipe)."""
        task = self.config.get("task")
        if not isinstance(task, dict) or not isinstance(task.get("success", 0), (int, float)):
            return SUCCESS
        given = success_of(task)
        return SUCCESS if given is None else given

    def solved(self, rollouts: Mapping[str, Any]) -> list[bool]:
        """Which rollouts count as solved, from their columns ``reward`` and, where a named reward
        decides, ``success``.
        """
        settings = self.config.get("trl")
        named = settings.get("success_reward") if isinstance(settings, dict) else None
        if named is not None and SUCCESS_COLUMN not in rollouts:
            self.note(
                f"success_reward: {str(named)!r} decided what counts as solved, and rollouts of an"
                f" earlier version have no column {SUCCESS_COLUMN!r}: a sum of rewards >="
                f" {self.success:g} is counted."
            )
        return solved(rollouts, self.success)

    @functools.cached_property
    def metrics(self) -> pd.DataFrame:
        """``metrics.jsonl``: one row per batch, finite numbers only."""
        return _numbers(self.metric_rows)

    @functools.cached_property
    def timing(self) -> pd.DataFrame:
        """``timing.jsonl``: one row per batch, finite numbers only."""
        return _numbers(self.timing_rows)

    def batches(self, folder: str) -> list[int]:
        """Batches that have a file in ``rollouts``, ``tokens`` or ``plan``."""
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
        from counterpoise.run import parquet

        file = batch_files(self.path, folder).get(batch)
        try:
            return None if file is None else parquet.read_columns(file, columns, equal)
        except parquet.BROKEN as error:
            self.note(f"{folder}/{file.name if file else ''} {_left_out(error)}")
            return None

    def types(self, folder: str, batch: int) -> dict[str, pa.DataType]:
        """Columns of a batch and their types; empty if the file is missing or broken.

        Notes a schema from the future.
        """
        from counterpoise.run import parquet

        file = batch_files(self.path, folder).get(batch)
        if file is None:
            return {}
        try:
            schema = parquet.pq.read_schema(file)
        except parquet.BROKEN as error:
            self.note(f"{folder}/{file.name} {_left_out(error)}")
            return {}
        self.note_version(f"{folder}/{file.name}", parquet.table_version(schema))
        names = parquet.current_names(schema)
        first = dict(zip(reversed(schema.names), reversed(schema.types)))  # a name may come twice
        return {now: first[name] for name, now in names.items()}

    def columns(self, folder: str, batch: int) -> list[str]:
        """Names of a batch's columns."""
        return list(self.types(folder, batch))

    def plan(self, batch: int) -> Row | None:
        """The plan of a batch as the trainer wrote it; None if it does not list rows."""
        file = batch_files(self.path, "plan").get(batch)
        plan = _read_json(file, self.problems) if file else None
        if file is None or plan is None:
            return None
        if not isinstance(plan, dict) or not _is_plan(_current(plan).get("rows")):
            self.note(f"plan/{file.name} lists no rows of updates; it is left out.")
            return None
        return _current(plan)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
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

    def note_version(self, where: str, version: object) -> None:
        """A problem if this program does not know the schema ``version``."""
        if version is None:
            self.note(f"{where} carries no schema version; it is read as version {SCHEMA_VERSION}.")
        elif str(version) not in ("1", *map(str, SAME_FILES)):
            self.note(
                f"{where} has schema version {version}, this program knows {SCHEMA_VERSION}: what"
                " it knows is shown."
            )


def open_run(path: str | Path) -> RunFolder:
    """Read the small files of a run; one that is not there is an error with the nearest name."""
    path = Path(path)
    check_run(path)
    problems: list[str] = []
    manifest = _mapping(path, "manifest.json", problems)
    config = _mapping(path, "config.yaml", problems, needed="imported_from" not in manifest)
    run = RunFolder(
        path=path.resolve(),
        config=_current_config(config) if manifest.get("schema_version") == 1 else config,
        manifest=manifest,
        metric_rows=_batch_rows(path, "metrics.jsonl", problems),
        timing_rows=_batch_rows(path, "timing.jsonl", problems, needed=False),
        evals=_batch_rows(path, "evals.jsonl", problems, needed=False),
        problems=problems,
    )
    if manifest:
        run.note_version("manifest.json", manifest.get("schema_version"))
    return run


def check_current(run_dir: Path) -> None:
    """An error that says what to do, for a run of version 1 that is to be resumed or probed."""
    if read_mapping(run_dir / "manifest.json").get("schema_version") == 1:
        raise ValueError(
            f"{run_dir} was written in schema version 1: report, view, compare, audit and load_run"
            " read it. To resume, probe or replay it, train it again, or check out the commit that"
            " its manifest.json names."
        )


def batch_files(run_dir: Path, folder: str) -> dict[int, Path]:
    """batch -> file, in order, for files that truly lie in the run folder (a link that leads out of
    it is not followed).
    """
    root = run_dir.resolve()
    files = sorted((root / folder).glob("*_*"), key=lambda file: file.name, reverse=True)
    named = [file for file in files if BATCH_FILE.fullmatch(file.name) and is_inside(root, file)]
    return {batch_of(file): file for file in sorted(named, key=batch_of)}


def check_batch(run_dir: Path, batch: int | None, folders: Sequence[str] = TABLES) -> None:
    """Raise unless a batch, if one is asked for, has a file in one of the folders; the message says
    which have.
    """
    known = {at for folder in folders for at in batch_files(run_dir, folder)}
    if batch is not None and batch not in known:
        raise ValueError(
            f"{run_dir}: no {' or '.join(folders)} of batch {batch}. There are:"
            f" {spans(sorted(known)) or 'none'}."
        )


def checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    paths = (run_dir / "checkpoints").glob("*_*")
    named = [path for path in paths if CHECKPOINT.fullmatch(path.name)]
    return sorted((path for path in named if (path / "state.json").is_file()), key=batch_of)


def is_inside(root: Path, file: Path) -> bool:
    """Whether ``file``, links followed, is a plain file below ``root``."""
    try:
        real = file.resolve()
    except (OSError, RuntimeError):  # a link to itself
        return False
    return real.is_relative_to(root.resolve()) and real.is_file()


def read_jsonl(path: Path, problems: list[str] | None = None) -> list[Row]:
    """Objects of a jsonl file, under the names of this version; none if it is not there.

    A last line without its end is a run being written; any other broken line is a problem.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    lines = text.split("\n")
    rows, broken = [], []
    for at, line in enumerate(lines):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            row = line
        if isinstance(row, dict):
            rows.append(_current(row))
        elif row is not None and at < len(lines) - 1:
            broken.append(at + 1)
    if broken and problems is not None:
        problems.append(
            f"{path.name}: {len(broken)} broken line(s), first at line {broken[0]}; the others are"
            " shown."
        )
    return rows


def read_mapping(file: Path) -> Row:
    """A mapping of a small JSON or YAML file; empty if it is not there or cannot be read."""
    return _mapping(file.parent, file.name, [])


def _current(row: Mapping[str, Any]) -> Row:
    """A row or a plan without its version, keys of earlier versions under their names of now."""
    version = row.get("schema_version", 1)
    renamed: dict[str, str] = RENAMED_KEYS.get(version, {}) if isinstance(version, int) else {}
    return {
        renamed.get(key, key): value
        for key, value in row.items()
        if key != "schema_version" and renamed.get(key) not in row
    }


def _current_config(config: Row) -> Row:
    """A recipe of version 1 under the keys of now."""
    config = {
        key: dict(value) if isinstance(value, dict) else value for key, value in config.items()
    }
    for key, now in RENAMED_CONFIG_KEYS.items():
        *section, name = key.split(".")
        keys = config.get(section[0]) if section else config
        if isinstance(keys, dict) and name in keys:
            keys[now.split(".")[-1]] = keys.pop(name)
    return config


def _mapping(path: Path, name: str, problems: list[str], needed: bool = True) -> Row:
    file = path / name
    if not file.exists() or not is_inside(path, file):
        problems.extend([f"{name} is missing."] if needed else [])
        return {}
    value = _read_yaml(file, problems) if name.endswith(".yaml") else _read_json(file, problems)
    if value is not None and not isinstance(value, dict):
        problems.append(f"{name} is not a mapping; it is left out.")
    return value if isinstance(value, dict) else {}


def _read_json(file: Path, problems: list[str]) -> object:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{file.name} {_left_out(error)}")
        return None


def _read_yaml(file: Path, problems: list[str]) -> object:
    if file.stat().st_size > MAX_CONFIG_BYTES:
        problems.append(f"{file.name} is larger than {MAX_CONFIG_BYTES} bytes; it is left out.")
        return None
    try:
        return load_yaml(file.read_bytes(), file.name)
    except (OSError, ValueError) as error:
        problems.append(f"{file.name} {_left_out(error)}")
        return None


def _batch_rows(path: Path, name: str, problems: list[str], needed: bool = True) -> list[Row]:
    """Rows of a jsonl file of the run that tell their batch."""
    file = path / name
    if not file.exists() or not is_inside(path, file):
        problems.extend([f"{name} is missing."] if needed else [])
        return []
    return [row for row in read_jsonl(file, problems) if type(row.get("batch")) is int]


def _numbers(rows: list[Row]) -> pd.DataFrame:
    """One row per batch, finite numbers only; the last row of a batch wins."""
    import pandas as pd

    frame = pd.DataFrame(rows)
    if frame.empty:
        return pd.DataFrame({"batch": pd.Series(dtype="int64")})
    numeric: Any = frame.apply(lambda column: pd.to_numeric(column, errors="coerce")).replace(
        [math.inf, -math.inf], math.nan
    )
    is_last = ~numeric["batch"].duplicated(keep="last")
    return numeric.loc[is_last].sort_values(by="batch").reset_index(drop=True)


def _is_plan(rows: object) -> bool:
    """At least one update, each a list of row numbers."""
    return (
        isinstance(rows, list)
        and bool(rows)
        and all(
            isinstance(part, list) and part and all(type(r) is int and 0 <= r < 2**31 for r in part)
            for part in rows
        )
    )


def _left_out(error: BaseException) -> str:
    """The end of a line about a file that cannot be read."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return f"cannot be read ({visible(first)}); it is left out."
