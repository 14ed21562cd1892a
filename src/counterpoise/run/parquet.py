"""Tables of a run folder as Arrow, under the names of this version. No torch, no pandas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from counterpoise.run.schema import (
    LEFT_OUT_COLUMNS,
    RENAMED_COLUMNS,
    RENAMED_LEDGER_COLUMNS,
    RENAMED_TOKEN_COLUMNS,
    TABLE_VERSION,
)

BROKEN = (pa.ArrowException, OSError, ValueError)  # what reading a damaged file raises

# what the columns hold that are read back as numbers
FITS: dict[str, Callable[[pa.DataType], bool]] = {
    "integers": pa.types.is_integer,
    "numbers": lambda kind: pa.types.is_floating(kind) or pa.types.is_integer(kind),
    "booleans": pa.types.is_boolean,
    "texts": lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind),
}
KINDS = {
    "group": "integers",
    "rollout": "integers",
    "reward": "numbers",
    "success": "booleans",
    "advantage": "numbers",
    "prompt_id": "texts",
    "prompt": "texts",
    "answer": "texts",
    "text": "texts",
    "stop_reason": "texts",
    "prompt_ids": "list of integers",
    "token_ids": "list of integers",
    "loss_mask": "list of booleans",
    "sampler_logp": "list of numbers",
    "entropy": "list of numbers",
    "turn": "list of integers",
    "turn_reward": "list of numbers",
    "turn_score": "list of numbers",
    "turn_advantage": "list of numbers",
    "turn_state": "list of texts",
    "turn_key": "list of integers",
    "turn_action": "list of texts",
    "turn_reply": "list of texts",
    "end_reason": "texts",
    "failure": "texts",
    "feedback": "texts",
}


def table_version(schema: pa.Schema) -> str | None:
    """The schema version that a table carries."""
    version = (schema.metadata or {}).get(TABLE_VERSION)
    return None if version is None else version.decode(errors="replace")


def current_names(schema: pa.Schema) -> dict[str, str]:
    """Column name in the file -> name now; they differ in tables of earlier versions, of which some
    columns are not read any more.
    """
    names: list[str] = schema.names
    version, is_ledger = table_version(schema), "position" in names
    if version not in ("1", "2"):
        return {name: name for name in names}
    renamed: Mapping[str, str] = RENAMED_LEDGER_COLUMNS if is_ledger else {}
    if version == "1":
        renamed = RENAMED_TOKEN_COLUMNS if is_ledger else RENAMED_COLUMNS
    left_out = LEFT_OUT_COLUMNS if is_ledger else ()
    return {name: renamed.get(name, name) for name in names if name not in left_out}


def read_columns(
    file: Path, columns: Sequence[str] | None, equal: Mapping[str, int] | None = None
) -> pa.Table:
    """The columns that are there, filtered by equality; row groups that cannot match are
    skipped.
    """
    equal = equal or {}
    parquet = pq.ParquetFile(file)
    check_distinct(parquet.schema_arrow.names)
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


def check_distinct(names: Sequence[str]) -> None:
    """No column stands twice: which of them would be meant?"""
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise pa.ArrowInvalid(f"column {twice[0]!r} stands twice")


def column_names(file: Path) -> list[str]:
    """Names of the columns, as they are called now; none in a file that cannot be read."""
    try:
        return list(current_names(pq.read_schema(file)).values())
    except BROKEN:
        return []


def require_columns(file: Path, names: Sequence[str], advice: str) -> pa.Table:
    """These columns, of the right kind and without gaps; anything else is an error, a column's with
    ``advice``.
    """
    try:
        schema = pq.read_schema(file)
        for name in names:
            if name not in current_names(schema).values():
                raise KeyError(name)
        table = read_columns(file, names)
    except KeyError as missing:
        raise ValueError(f"{file}: no column {missing}. {advice}") from None
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{file} is not a parquet file ({' '.join(str(error).split())}). It is cut off or was"
            " replaced: choose another batch."
        ) from None
    for name in names:
        check_kind(f"{file}: column {name!r}", table[name], KINDS.get(name), advice)
    return table


def check_kind(where: str, column: pa.ChunkedArray, kind: str | None, advice: str) -> None:
    """Raise unless the column holds what its name promises; nothing is promised of other names."""
    if kind is None:
        return
    is_list, wants_list = pa.types.is_list(column.type), kind.startswith("list of ")
    parts = [chunk.flatten() if is_list else chunk for chunk in column.chunks]
    has_gaps = column.null_count > 0 or any(part.null_count for part in parts)
    inner = column.type.value_type if is_list else column.type
    if is_list != wants_list or not FITS[kind.split()[-1]](inner) or has_gaps:
        got = f"{column.type}{' with gaps' if has_gaps else ''}"
        raise ValueError(f"{where} holds {got}, expected {kind}. {advice}")


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
