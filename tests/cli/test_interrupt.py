"""Ctrl-C: the first ends a run after its batch, with a hint that works as printed and exit code
130; the second always ends the process.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from counterpoise.run.read import read_jsonl

SETTINGS = {
    "num_batches": 400,
    "rollouts.prompts": 2,
    "rollouts.group_size": 2,
    "rollouts.max_new_tokens": 8,
    "optimizer.updates_per_batch": 1,
    "optimizer.schedule": "constant",
    "eval.every": 0,
    "ledger.every": 0,
    "trackers": "[]",
    "project": "two words",
}
# a regular expression that backtracks without end: no Python code runs meanwhile
STUCK = """
import pathlib, re

def reward(prompt, text):
    pathlib.Path("stuck").touch()
    return float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))

class Task:
    is_trusted = True

    def prompts(self, split, seed, start=0):
        from itertools import count
        from counterpoise.types import Prompt
        return (Prompt(str(k), "What is 1 + 1?", "2") for k in count(start))

    def reward(self, prompt, text):
        return reward(prompt, text)
"""


def run_in(folder: Path, *command: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def start(tmp_path) -> Iterator:
    """``counterpoise train demo --set ...`` in an empty folder."""
    processes = []

    def begin(*options: str) -> subprocess.Popen[str]:
        sets = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "counterpoise", "train", "demo", *sets, *options]
        process = run_in(tmp_path, *command)
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 600
    while not path.is_file() or (path.suffix and not path.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


def test_ctrl_c_ends_the_run_and_its_hint_continues_it(start, tmp_path):
    process = start()
    wait_for(tmp_path / "runs" / "demo" / "metrics.jsonl", process)
    process.send_signal(signal.SIGINT)
    said, noise = process.communicate(timeout=600)
    assert process.returncode == 130, noise
    assert "stopping after this batch" in noise and "Traceback" not in noise
    (hint,) = [line for line in said.splitlines() if "continue with: " in line]
    command = shlex.split(hint.partition("continue with: ")[2])
    assert "--resume" in command and "project=two words" in command
    num = len(read_jsonl(tmp_path / "runs" / "demo" / "metrics.jsonl"))
    again = run_in(tmp_path, *command, "--set", f"num_batches={num}")
    _, noise = again.communicate(timeout=600)
    assert again.returncode == 0, noise


def test_the_second_ctrl_c_ends_a_process_that_is_stuck(start, tmp_path):
    (tmp_path / "stuck_task.py").write_text(textwrap.dedent(STUCK))
    process = start("--set", "task=stuck_task:Task")
    wait_for(tmp_path / "stuck", process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, noise = process.communicate(timeout=600)
    assert process.returncode == 130 and "Traceback" not in noise


def test_ctrl_c_in_any_other_moment_is_130_without_a_traceback(tmp_path):
    code = textwrap.dedent("""
        import sys
        from counterpoise import cli
        import counterpoise.cli.methods as module
        def methods(name: str) -> None:
            raise KeyboardInterrupt
        module.methods = methods
        sys.argv = ["counterpoise", "methods", "grpo"]
        cli.main()
    """)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 130 and result.stderr == "counterpoise: interrupted\n"
