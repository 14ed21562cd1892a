"""Files that are whole or absent: written under another name, synced, renamed.

Knows the run folder's file names and where a file keeps its schema version, nothing else of it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterpoise.run.schema import SCHEMA_VERSION, TABLE_VERSION

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

Columns = Mapping[str, "Sequence[Any] | np.ndarray | pa.Array"]
Json = Mapping[str, Any] | Sequence[Any] | str | float | None


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """``write`` fills a temporary name beside ``path``; fsync, then rename.

    On failure the temporary is removed and the old file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
        sync_file(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """A UTF-8 file."""
    write_atomically(path, lambda temporary: _write_utf8(temporary, text))


def write_json(path: Path, value: Json) -> None:
    """A JSON file; a number that is not finite is an error."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_table(path: Path, columns: Columns) -> None:
    """A parquet file from columns, with the schema version in its metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(dict(columns))
    table = table.replace_schema_metadata(
        {**(table.schema.metadata or {}), TABLE_VERSION: str(SCHEMA_VERSION).encode()}
    )
    write_atomically(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))


def append_json(path: Path, row: Mapping[str, Any]) -> None:
    """One object per line with the schema version, flushed to disk; a number that is not finite
    becomes null.
    """
    with path.open("a", encoding="utf-8") as file:
        file.write(json_line(row))
        file.flush()
        os.fsync(file.fileno())


def json_line(row: Mapping[str, Any]) -> str:
    """A row of a jsonl file."""
    clean = {
        key: None if isinstance(value, float) and value - value != 0 else value
        for key, value in row.items()
    }
    return json.dumps({"schema_version": SCHEMA_VERSION, **clean}, allow_nan=False) + "\n"


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """``fill`` writes a temporary folder beside ``path``; every file is synced, then the folder
    takes its name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        fill(temporary)
        for file in sorted(temporary.rglob("*")):
            if file.is_file():
                sync_file(file)
        sync_folder(temporary)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def batch_file(run_dir: Path, folder: str, batch_number: int, suffix: str) -> Path:
    """Where a batch's file lies: ``batch_file(run, "plan", 12, ".json")``."""
    return run_dir / folder / f"batch_{batch_number:06d}{suffix}"


def batch_of(path: Path) -> int:
    """The batch a file or checkpoint belongs to."""
    return int(path.name.split(".")[0].rpartition("_")[2])


def _write_utf8(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
