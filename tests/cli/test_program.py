"""Commands that are printed work as printed, wherever the program was called from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoise.cli import main
from counterpoise.cli.show import program


@pytest.fixture
def script(tmp_path, monkeypatch) -> Path:
    file = tmp_path / "project" / ".venv" / "bin" / "counterpoise"
    file.parent.mkdir(parents=True)
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(sys, "argv", [".venv/bin/counterpoise", "train"])
    return file


def test_a_program_that_is_on_the_path_goes_by_its_name(script, monkeypatch):
    monkeypatch.setenv("PATH", str(script.parent))
    assert program() == "counterpoise"


def test_one_that_is_not_goes_by_its_path(script, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert program() == ".venv/bin/counterpoise"


def test_another_one_on_the_path_is_not_meant(script, monkeypatch, tmp_path):
    other = tmp_path / "counterpoise"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == ".venv/bin/counterpoise"


def test_python_m(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/somewhere/counterpoise/__main__.py", "train"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert program() == f"{sys.executable} -m counterpoise"
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert program() == "python -m counterpoise"


@pytest.mark.parametrize(
    ("own", "after"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise(
    own, after, monkeypatch, capsys
):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that the end of the test puts back what was there
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["counterpoise", "--version"])
    main()
    assert capsys.readouterr().out and os.environ.get("GOMP_SPINCOUNT") == after


def test_torch_is_not_there_before_it_is_said():
    """The policy is read when torch loads."""
    asked = "import sys; from counterpoise.cli import main; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"


@pytest.mark.parametrize("package", ["counterpoise.arena", "counterpoise.hosts"])
def test_torchao_does_not_say_which_kernels_it_lacks(package):
    """Also in processes that the command line did not start."""
    code = (
        f"import logging, {package}\n"
        "logging.getLogger('torchao').warning('Failed to load /x.so: no')\n"
        "logging.getLogger('torchao').warning('something else')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stderr.splitlines() == ["something else"]
