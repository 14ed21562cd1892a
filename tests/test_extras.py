"""Each extra of the package is complete: the commands that it promises run with every other
third-party package hidden; without it one line says what to install.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.make_run import make_run

pytest.importorskip("tomllib", reason="needs Python 3.11")
ROOT = Path(__file__).parents[1]
V1_RUN = ROOT / "tests" / "run" / "v1_run"
SCRIPT = ROOT / "tests" / "helpers" / "only_extra.py"
TINY = {
    "num_batches": 2,
    "rollouts.prompts": 4,
    "rollouts.group_size": 4,
    "rollouts.max_new_tokens": 64,
    "optimizer.updates_per_batch": 2,
    "eval.prompts": 4,
    "ledger.every": 1,
    "checkpoint_every": 1,
    "keep_every": 1,
}


class Result(NamedTuple):
    code: int
    out: str
    err: str


# several commands in one process: most of its time are the imports
RUN = """
import contextlib, io, json, sys
from counterpoise.cli import main
for args in json.loads(sys.argv[3]):
    sys.argv[1:], code, out, err = args, 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def commands(extra: str, *lists: list[object], then: str = "") -> list[Result]:
    """``counterpoise ARGS`` for each list of arguments, where only ``extra`` is installed; then
    Python code.
    """
    args = json.dumps([[str(word) for word in words] for words in lists])
    python = [sys.executable, str(SCRIPT), extra, RUN + then, args]
    with tempfile.TemporaryDirectory() as empty:  # no run of an earlier command lies there
        process = subprocess.run(python, capture_output=True, text=True, timeout=600, cwd=empty)
    assert process.returncode == 0, process.stderr
    return [Result(*json.loads(line)) for line in process.stdout.splitlines()]


def check_commands(extra: str, *lists: list[object], then: str = "") -> list[Result]:
    """The same, and each of them works."""
    results = commands(extra, *lists, then=then)
    assert [result.code for result in results] == [0] * len(lists), [r.err for r in results]
    return results


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run") / "a", num_batches=2, prompts=2, group_size=2)


def test_the_core_answers_without_any_extra():
    check_commands("", ["--help"], ["--version"], ["methods"])


DEMO = ROOT / "recipes" / "demo.yaml"
MISSING = {
    "": [
        (["train", "x.yaml"], "train needs the package 'typer'. Install it: pip install"),
        (["methods", "dapo"], "pip install 'counterpoise[cli]'"),
        (["init"], "pip install 'counterpoise[cli]'"),
    ],
    "cli": [
        (["report", V1_RUN], "pip install 'counterpoise[report]'"),
        (["train", "demo"], "pip install 'counterpoise[train]'"),
        (["audit", V1_RUN], "pip install 'counterpoise[report]'"),
        (["import", "trl", "x", "--out", "y"], "pip install 'counterpoise[report]'"),
        (["sweep", "demo", "--methods", "grpo"], "pip install 'counterpoise[train]'"),
    ],
    "trl": [
        (["view", V1_RUN], "pip install 'counterpoise[report]'"),
        (["train", "demo"], "'tensorboard' is not installed. pip install tensorboard"),
    ],
    "report": [(["train", DEMO], "pip install 'counterpoise[train]'")],
}


@pytest.mark.parametrize("extra", MISSING)
def test_what_is_missing_is_one_line(extra):
    results = commands(extra, *(args for args, _ in MISSING[extra]))
    for (args, line), result in zip(MISSING[extra], results, strict=True):
        assert result.code == 2, args
        assert "Traceback" not in result.err and line in result.err.splitlines()[-1], args


def test_cli_alone_shows_a_method_writes_a_recipe_and_sees_the_doctor(tmp_path):
    *_, doctor = check_commands(
        "cli", ["methods", "delta"], ["init", tmp_path / "mine"], ["doctor"]
    )
    assert "report, compare, view, audit, import need more packages" in doctor.out


def test_report_alone_reports_compares_views_audits_and_imports(run_dir, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "step": [4, 4],
        "prompt": ["a?", "a?"],
        "completion": ["one two", "one three"],
        "right": [1.0, 0.0],
        "advantage": [1.0, -1.0],
    }
    pq.write_table(pa.table(columns), tmp_path / "completions_00004.parquet")
    check_commands(
        "report",
        ["audit", run_dir],
        ["import", "trl", tmp_path, "--out", tmp_path / "imported"],
        ["view", tmp_path / "imported", "--export", tmp_path / "imported_pages"],
        ["report", run_dir, "--out", tmp_path / "page.html"],
        ["compare", run_dir, "--no-page"],
        ["view", run_dir, "--export", tmp_path / "pages"],
        then="import counterpoise.viewer.server, uvicorn",
    )
    assert (tmp_path / "page.html").is_file() and (tmp_path / "pages" / "index.html").is_file()


def test_train_alone_trains_evaluates_probes_and_says_what_report_needs(tmp_path):
    settings = [word for key, value in TINY.items() for word in ("--set", f"{key}={value}")]
    run_dir = tmp_path / "run"
    small = ["--prompts", 2, "--samples", 2, "--set", "num_batches=1", "--out", tmp_path / "arena"]
    train, *_, arena = check_commands(
        "train",
        ["train", DEMO, *settings, "--set", f"run_dir={run_dir}"],
        ["eval", run_dir, "--prompts", 4],
        ["audit", run_dir],
        ["probe", run_dir, "--probe", "flips"],
        ["replay", run_dir, "--batch", 1, "--method", "dapo", "--method", "delta"],
        ["arena", "--methods", "grpo", "psr", "--seeds", 2, "--evaluations", 1, *small],
    )
    assert "no page, plotly is not installed: pip install 'counterpoise[report]'" in arena.out
    assert "report and view need more packages: pip install 'counterpoise[report]'" in train.out
