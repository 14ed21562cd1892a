"""Every file carries its schema version, and folders of version 1 still open.

``v1_run`` was written by the trainer of version 1: two batches, the files of the first.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml

from counterpoise.cli import main
from counterpoise.probes.audit import audit_plans
from counterpoise.run import write
from counterpoise.run.read import batch_files, open_run, read_jsonl
from counterpoise.run.schema import PART_PREFIX, ROLLOUT_COLUMNS, SCHEMA_VERSION, TOKEN_COLUMNS
from counterpoise.run.tables import load_run

V1 = Path(__file__).parent / "v1_run"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def v1(tmp_path):
    return Path(shutil.copytree(V1, tmp_path / "v1"))


def run_command(monkeypatch, *args):
    """``counterpoise ARGS`` in this process; the exit code."""
    monkeypatch.setattr(sys, "argv", ["counterpoise", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_every_file_carries_the_version(tmp_path):
    write.create_run(tmp_path, {"seed": 0}, {"seed": 0, "device": "cpu"})
    write.write_rollout_columns(tmp_path, 3, {"reward": [1.0]})
    write.write_tokens(tmp_path, 3, {"token_id": [1]})
    write.write_plan(tmp_path, 3, {"rows": [[0]]})
    for name in ("metrics", "timing", "evals"):
        write.append_row(tmp_path, name, 3, {"x": 1.0})
    write.rewind(tmp_path, 3)
    write.append_row(tmp_path, "metrics", 3, {"x": 1.0})
    versions = {}
    for file in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        if file.suffix == ".yaml":
            versions[file.name] = file.read_text().splitlines()[0].split()[-1]
        elif file.suffix == ".parquet":
            versions[file.name] = pq.read_schema(file).metadata[b"counterpoise_schema"].decode()
        elif file.read_text():
            versions[file.name] = str(json.loads(file.read_text())["schema_version"])
    assert versions == dict.fromkeys(
        ("config.yaml", "manifest.json", "evals.jsonl", "metrics.jsonl"), str(SCHEMA_VERSION)
    )
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"batch": 3, "x": 1.0}]
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"seed": 0}


def test_batch_files_carry_the_version(tmp_path):
    write.write_rollout_columns(tmp_path, 3, {"reward": [1.0]})
    write.write_tokens(tmp_path, 3, {"token_id": [1]})
    write.write_plan(tmp_path, 3, {"rows": [[0]]})
    for folder in ("rollouts", "tokens"):
        metadata = pq.read_schema(batch_files(tmp_path, folder)[3]).metadata
        assert metadata[b"counterpoise_schema"] == str(SCHEMA_VERSION).encode()
    plan = json.loads(batch_files(tmp_path, "plan")[3].read_text())
    assert plan == {"schema_version": SCHEMA_VERSION, "rows": [[0]]}


def test_small_files_of_version_1_read_under_the_names_of_now():
    run = open_run(V1)
    assert run.problems == []
    assert run.config["num_batches"] == 2 and "num_steps" not in run.config
    assert run.config["optimizer"]["updates_per_batch"] == 2
    assert "steps_per_batch" not in run.config["optimizer"]
    assert run.metrics["batch"].tolist() == run.timing["batch"].tolist() == [0, 1]
    assert run.metrics["optimizer/num_updates"].tolist() == [2, 2]
    assert [row["batch"] for row in run.evals] == [0, 1, 2]
    plan = run.plan(0)
    assert plan is not None and plan["batch"] == 0 and len(plan["rows"]) == 2
    assert not any("step" in key for key in (*run.metrics, *run.timing, *run.evals[0], *plan))


def test_tables_of_version_1_read_under_the_names_of_now():
    run = load_run(V1)
    tokens, rollouts = run.tokens(batch=0), run.rollouts(batch=0)
    parts = {name for name in tokens if name.startswith(PART_PREFIX)}
    assert set(tokens) - parts == set(TOKEN_COLUMNS) - {"own", "others", "sampler_gap"} and parts
    assert set(rollouts) == set(ROLLOUT_COLUMNS)
    stored = pd.read_parquet(V1 / "tokens" / "step_000000.parquet")
    for name, was in (
        ("token_id", "token_ids"),
        ("update", "optimizer_step"),
        ("credit", "advantages"),
        ("ratio", "importance_ratio"),
        ("own_head", "own"),
        ("trainer_logp_after", "trainer_logprobs_after"),
    ):
        pd.testing.assert_series_equal(tokens[name], stored[was], check_names=False)
    some = run.folder.table("tokens", 0, ("credit", "group"), equal={"group": 1})
    assert some is not None and some.column_names == ["group", "credit"]
    assert some["credit"].to_pylist() == stored[stored["group"] == 1]["advantages"].tolist()


def test_the_ledger_of_version_2_reads_under_the_names_of_now(tmp_path):
    """``own`` was the head's part, ``coupling`` what that left over, ``shared`` two rollouts."""
    write.create_run(tmp_path, {"seed": 0}, {"seed": 0})
    write.write_tokens(
        tmp_path, 0, {"position": [0], "predicted": [3.0], "own": [1.0], "coupling": [2.0]}
    )
    file = batch_files(tmp_path, "tokens")[0]
    table = pq.read_table(file)
    pq.write_table(table.replace_schema_metadata({"counterpoise_schema": "2"}), file)
    row = {"schema_version": 2, "batch": 0, "ledger/entropy/shared": 1.0, "ledger/tax/shared": 2.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    run = load_run(tmp_path)
    assert list(run.tokens(0)) == ["position", "predicted", "own_head"]
    assert run.folder.columns("tokens", 0) == ["position", "predicted", "own_head"]
    assert list(run.metrics) == ["batch", "ledger/entropy/common", "ledger/tax/shared"]
    assert run.problems == []


@pytest.mark.parametrize("name", ["claims_bundled", "smollm2_asdiv_h200"])
def test_results_of_version_1_open(name):
    run = open_run(RESULTS / name)
    assert run.problems == []
    assert len(run.metrics) and len(run.timing) and len(run.evals)
    assert run.config["num_batches"] == len(run.metrics)


def test_report_view_compare_and_audit_take_version_1(v1, tmp_path, monkeypatch, capsys):
    other = shutil.copytree(v1, tmp_path / "other")
    for command in (
        ["report", v1, "--out", tmp_path / "page.html"],
        ["view", v1, "--export", tmp_path / "export", "--batch", 0],
        ["compare", v1, other, "--no-page", "--json"],
        ["audit", v1],
    ):
        assert run_command(monkeypatch, *command) in (0, None), command
    assert "as trained" in capsys.readouterr().out
    assert "cannot be read" not in (tmp_path / "page.html").read_text()
    assert (tmp_path / "export" / "index.html").is_file()
    assert audit_plans(v1)["num_updates"] == 2


def test_probe_replay_and_resume_of_version_1_say_what_to_do(v1, monkeypatch, capsys):
    recipe = Path(__file__).parents[2] / "recipes" / "demo.yaml"
    for command in (
        ["probe", v1, "--probe", "flips"],
        ["replay", v1, "--batch", 0, "--method", "dapo", "--method", "delta"],
        ["train", recipe, "--resume", "--set", f"run_dir={v1}"],
    ):
        assert run_command(monkeypatch, *command) == 2
        said = capsys.readouterr().err
        assert "was written in schema version 1" in said and "train it again" in said
        assert len(said.strip().splitlines()) == 1


def test_opening_a_run_loads_neither_torch_nor_pandas_nor_pyarrow():
    script = (
        f"import sys, counterpoise; run = counterpoise.load_run({str(V1)!r}); run.config,"
        " run.batches('tokens'); print(sorted({'torch', 'pandas', 'pyarrow', 'numpy'} &"
        " set(sys.modules)));"
        " run.metrics, run.tokens(0); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["[]", "False"]
