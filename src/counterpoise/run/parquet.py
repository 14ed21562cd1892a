"""Tables of a run folder as Arrow, under the names of this version. No torch, no pandas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from counterpoise.run.schema import RENAMED_COLUMNS, RENAMED_TOKEN_COLUMNS, TABLE_VERSION

BROKEN = (pa.ArrowException, OSError, ValueError)  # what reading a damaged file raises


def table_version(schema: pa.Schema) -> str | None:
    """The schema version that a table carries."""
    version = (schema.metadata or {}).get(TABLE_VERSION)
    return None if version is None else version.decode(errors="replace")


def current_names(schema: pa.Schema) -> dict[str, str]:
    """Column name in the file -> name now; they differ in tables of version 1."""
    renamed: Mapping[str, str] = {}
    if table_version(schema) == "1":
        renamed = RENAMED_TOKEN_COLUMNS if "position" in schema.names else RENAMED_COLUMNS
    names: list[str] = schema.names
    return {name: renamed.get(name, name) for name in names}


def read_columns(
    file: Path, columns: Sequence[str] | None, equal: Mapping[str, int] | None = None
) -> pa.Table:
    """The columns that are there, filtered by equality; row groups that cannot match are
    skipped.
    """
    equal = equal or {}
    parquet = pq.ParquetFile(file)
    names = current_names(parquet.schema_arrow)
    in_file = {now: name for name, now in names.items()}
    wanted = [n for n, now in names.items() if columns is None or now in columns or now in equal]
    stored = {in_file[now]: value for now, value in equal.items() if now in in_file}
    groups = [g for g in range(parquet.num_row_groups) if _may_match(parquet, g, stored)]
    table = parquet.read_row_groups(groups, columns=wanted)
    table = table.rename_columns([names[name] for name in table.column_names])
    for now, value in equal.items():
        if now in in_file:
            table = table.filter(pc.field(now) == value)
    return table.select([n for n in table.column_names if columns is None or n in columns])


def require_columns(file: Path, names: Sequence[str], advice: str) -> pa.Table:
    """These columns; a damaged file or a missing column is an error, the latter with ``advice``."""
    try:
        schema = pq.read_schema(file)
        for name in names:
            if name not in current_names(schema).values():
                raise KeyError(name)
        return read_columns(file, names)
    except KeyError as missing:
        raise ValueError(f"{file}: no column {missing}. {advice}") from None
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"{file} is not a parquet file ({error}). It is cut off or was replaced: choose another"
            " batch."
        ) from None


def _may_match(parquet: pq.ParquetFile, row_group: int, equal: Mapping[str, int]) -> bool:
    meta = parquet.metadata.row_group(row_group)
    by_path = {
        meta.column(c).path_in_schema: meta.column(c).statistics for c in range(meta.num_columns)
    }
    for name, value in equal.items():
        stats = by_path.get(name)
        if stats is not None and stats.has_min_max and not stats.min <= value <= stats.max:
            return False
    return True
