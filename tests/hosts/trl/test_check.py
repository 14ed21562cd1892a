"""check_trl notices when TRL no longer behaves as we rely on, and ``counterpoise doctor``
says so.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
import typer
from trl import GRPOTrainer
from typer.testing import CliRunner

import counterpoise.hosts.check as check
from counterpoise.cli import doctor as cli

pytestmark = pytest.mark.hosts


def failed(checks):
    return {one.name: one for one in checks if not one.is_ok}


def test_all_is_well():
    checks = check.check_trl()
    assert failed(checks) == {}
    assert [one.name for one in checks] == [
        "trl version",
        "trl signatures",
        "trl takes (B, T) advantages",
        "trl trains on the plan's rows",
    ]


def test_a_loss_that_takes_one_advantage_a_rollout(monkeypatch):
    original = GRPOTrainer._compute_loss

    def by_rollout(self, model, inputs):
        mean = inputs["advantages"].sum(1) / inputs["completion_mask"].sum(1)
        return original(self, model, {**inputs, "advantages": mean})

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", by_rollout)
    broken = failed(check.check_trl())
    assert set(broken) == {"trl takes (B, T) advantages"}
    assert (
        "tokens got a gradient that is not their credit's"
        in broken["trl takes (B, T) advantages"].found
    )
    assert "pip install 'trl==" in broken["trl takes (B, T) advantages"].fix


def test_micro_batches_from_another_place(monkeypatch):
    """A TRL that trains on micro-batches of its own after the first: what we put into its buffer is
    not used.
    """
    original, kept = GRPOTrainer._prepare_inputs, []

    def elsewhere(self, generation_batch):
        inputs = original(self, generation_batch)
        kept.append(inputs if not kept else kept[0])
        return kept[-1]

    monkeypatch.setattr(GRPOTrainer, "_prepare_inputs", elsewhere)
    broken = failed(check.check_trl())
    assert "trained on rows" in broken["trl trains on the plan's rows"].found


def test_a_generation_under_another_name(monkeypatch):
    """A TRL that no longer calls the method that we override: there is no credit and no plan."""
    score = GRPOTrainer._generate_and_score_completions

    def renamed(self, generation_batch):
        return score(self, generation_batch)

    monkeypatch.setattr(GRPOTrainer, "_prepare_inputs", renamed)
    broken = failed(check.check_trl())
    assert set(broken) == {"trl training"}
    assert "pip install 'trl==" in broken["trl training"].fix


def test_a_changed_signature(monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_prepare_inputs", lambda self, batch, extra: None)
    broken = failed(check.check_trl())
    assert (
        "takes ('self', 'batch'), expected ('self', 'generation_batch')"
        in broken["trl signatures"].found
    )
    assert "trl training" in broken


def test_a_wrong_version(monkeypatch):
    import trl

    monkeypatch.setattr(trl, "__version__", "1.15.0")
    (only,) = check.check_trl()
    assert not only.is_ok
    assert "found 1.15.0" in only.found


def test_trl_missing(monkeypatch):
    monkeypatch.setattr(check, "is_installed", lambda package: False)
    assert check.check_trl() == [
        check.Check("trl", False, "not installed", "pip install 'counterpoise[trl]'")
    ]


def test_without_trl_the_import_says_what_to_install():
    code = (
        "import sys; sys.modules['trl'] = None\ntry:\n    import counterpoise.hosts.trl\nexcept"
        " ImportError as error:\n    print(error)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "pip install 'counterpoise[trl]'" in out


def run_doctor(*words):
    app = typer.Typer()
    app.command()(cli.doctor)
    return CliRunner().invoke(app, list(words))


def test_doctor(monkeypatch):
    monkeypatch.setattr(
        cli,
        "check_trl",
        lambda: [
            check.Check("trl version", True, "1.16.0"),
            check.Check("x", False, "gone", "do this"),
        ],
    )
    out = run_doctor("trl")
    assert out.exit_code == 1
    assert "ok      trl version: 1.16.0" in out.output
    assert "BROKEN  x: gone\n          fix: do this" in out.output
    found = json.loads(run_doctor("trl", "--json").output)
    assert found["hosts"]["trl"][1] == {
        "name": "x",
        "is_ok": False,
        "found": "gone",
        "fix": "do this",
    }
    assert found["machine"]["packages"]["trl"] == importlib.metadata.version("trl")


def test_doctor_of_a_host_that_is_not_there(monkeypatch):
    monkeypatch.setattr(cli, "is_installed", lambda package: False)
    out = run_doctor()
    assert out.exit_code == 0
    assert "not installed: pip install 'counterpoise[verl]'" in out.output


@pytest.mark.parametrize("problems", [[], ["the plug-in was not loaded. Do this."]])
def test_doctor_of_verl(problems, monkeypatch):
    """What verl's registries hold, and the proof that credit reaches its loss."""
    from counterpoise.hosts.verl import registry, selftest

    found = registry.Registration(
        "0.9.1", ["counterpoise/dapo"], ["counterpoise/dapo"], [], problems
    )
    monkeypatch.setattr(registry, "registration", lambda: found)
    monkeypatch.setattr(
        selftest, "check_credit", lambda: "the gradient of verl's loss is the credit"
    )
    monkeypatch.setattr(cli, "is_installed", lambda package: True)
    out = run_doctor("verl")
    assert out.exit_code == bool(problems)
    assert (
        "verl plug-in: verl 0.9.1: 1 estimators, 1 losses, 0 trainers of counterpoise" in out.output
    )
    assert ("fix: the plug-in was not loaded. Do this." in out.output) == bool(problems)
    assert "ok      verl loss: the gradient of verl's loss is the credit" in out.output


def test_doctor_of_an_unknown_host():
    out = run_doctor("tlr")
    assert "unknown host 'tlr'. Did you mean 'trl'" in str(out.exception)
