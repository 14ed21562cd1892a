"""A sweep: all runs, one page; it goes on where it stopped; a run that fails stops no other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from counterpoise.cli import dispatch
from counterpoise.cli.sweep import spread
from counterpoise.run.read import checkpoints, read_jsonl

SETTINGS = [
    *("num_batches=3", "rollouts.prompts=2", "rollouts.group_size=2"),
    *("rollouts.max_new_tokens=32", "optimizer.updates_per_batch=1", "eval.prompts=4"),
    *("eval.every=3", "ledger.every=0", "trackers=[]", "checkpoint_every=1", "keep_checkpoints=2"),
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder, and runs that import what this process imports."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.chdir(tmp_path)


def sweep(capfd, *args: str) -> tuple[int, str, str]:
    sets = [word for text in SETTINGS for word in ("--set", text)]
    with pytest.raises(SystemExit) as end:
        dispatch(["sweep", "demo", *args, *sets])
    said = capfd.readouterr()
    return int(end.value.code or 0), said.out, said.err


def test_options_of_several_words():
    args = ["demo", "--methods", "a", "b", "--seeds", "0", "--set", "x=1", "--json"]
    assert spread(args, ["--methods", "--seeds"]) == [
        *("demo", "--methods", "a", "--methods", "b", "--seeds", "0", "--set", "x=1", "--json")
    ]


MOODY = """
def rule(credit_NT, batch):
    if len(batch.reward_N) > 2:
        raise RuntimeError("not today")
    return credit_NT
"""


def test_a_sweep_trains_compares_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capfd):
    """A run that fails is reported and stops no other."""
    (tmp_path / "moody.py").write_text(MOODY)
    monkeypatch.syspath_prepend(tmp_path)
    bad, args = "{name: grpo, credit: ['moody:rule']}", ("--seeds", "0", "--jobs", "2")
    code, out, err = sweep(capfd, "--methods", bad, "grpo", "rloo", *args)
    assert code == 1
    (failed,) = [line for line in err.splitlines() if "failed: " in line]
    assert "not today" in failed and "moody.py:" in failed
    runs = tmp_path / "runs" / "demo-sweep"
    folders = [runs / f"{name}_plan_query_preserved-seed0" for name in ("grpo", "rloo")]
    assert all(len(read_jsonl(folder / "metrics.jsonl")) == 3 for folder in folders)
    assert "grpo, plan query_preserved" in out and (runs / "report" / "index.html").is_file()

    # as a kill before the last checkpoint would leave it
    before = [(folder / "metrics.jsonl").read_bytes() for folder in folders]
    kept = (folders[0] / "metrics.jsonl").stat().st_mtime_ns
    shutil.rmtree(folders[1] / "checkpoints" / "batch_000003")
    (folders[1] / "note.txt").write_text("a new run would not keep this")
    args = ("--methods", "grpo", "rloo", *args)
    code, out, err = sweep(capfd, *args, "--json")
    assert code == 0 and "1 of 2 runs are finished" in err
    assert json.loads(out)["finished"] == [str(folder.relative_to(tmp_path)) for folder in folders]
    assert (folders[0] / "metrics.jsonl").stat().st_mtime_ns == kept
    assert before == [(folder / "metrics.jsonl").read_bytes() for folder in folders]
    assert (folders[1] / "note.txt").is_file()

    code, out, err = sweep(capfd, *args, "--set", "optimizer.lr=0.5")
    assert code == 2 and "was made with another optimizer" in err


def test_a_wrong_method_is_said_before_anything_runs(tmp_path, capfd):
    code, _, err = sweep(capfd, "--methods", "grpo", "dlta")
    assert code == 2 and "unknown method 'dlta'. Did you mean 'delta'?" in err
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_stops_the_runs_and_the_sweep_goes_on_later(tmp_path):
    sets = [word for text in SETTINGS for word in ("--set", text)]
    command = [sys.executable, "-m", "counterpoise", "sweep", "demo", "--methods", "grpo"]
    options = ["--seeds", "0", "1", *sets, "--set", "num_batches=500"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    run_dir = tmp_path / "runs" / "demo-sweep" / "grpo_plan_query_preserved-seed0"
    while not (run_dir / "metrics.jsonl").is_file():
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "failed" not in err
    assert "the same command goes on where it stopped" in err
    assert checkpoints(run_dir) and not run_dir.with_name(f"{run_dir.name[:-1]}1").exists()
