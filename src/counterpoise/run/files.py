"""Files of a run folder: atomic (a reader sees the whole of a file or none of it), with the schema
version in every table.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from counterpoise.run.schema import SCHEMA_VERSION


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
    write_atomically(path, lambda temporary: _write_utf8(temporary, text))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


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


def _write_utf8(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def append_json(path: Path, row: dict[str, Any]) -> None:
    """One object a line, flushed to disk; a number that is not finite becomes null."""
    clean = {
        key: None if isinstance(value, float) and value - value != 0 else value
        for key, value in row.items()
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(clean, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a jsonl file; a last line cut off by a crash is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def batch_file(run_dir: Path, folder: str, batch_number: int, suffix: str) -> Path:
    return run_dir / folder / f"batch_{batch_number:06d}{suffix}"


def batch_of(path: Path) -> int:
    """The batch a file or checkpoint belongs to."""
    return int(path.name.split(".")[0].removeprefix("batch_"))


def write_table(path: Path, columns: dict[str, Any]) -> None:
    """A parquet file from columns, with the schema version in its metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(columns)
    table = table.replace_schema_metadata(
        {**(table.schema.metadata or {}), b"counterpoise_schema": str(SCHEMA_VERSION).encode()}
    )
    write_atomically(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))
