"""Files of a run folder are whole or absent."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from counterpoise.run.files import (
    append_json,
    batch_of,
    write_atomically,
    write_folder,
    write_json,
    write_table,
)
from counterpoise.run.read import read_jsonl
from counterpoise.run.schema import SCHEMA_VERSION
from counterpoise.run.write import rewind


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})

    def full(temporary):
        temporary.write_text("half")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_atomically(path, full)
    assert json.loads(path.read_text()) == {"x": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_folder_keeps_the_old_one(tmp_path):
    path = tmp_path / "batch_1"
    write_folder(path, lambda folder: (folder / "x").write_text("good"))

    def full(folder):
        (folder / "x").write_text("half")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_folder(path, full)
    assert (path / "x").read_text() == "good"
    assert [file.name for file in tmp_path.iterdir()] == ["batch_1"]


def test_jsonl_survives_a_torn_last_line_and_numbers_that_are_not_finite(tmp_path):
    path = tmp_path / "m.jsonl"
    append_json(path, {"batch": 0, "x": 0.1 + 0.2})
    append_json(path, {"batch": 1, "x": float("nan")})
    with path.open("a") as file:
        file.write('{"batch": 2, "x"')
    assert read_jsonl(path) == [{"batch": 0, "x": 0.30000000000000004}, {"batch": 1, "x": None}]


def test_tables_carry_the_schema_version(tmp_path):
    path = tmp_path / "batch_000007.parquet"
    write_table(path, {"a": [1, 2]})
    assert pq.read_schema(path).metadata[b"counterpoise_schema"] == str(SCHEMA_VERSION).encode()
    assert batch_of(path) == 7


def test_rewind_forgets_what_came_at_or_after_the_batch(tmp_path):
    for batch_number in range(4):
        append_json(tmp_path / "metrics.jsonl", {"batch": batch_number})
        append_json(tmp_path / "evals.jsonl", {"batch": batch_number})
        write_json(tmp_path / "plan" / f"batch_{batch_number:06d}.json", {})
    rewind(tmp_path, 2)
    assert [row["batch"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1]
    assert [row["batch"] for row in read_jsonl(tmp_path / "evals.jsonl")] == [0, 1, 2]
    assert sorted(file.name for file in (tmp_path / "plan").iterdir()) == [
        "batch_000000.json",
        "batch_000001.json",
    ]
