"""Run folders from elsewhere, spoiled: every page and table is made, or one line says why not."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from fuzz.mutate import fault, mutate_bytes, mutate_value
from helpers.make_run import make_run
from helpers.probe_run import small_run


def fuzz(seed: int | str, num: int) -> dict[str, str]:
    """Faults of ``num`` spoiled folders under everything that reads one; empty is the goal."""
    return _fuzz("folders", seed, num, lambda path: make_run(path, num_batches=3), READERS)


def fuzz_checkpoints(seed: int | str, num: int) -> dict[str, str]:
    """The same for folders with checkpoints, under what loads a model from one."""
    return _fuzz("checkpoints", seed, num, small_run, {"scene": load_scene})


def _fuzz(
    name: str, seed: int | str, num: int, make: Any, readers: dict[str, Any]
) -> dict[str, str]:
    faults: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(make(Path(folder) / "whole"))
        for case in range(num):
            rng = random.Random(f"{name}/{seed}/{case}")
            path = Path(folder) / "run"
            shutil.copytree(whole, path)
            spoiled = [spoil(path, rng) for _ in range(rng.choice((1, 1, 2)))]
            for reader, read in readers.items():
                problem = fault(lambda read=read, path=path: read(path))
                if problem:
                    faults.setdefault(problem, f"case {seed}/{case}, {reader}, {spoiled}")
            shutil.rmtree(path)
    return faults


def spoil(path: Path, rng: random.Random) -> str:
    """Spoil one file of the folder; says which and how."""
    files = sorted(file for file in path.rglob("*") if file.is_file() or file.is_symlink())
    file = rng.choice(files)
    how = rng.choice(("bytes", "value", "value", "value", "remove", "folder", "link"))
    if how == "value" and file.suffix in SPOILERS:
        try:
            SPOILERS[file.suffix](file, rng)
        except Exception:  # spoiled before
            file.write_bytes(b"")
    elif how in ("remove", "folder", "link"):
        file.unlink()
        if how == "folder":
            file.mkdir()
        elif how == "link":
            file.symlink_to(rng.choice(("/etc/passwd", "nowhere", str(file))))
    else:
        file.write_bytes(mutate_bytes(file.read_bytes(), rng))
    return f"{file.relative_to(path)}: {how}"


def _json(file: Path, rng: random.Random) -> None:
    file.write_text(_dump(mutate_value(json.loads(file.read_text()), rng)))


def _jsonl(file: Path, rng: random.Random) -> None:
    lines = file.read_text().splitlines()
    at = rng.randrange(len(lines))
    lines[at] = _dump(mutate_value(json.loads(lines[at]), rng))
    file.write_text("\n".join(lines) + "\n")


def _yaml(file: Path, rng: random.Random) -> None:
    file.write_text(yaml.safe_dump(mutate_value(yaml.safe_load(file.read_text()), rng)))


def _dump(value: Any) -> str:
    return json.dumps(value, default=str, skipkeys=True)


def _parquet(file: Path, rng: random.Random) -> None:
    """A column left out, doubled, renamed, of another type, without values, or no rows at all."""
    table = pq.read_table(file)
    at = rng.randrange(table.num_columns)
    name, column = table.column_names[at], table.column(at)
    how = rng.choice(("drop", "double", "rename", "nulls", "strings", "lists", "rows", "floats"))
    if how == "drop":
        table = table.remove_column(at)
    elif how == "double":
        table = table.append_column(name, column)
    elif how == "rename":
        table = table.rename_columns([f"{n}x" if n == name else n for n in table.column_names])
    elif how == "rows":
        table = table.slice(0, rng.choice((0, 1)))
    else:
        values = {
            "nulls": pa.nulls(len(column)),
            "strings": pa.array(["x"] * len(column)),
            "lists": pa.array([[1.5, None]] * len(column)),
            "floats": pa.array([rng.choice((float("nan"), -1e308, 2.5))] * len(column)),
        }
        table = table.set_column(at, name, values[how])
    pq.write_table(table, file)


SPOILERS = {".json": _json, ".jsonl": _jsonl, ".yaml": _yaml, ".parquet": _parquet}


def write_page(path: Path) -> None:
    from counterpoise.report.page import write_report

    write_report([path, path], path / "page.html")


def read_tables(path: Path) -> None:
    import counterpoise as cp

    run = cp.load_run(path)
    _ = run.metrics, run.evals, run.problems, str(run)
    for table in ("rollouts", "tokens"):
        for batch in run.batches(table):
            getattr(run, table)(batch)


def view_tokens(path: Path) -> None:
    from counterpoise.run.read import open_run
    from counterpoise.viewer import api
    from counterpoise.viewer.tokens import open_batch

    run = open_run(path)
    info = api.run_info(run)
    json.dumps(info, allow_nan=False)
    for batch in run.batches("rollouts"):
        tokens = open_batch(run, batch)
        page = api.batch_info(tokens)
        json.dumps(page, allow_nan=False)
        for name in page["columns"]:
            api.pack_column(tokens, 0, name if isinstance(name, str) else name["name"])
        json.dumps(api.token(tokens, 0, 0), allow_nan=False)


def audit(path: Path) -> None:
    from counterpoise.probes.audit import audit_plans

    audit_plans(path)


READERS = {"page": write_page, "tables": read_tables, "viewer": view_tokens, "audit": audit}


def load_scene(path: Path) -> None:
    from counterpoise.probes.scene import open_scene

    open_scene(path, 1)
