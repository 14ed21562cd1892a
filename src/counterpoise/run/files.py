"""Files that are whole or absent: written under another name, synced, renamed.

Knows the run folder's file names and where a file keeps its schema version, nothing else of it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterpoise.errors import ConfigError
from counterpoise.run.schema import SCHEMA_VERSION, TABLE_VERSION

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

Columns = Mapping[str, "Sequence[Any] | np.ndarray | pa.Array"]
Json = Mapping[str, Any] | Sequence[Any] | str | float | None
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # Windows has none
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """``write`` fills a temporary name beside ``path``; fsync, then rename.

    The name is new and cannot be foretold, so that nothing planted is written through. On failure
    the temporary is removed and the old file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW, 0o666))
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
    becomes null. A last line that a kill cut off is ended first. A link is not followed.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | NO_FOLLOW, 0o666)
    with os.fdopen(handle, "a", encoding="utf-8") as file:
        file.write("\n" * _is_cut_off(handle) + json_line(row))
        file.flush()
        os.fsync(file.fileno())


def _is_cut_off(handle: int) -> bool:
    """Whether a file's last line lacks its end."""
    if not os.lseek(handle, 0, os.SEEK_END):
        return False
    os.lseek(handle, -1, os.SEEK_END)
    return os.read(handle, 1) != b"\n"


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
    temporary = temporary_name(path)
    try:
        temporary.mkdir()
        fill(temporary)
        for file in sorted(temporary.rglob("*")):
            if file.is_file():
                sync_file(file)
        sync_folder(temporary)
        if path.is_dir() and any(path.iterdir()):
            remove_folder(path)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder, whole at any moment for whoever looks for it by its name."""
    temporary = temporary_name(path)
    os.replace(path, temporary)
    shutil.rmtree(temporary)


def temporary_name(path: Path) -> Path:
    """A new name beside ``path`` that nobody can foretell."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def is_temporary(name: str) -> bool:
    """Whether ``temporary_name`` gave it.

    >>> is_temporary(temporary_name(Path("runs/a.json")).name), is_temporary("mine.tmp")
    (True, False)
    """
    return _TEMPORARY.fullmatch(name) is not None


def inside(run_dir: Path, *parts: str) -> Path:
    """A folder of a run to write to; one that is a link out of the run is an error."""
    path, root = run_dir.joinpath(*parts), run_dir.resolve()
    if not path.resolve().is_relative_to(root):
        raise ConfigError(
            f"{path} leads out of the run folder, to {path.resolve()}. Nothing is written or"
            " removed through a link: remove it, or choose another run folder."
        )
    return path


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
    return inside(run_dir, folder) / f"batch_{batch_number:06d}{suffix}"


def batch_of(path: Path) -> int:
    """The batch a file or checkpoint belongs to."""
    return int(path.name.split(".")[0].rpartition("_")[2])


def _write_utf8(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
