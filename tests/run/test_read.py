"""Run folders that are broken, incomplete, from the future or hostile: what is wrong is said, the
rest is shown, nothing outside is read.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from counterpoise.report.page import content, render, write_report
from counterpoise.run.parquet import read_columns
from counterpoise.run.read import open_run
from counterpoise.run.tables import load_run
from counterpoise.viewer.api import batch_info
from counterpoise.viewer.texts import tokenizer_file
from counterpoise.viewer.tokens import open_batch
from helpers.make_run import make_run

SMALL = {"num_batches": 3, "prompts": 2, "group_size": 4, "ledger_every": 1, "eval_every": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "whole", **SMALL)


@pytest.fixture
def run_dir(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "run"))


def test_a_whole_run_has_no_problems(whole):
    found = content([open_run(whole)])
    assert found.problems == []
    assert found.absent == {"learning": [], "signals": [], "plan": [], "credit": [], "ledger": []}


def test_a_truncated_table_is_named_and_an_earlier_one_shown(run_dir):
    file = run_dir / "tokens" / "batch_000002.parquet"
    file.write_bytes(file.read_bytes()[:100])
    found = content([open_run(run_dir)])
    assert any(
        "tokens/batch_000002.parquet cannot be read" in problem for problem in found.problems
    )
    assert found.details[0].tops.batch == 1
    assert "tokens/batch_000002.parquet cannot be read" in render(found)


def test_missing_columns_leave_their_charts_out(run_dir):
    for file in (run_dir / "tokens").iterdir():
        pq.write_table(
            pq.read_table(file).drop_columns(["cancellation", "category", "predicted"]), file
        )
    found = content([open_run(run_dir)])
    assert found.absent["ledger"] == [
        "Predicted against actual change",
        "Cancellation by sharedness (needs ledger.decompose in the recipe)",
    ]
    assert found.absent["credit"] == ["Where the credit goes"]
    assert [card.chart.name for card in found.cards["credit"]] == ["weight", "credit"]


def test_columns_of_other_types_do_not_stop_the_page(run_dir):
    for file in (run_dir / "tokens").iterdir():
        table = pq.read_table(file)
        at = table.column_names.index("credit")
        pq.write_table(table.set_column(at, "credit", pa.array(["x"] * table.num_rows)), file)
    found = content([open_run(run_dir)])
    assert "Token credit" in found.absent["credit"]
    assert [card.chart.name for card in found.cards["credit"]] == ["weight"]


def test_a_schema_from_the_future_is_said_and_shown(run_dir):
    manifest = json.loads((run_dir / "manifest.json").read_text())
    (run_dir / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 99}))
    file = run_dir / "tokens" / "batch_000002.parquet"
    table = pq.read_table(file).append_column(
        "thought_quality", pa.array([0.5] * pq.read_metadata(file).num_rows)
    )
    pq.write_table(table.replace_schema_metadata({b"counterpoise_schema": b"99"}), file)
    found = content([open_run(run_dir)])
    assert any("manifest.json has schema version 99" in problem for problem in found.problems)
    assert any(
        "tokens/batch_000002.parquet has schema version 99" in problem for problem in found.problems
    )
    assert found.cards["ledger"] and found.details[0].tops.batch == 2


def test_a_line_cut_by_a_crash_is_no_problem_and_a_broken_one_is(run_dir):
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"batch": 3, "reward/me')
    assert open_run(run_dir).problems == []
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([lines[0], "not json", *lines[1:3]]) + "\n")
    run = open_run(run_dir)
    assert run.problems == [
        "metrics.jsonl: 1 broken line(s), first at line 2; the others are shown."
    ]
    assert run.metrics["batch"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["config.yaml", "manifest.json", "metrics.jsonl"])
@pytest.mark.parametrize("text", [None, "{[", "- 1\n", "\x00\xff"])
def test_any_small_file_may_be_missing_or_broken(run_dir, name, text):
    (run_dir / name).unlink()
    if text is not None:
        (run_dir / name).write_bytes(text.encode("latin-1"))
    found = content([open_run(run_dir)])
    assert any(name in problem for problem in found.problems) or (
        name == "metrics.jsonl" and found.absent["learning"]
    )
    assert found.cards["ledger"]


ODD = [None, True, 7, -1.5, 1e400, "text", [], [1, [2]], {"a": {"b": 1}}, "\ud800", 10**40]


@pytest.mark.parametrize("odd", ODD, ids=[str(k) for k in range(len(ODD))])
def test_small_files_may_hold_any_values(run_dir, odd):
    keys = (
        "method",
        "task",
        "rollouts",
        "optimizer",
        "seed",
        "command",
        "versions",
        "commit",
        "schema_version",
        "imported_from",
    )
    (run_dir / "config.yaml").write_text(json.dumps(dict.fromkeys(keys, odd)))
    (run_dir / "manifest.json").write_text(
        json.dumps({**dict.fromkeys(keys, odd), "schema_version": 1})
    )
    for name in ("metrics.jsonl", "evals.jsonl", "timing.jsonl"):
        rows = [json.loads(line) for line in (run_dir / name).read_text().splitlines()]
        odd_rows = [{**dict.fromkeys(rows[-1], odd), "batch": 3}, dict.fromkeys(rows[-1], odd)]
        (run_dir / name).write_text("".join(json.dumps(row) + "\n" for row in [*rows, *odd_rows]))
    (run_dir / "plan" / "batch_000002.json").write_text(json.dumps({"rows": [[odd]]}))
    found = content([open_run(run_dir)])
    assert found.cards["ledger"] and found.cards["learning"]
    render(found)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "config.yaml",
            "manifest.json",
            "metrics.jsonl",
            "evals.jsonl",
            "timing.jsonl",
            "tokenizer.json",
        ),
        *(
            "tokens/batch_000002.parquet",
            "rollouts/batch_000002.parquet",
            "plan/batch_000002.json",
            "tokens",
            "rollouts",
            "plan",
        ),
    ],
)
def test_links_out_of_the_folder_are_not_followed(run_dir, tmp_path, monkeypatch, name):
    """Every file that a reader opens is noted; none lies outside the run, whatever is a
    link there.
    """
    (run_dir / "tokenizer.json").write_text("{}")
    outside = tmp_path / "outside"
    (run_dir / name).rename(outside)
    (run_dir / name).symlink_to(outside)
    opened = []
    for owner, method in ((Path, "read_text"), (pq, "ParquetFile"), (pq, "read_schema")):
        before = getattr(owner, method)
        monkeypatch.setattr(
            owner,
            method,
            lambda file, *a, before=before, **k: (opened.append(Path(file)), before(file, *a, **k))[
                1
            ],
        )
    run = open_run(run_dir)
    content([run])
    for batch in run.batches("rollouts"):
        batch_info(open_batch(run, batch))
    assert tokenizer_file(run) == (None if name == "tokenizer.json" else run_dir / "tokenizer.json")
    of_run = [file for file in opened if tmp_path in file.parents]
    assert len(of_run) > 5 and not [
        file for file in of_run if not file.resolve().is_relative_to(run_dir)
    ]


def test_a_report_folder_that_is_a_link_is_not_written_to(run_dir, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (run_dir / "report").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="leads elsewhere"):
        write_report([run_dir])
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_notebook_door_opens_with_polars(whole):
    polars = pytest.importorskip("polars")
    run = load_run(whole, engine="polars")
    assert isinstance(run.tokens(1), polars.DataFrame)
    assert (
        run.tokens(1)["delta"].to_list()
        == pd.read_parquet(whole / "tokens" / "batch_000001.parquet")["delta"].tolist()
    )
    assert run.rollouts(0)["text"].to_list() == load_run(whole).rollouts(0)["text"].tolist()
    assert run.metrics["reward/mean"].to_list() == load_run(whole).metrics["reward/mean"].tolist()


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        open_run(tmp_path)
    with pytest.raises(ValueError, match="no such run: "):
        open_run(tmp_path / "nothing")


def test_a_run_without_a_ledger_says_so(run_dir):
    shutil.rmtree(run_dir / "tokens")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if not k.startswith("ledger/")} for row in rows]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = content([open_run(run_dir)])
    assert not found.cards["ledger"] and not found.cards["credit"]
    assert "set ledger.every in the recipe" in render(found)
    assert found.details[0].samples[0].samples[0].tokens[0].text.startswith("Let us add")


def test_row_groups_that_cannot_match_are_not_read(tmp_path):
    file = tmp_path / "t.parquet"
    pq.write_table(
        pa.table({"group": [0, 0, 1, 1], "x": [1.0, 2.0, 3.0, 4.0]}), file, row_group_size=2
    )
    got = read_columns(file, ["x"], {"group": 1})
    assert got.to_pydict() == {"x": [3.0, 4.0]}
    assert read_columns(file, ["x", "nothing"]).column_names == ["x"]


def test_the_notebook_door_gives_the_files(whole):
    run = load_run(whole)
    tokens = pd.read_parquet(whole / "tokens" / "batch_000001.parquet")
    pd.testing.assert_frame_equal(run.tokens(1), tokens)
    assert len(run.tokens()) == sum(
        len(pd.read_parquet(file)) for file in (whole / "tokens").iterdir()
    )
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert run.metrics["reward/mean"].tolist() == [row["reward/mean"] for row in rows]
    assert "sample_s" in run.metrics
    assert (
        run.evals["reward_PK"].iloc[0]
        == json.loads((whole / "evals.jsonl").read_text().splitlines()[0])["reward_PK"]
    )
    assert run.rollouts(0, ["reward", "text"]).columns.tolist() == ["text", "reward"]
    with pytest.raises(ValueError, match="no tokens of batch 77"):
        run.tokens(77)
    with pytest.raises(ValueError, match="engine must be"):
        load_run(whole, engine="excel")  # pyright: ignore[reportArgumentType]


def test_the_page_lies_in_the_run_or_beside_several(whole, run_dir):
    assert write_report([run_dir])[0] == run_dir / "report" / "index.html"
    assert write_report([run_dir, whole])[0] == run_dir.parent / "report" / "index.html"


def test_a_step_that_is_not_there_is_named(whole):
    with pytest.raises(
        ValueError, match=r"no run has tokens or rollouts of batch 7. There are: 0-2"
    ):
        content([open_run(whole)], batch=7)
    assert content([open_run(whole)], batch=1).details[0].tops.batch == 1


def test_report_modules_import_without_torch():
    script = """
import sys, pkgutil, importlib
sys.modules["torch"] = None
names = []
for subject in ("report", "viewer"):
    package = importlib.import_module(f"counterpoise.{subject}")
    for module in pkgutil.walk_packages(package.__path__, f"counterpoise.{subject}."):
        importlib.import_module(module.name)
        names.append(module.name)
import counterpoise.run.tables
print(len(names))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
