"""Each extra of the package is complete: the commands that it promises run with every other
third-party package hidden; without it one line says what to install.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def command(extra: str, *args: object) -> subprocess.CompletedProcess[str]:
    """``counterpoise ARGS`` where only ``extra`` is installed."""
    code = (
        f"import sys; from counterpoise.cli import main; sys.argv[1:] = {[*map(str, args)]}; main()"
    )
    python = [sys.executable, str(SCRIPT), extra, code]
    return subprocess.run(python, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run") / "a", num_batches=2, prompts=2, group_size=2)


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["methods"]])
def test_the_core_answers_without_any_extra(args):
    result = command("", *args)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("extra", "args", "line"),
    [
        ("", ["train", "x.yaml"], "train needs the package 'typer'. Install it: pip install"),
        ("", ["methods", "dapo"], "pip install 'counterpoise[cli]'"),
        ("cli", ["report", "x"], "pip install 'counterpoise[report]'"),
        ("cli", ["train", "demo"], "pip install 'counterpoise[train]'"),
        ("cli", ["audit", V1_RUN], "pip install 'counterpoise[report]'"),
        ("cli", ["import", "trl", "x", "--out", "y"], "pip install 'counterpoise[report]'"),
        ("cli", ["sweep", "demo", "--methods", "grpo"], "pip install 'counterpoise[train]'"),
        ("", ["init"], "pip install 'counterpoise[cli]'"),
        ("trl", ["view", "x"], "pip install 'counterpoise[report]'"),
        ("trl", ["train", "demo"], "'tensorboard' is not installed. pip install tensorboard"),
        ("report", ["train", ROOT / "recipes" / "demo.yaml"], "pip install 'counterpoise[train]'"),
    ],
)
def test_what_is_missing_is_one_line(extra, args, line):
    result = command(extra, *args)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr and line in result.stderr.splitlines()[-1]


def test_cli_shows_a_method():
    result = command("cli", "methods", "delta")
    assert result.returncode == 0, result.stderr


def test_cli_alone_writes_a_recipe_and_sees_the_doctor(tmp_path):
    result = command("cli", "init", tmp_path / "mine")
    assert result.returncode == 0, result.stderr
    result = command("cli", "doctor")
    assert result.returncode == 0, result.stderr
    assert "report, compare, view, audit, import need more packages" in result.stdout


def test_report_alone_audits_and_imports(run_dir, tmp_path):
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
    for args in (
        ["audit", run_dir],
        ["import", "trl", tmp_path, "--out", tmp_path / "imported"],
        ["view", tmp_path / "imported", "--export", tmp_path / "pages"],
    ):
        result = command("report", *args)
        assert result.returncode == 0, result.stderr


def test_report_alone_reports_compares_and_views(run_dir, tmp_path):
    for args in (
        ["report", run_dir, "--out", tmp_path / "page.html"],
        ["compare", run_dir, "--no-page"],
        ["view", run_dir, "--export", tmp_path / "pages"],
    ):
        result = command("report", *args)
        assert result.returncode == 0, result.stderr
    assert (tmp_path / "page.html").is_file() and (tmp_path / "pages" / "index.html").is_file()
    served = "import counterpoise.viewer.server, uvicorn"
    subprocess.run([sys.executable, str(SCRIPT), "report", served], check=True, timeout=300)


def test_train_alone_trains_evaluates_probes_and_says_what_report_needs(tmp_path):
    settings = [word for key, value in TINY.items() for word in ("--set", f"{key}={value}")]
    run_dir = tmp_path / "run"
    recipe = ROOT / "recipes" / "demo.yaml"
    result = command("train", "train", recipe, *settings, "--set", f"run_dir={run_dir}")
    assert result.returncode == 0, result.stderr
    assert "report and view need more packages: pip install 'counterpoise[report]'" in result.stdout
    for args in (
        ["eval", run_dir, "--prompts", 4],
        ["audit", run_dir],
        ["probe", run_dir, "--probe", "flips"],
        ["replay", run_dir, "--batch", 1, "--method", "dapo", "--method", "delta"],
    ):
        result = command("train", *args)
        assert result.returncode == 0, result.stderr
