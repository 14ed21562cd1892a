"""The run folder of a TRL training, as a user meets it: its title, and what ``eval`` says."""

from __future__ import annotations

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
from counterpoise import cli
from counterpoise.report.page import content
from counterpoise.report.runs import group_runs
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


def test_a_training_that_starts_anew_replaces_the_account_that_is_there(tmp_path, caplog):
    args = {"ledger_every": 1, "max_steps": 2}
    trl_tiny.ours(tmp_path, args={**args, "method": "dapo", "max_steps": 8}).train()
    trl_tiny.ours(tmp_path, args={**args, "method": "rloo"}).train()
    run = open_run(tmp_path / "counterpoise")
    assert (run.config["method"]["name"], run.batches("rollouts")) == ("rloo", [0])
    assert [row["batch"] for row in run.metric_rows] == [0]
    assert "account of an earlier training is replaced" in caplog.text


def test_a_resumed_training_goes_on_where_its_checkpoint_was(tmp_path):
    args = {"method": "dapo", "ledger_every": 1, "max_steps": 8}
    args |= {"save_strategy": "steps", "save_steps": 4}
    trl_tiny.ours(tmp_path, args=args).train()
    changed = {**args, "max_grad_norm": 0.5, "learning_rate": 1e-3}
    trl_tiny.ours(tmp_path, args=changed).train(str(tmp_path / "checkpoint-4"))
    run = open_run(tmp_path / "counterpoise")
    assert [row["batch"] for row in run.metric_rows] == [0, 1]
    assert run.config["trl"]["max_grad_norm"] == 0.5
    assert run.manifest["changes"] == [
        {"batch": 1, "key": "optimizer.lr", "before": 5e-3, "now": 1e-3},
        {"batch": 1, "key": "trl.max_grad_norm", "before": None, "now": 0.5},
    ]


def test_runs_are_seeds_of_one_setting_only_where_all_of_trls_settings_are_equal(tmp_path):
    settings = {
        "first": {"seed": 1, "success": 0.25, "plan": "reward_balanced"},
        "second": {"seed": 2, "success": 0.25, "plan": "reward_balanced", "logging_steps": 2},
        "loss": {"loss_type": "grpo"},
        "kept": {"method": "dapo", "method_loss": False, "method_advantage": False},
        "reward": {"reward_funcs": [trl_tiny.graded, lambda completions, **_: [0.0] * 32]},
    }
    runs = {}
    for name, more in settings.items():
        funcs = {key: more.pop(key) for key in ["reward_funcs"] if key in more}
        args = {"method": "uniform", "ledger_every": 8, "max_steps": 1, **more}
        trl_tiny.ours(tmp_path / name, args=args, **funcs).train()
        runs[name] = open_run(tmp_path / name / "counterpoise")
    assert [len(group.runs) for group in group_runs(list(runs.values()))] == [2, 1, 1, 1]
    assert [runs[name].success for name in ("first", "loss")] == [0.25, 0.5]
    assert runs["loss"].config["trl"]["loss_type"] == "grpo"
    assert not {"loss", "reduction", "advantage"} & runs["kept"].config["method"].keys()
    assert runs["kept"].config["trl"]["method_loss"] is False
