"""The run folder of a TRL training, as a user meets it: its title, and what ``eval`` says."""

from __future__ import annotations

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
from counterpoise import cli
from counterpoise.report.page import content
from counterpoise.run.find import runs_below
from counterpoise.run.read import open_run
from counterpoise.viewer.api import run_info
from helpers import trl_tiny

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "gsm8k-seed3"
    args = {"method": "delta", "plan": "query_preserved", "ledger_every": 1, "max_steps": 4}
    args |= {"save_strategy": "steps", "save_steps": 4}
    trl_tiny.ours(folder, args=args).train()
    return folder


def test_report_and_viewer_have_the_run_s_own_name_and_method(output):
    run = open_run(output / "counterpoise")
    page = content([run])
    assert page.title == "gsm8k-seed3"
    assert page.groups[0].label == "delta, plan query_preserved"
    assert (run_info(run)["name"], run_info(run)["method"]) == ("gsm8k-seed3", page.groups[0].label)


def test_the_name_that_trl_was_told(tmp_path):
    args = {"method": "dapo", "run_name": "first try", "ledger_every": 1, "max_steps": 1}
    trl_tiny.ours(tmp_path, args=args).train()
    assert open_run(tmp_path / "counterpoise").name == "first try"


def test_a_folder_of_trainings_lists_them(output):
    assert runs_below(output.parent) == {"gsm8k-seed3": output / "counterpoise"}


@pytest.mark.parametrize("more", [[], ["--config", "demo"]], ids=["alone", "with a recipe"])
def test_eval_says_what_to_do(output, more, capsys):
    """One line; the command in it names the checkpoint that TRL wrote."""
    with pytest.raises(SystemExit) as end:
        cli.dispatch(["eval", str(output / "counterpoise"), *more])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "a training inside trl" in line
    assert f"counterpoise eval {output / 'checkpoint-4'} --config" in line
