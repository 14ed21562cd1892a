"""The one writer of run folders: the trainer, the TRL host and the importers write through it.

Files and columns are in ``run.schema``. Takes plain data; loads torch only for rollouts that are
tensors.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from counterpoise.run.environment import process_facts
from counterpoise.run.files import (
    Columns,
    append_json,
    batch_file,
    sync_folder,
    write_atomically,
    write_json,
    write_table,
    write_text,
)
from counterpoise.run.own import HEAD, is_manifest, own_paths, remove_leftovers, remove_run
from counterpoise.run.read import batch_files, read_mapping
from counterpoise.run.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from counterpoise.rollouts import RolloutBatch
    from counterpoise.types import Credit

log = logging.getLogger("counterpoise.run")


def create_run(run_dir: Path, config: Mapping[str, Any] | None, facts: Mapping[str, Any]) -> None:
    """Start a run folder, what an earlier run wrote in it removed; ``manifest.json`` comes last:
    with it the folder is a run.

    Args:
        config: the recipe, for ``config.yaml``; None where there is none (an import).
        facts: of the run (method, seed, device ...), for ``manifest.json`` beside versions, commit
            and command of this process.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    remove_leftovers(run_dir)
    if is_manifest(read_mapping(run_dir / "manifest.json")):
        remove_run(run_dir)
    if config is not None:
        write_config(run_dir, config)
    write_json(
        run_dir / "manifest.json", {"schema_version": SCHEMA_VERSION, **process_facts(), **facts}
    )


def write_config(run_dir: Path, config: Mapping[str, Any]) -> None:
    """``config.yaml``."""
    text = yaml.safe_dump(dict(config), sort_keys=False)
    write_text(run_dir / "config.yaml", f"{HEAD} {SCHEMA_VERSION}\n{text}")


def write_changes(
    run_dir: Path,
    batch_number: int,
    changes: Mapping[str, tuple[Any, Any]],
    config: Mapping[str, Any],
) -> None:
    """Settings that a resumed run changes: each with its batch under ``changes`` of the manifest,
    then the whole recipe.
    """
    manifest = json.loads((run_dir / "manifest.json").read_text(encoding="utf-8"))
    before = list(manifest.get("changes", []))
    new = [
        {"batch": batch_number, "key": key, "before": stored, "now": given}
        for key, (stored, given) in changes.items()
    ]
    # a kill between the two files brings the same changes again
    manifest["changes"] = before + [change for change in new if change not in before]
    write_json(run_dir / "manifest.json", manifest)
    write_config(run_dir, config)


def write_rollouts(
    run_dir: Path, batch_number: int, rollouts: RolloutBatch, credit: Credit
) -> None:
    """``rollouts/batch_N.parquet``, as ``rollouts.read_rollouts`` takes it back."""
    from counterpoise.run.rollouts import rollout_columns

    write_rollout_columns(run_dir, batch_number, rollout_columns(batch_number, rollouts, credit))


def write_rollout_columns(run_dir: Path, batch_number: int, columns: Columns) -> None:
    """``rollouts/batch_N.parquet``: one row per rollout."""
    write_table(batch_file(run_dir, "rollouts", batch_number, ".parquet"), columns)


def write_batch(
    run_dir: Path,
    batch_number: int,
    tables: Mapping[str, Columns | None],
    manifest: Mapping[str, Any],
    timing: Mapping[str, Any],
    metrics: Mapping[str, Any],
) -> None:
    """A batch's files; metrics last, so that a batch in ``metrics.jsonl`` has all its files.

    Args:
        tables: ``rollouts`` and ``tokens``; None where the batch has no such file.
    """
    for folder, columns in tables.items():
        if columns is not None:
            write_table(batch_file(run_dir, folder, batch_number, ".parquet"), columns)
    write_plan(run_dir, batch_number, manifest)
    append_row(run_dir, "timing", batch_number, timing)
    append_row(run_dir, "metrics", batch_number, metrics)


def write_samples(run_dir: Path, batch_number: int, columns: Columns) -> None:
    """``evals/batch_N.parquet``: samples of the evaluation after N batches, one row each."""
    write_table(batch_file(run_dir, "evals", batch_number, ".parquet"), columns)


def write_tokens(run_dir: Path, batch_number: int, columns: Columns) -> None:
    """``tokens/batch_N.parquet``: one row per token."""
    write_table(batch_file(run_dir, "tokens", batch_number, ".parquet"), columns)


def write_plan(run_dir: Path, batch_number: int, manifest: Mapping[str, Any]) -> None:
    """``plan/batch_N.json``: ``Plan.manifest``."""
    path = batch_file(run_dir, "plan", batch_number, ".json")
    write_json(path, {"schema_version": SCHEMA_VERSION, **manifest})


def append_row(run_dir: Path, name: str, batch_number: int, row: Mapping[str, Any]) -> None:
    """A row of ``metrics``, ``timing`` or ``evals``."""
    append_json(run_dir / f"{name}.jsonl", {"batch": batch_number, **row})


def rewind(run_dir: Path, batch_number: int) -> None:
    """Forget what was written at or after a batch, so that a resumed run writes it again; the
    evaluation before it stays, and so does every line that cannot be read.
    """
    own_paths(run_dir)  # no folder leads out
    remove_leftovers(run_dir)
    for name, end in (
        ("metrics", batch_number),
        ("timing", batch_number),
        ("evals", 1 + batch_number),
    ):
        _rewind_lines(run_dir / f"{name}.jsonl", end)
    for folder in ("rollouts", "tokens", "plan", "evals"):
        end = batch_number + (folder == "evals")  # after so many batches
        for batch, file in batch_files(run_dir, folder).items():
            if batch >= end:
                file.unlink()
    sync_folder(run_dir)


def _rewind_lines(path: Path, end: int) -> None:
    """Drop the rows of batch ``end`` and later, and a last line that was cut off; keep the rest
    byte for byte.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    batches = [_batch_of_line(line) for line in lines]
    kept = [line for line, batch in zip(lines, batches) if batch is None or batch < end]
    if kept and not kept[-1].endswith(b"\n"):
        del kept[-1], batches[-1]
    if kept != lines:
        write_atomically(path, lambda temporary: _write_bytes(temporary, b"".join(kept)))
    unread = [at for at, batch in enumerate(batches, 1) if batch is None]
    if unread:
        log.warning(
            "--resume: %s: %d lines cannot be read, the first is line %d; they stay as they are.",
            path.name,
            len(unread),
            unread[0],
        )


def _batch_of_line(line: bytes) -> int | None:
    """The batch of a jsonl row; None if it tells none."""
    try:
        batch = json.loads(line)["batch"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return batch if type(batch) is int else None


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)
