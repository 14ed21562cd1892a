"""verl's discovery of plug-ins, in fresh processes: what it loads, and what ``registration`` says
when it does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip(
    "verl",
    reason="verl has its own environment: scripts/make_verl_env.sh .venv/bin/python .venv-verl",
)

import counterpoise as cp
from counterpoise.hosts.verl import registry as host
from counterpoise.hosts.verl.selftest import check_credit

pytestmark = [pytest.mark.hosts, pytest.mark.verl]

# counterpoise is not imported here: verl has to find it by the metadata of the installed package
REAL = """
import json, sys
from importlib.metadata import entry_points
import verl
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
tables = (ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, TRAINER_REGISTRY)
ours = [sorted(name for name in table if name.startswith("counterpoise/")) for table in tables]
points = entry_points(group="verl.plugins", name="counterpoise")
print(json.dumps({
    "points": [(point.dist.name, point.value) for point in points],
    "ours": ours,
    "trainer": [cls.__name__ for cls in get_trainer_cls("counterpoise/sync").__mro__[:3]],
}))
"""
LOOK = (
    "import json; from counterpoise.hosts.verl import registration;"
    " print(json.dumps(registration()._asdict()))"
)


@pytest.fixture
def look(tmp_path):
    """``registration()`` in a fresh process that finds the entry point, as an installed
    counterpoise has it.
    """
    info = tmp_path / "counterpoise_as_installed-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: counterpoise-as-installed\nVersion: 0\n"
    )
    (info / "entry_points.txt").write_text(
        "[verl.plugins]\ncounterpoise = counterpoise.hosts.verl.plugin\n"
    )

    def run(sabotage=""):
        (tmp_path / "sitecustomize.py").write_text(sabotage)
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", LOOK],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run


def test_verl_finds_the_installed_package_by_itself():
    """A process that imports verl alone, with nothing on PYTHONPATH: the names are in verl's own
    registries.
    """
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "VERL_USE_EXTERNAL_PLUGINS")
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REAL],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    names = sorted(f"counterpoise/{name}" for name in cp.methods())
    assert ["counterpoise", "counterpoise.hosts.verl.plugin"] in seen["points"]
    assert seen["ours"] == [
        names,
        names,
        ["counterpoise/colocate_async", "counterpoise/separate_async", "counterpoise/sync"],
    ]
    assert seen["trainer"] == ["CreditSync", "CreditMixin", "PPOTrainerSync"]


def test_importing_verl_registers_everything(look):
    seen = look()
    names = sorted(f"counterpoise/{name}" for name in cp.methods())
    assert seen["version"] == "0.9.1"
    assert seen["estimators"] == names and seen["losses"] == names
    assert seen["trainers"] == [
        "counterpoise/colocate_async",
        "counterpoise/separate_async",
        "counterpoise/sync",
    ]
    assert seen["problems"] == []
    assert seen["checked"].endswith("take the arguments it expects, with the tested code")


def test_a_failure_that_verl_swallowed_is_named(look):
    seen = look(sabotage="import sys; sys.modules['counterpoise.hosts.verl.loss'] = None")
    assert seen["estimators"] == seen["losses"] == []
    assert len(seen["problems"]) == 1
    assert "swallowed a failure of counterpoise.hosts.verl.plugin" in seen["problems"][0]
    assert "hosts.verl.loss" in seen["problems"][0]


def test_without_transfer_queue_estimators_and_losses_remain(look):
    seen = look(sabotage="import sys; sys.modules['transfer_queue'] = None")
    assert "counterpoise/dapo" in seen["estimators"] and "counterpoise/dapo" in seen["losses"]
    assert seen["trainers"] == []
    assert (
        "transfer_queue" in seen["problems"][0] and "verl[verl-core]==0.9.1" in seen["problems"][0]
    )


@pytest.fixture
def unloaded(monkeypatch):
    """This process as if verl had loaded no plug-in, with the entry point installed."""
    from verl.trainer.ppo import core_algos

    for registry in ("ADV_ESTIMATOR_REGISTRY", "POLICY_LOSS_REGISTRY"):
        monkeypatch.setattr(core_algos, registry, {})
    monkeypatch.setattr(
        host.importlib.metadata, "entry_points", lambda group: [SimpleNamespace(value=host.PLUGIN)]
    )
    return monkeypatch


def test_plugins_switched_off_by_the_environment(unloaded):
    unloaded.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    line = (
        "VERL_USE_EXTERNAL_PLUGINS=none keeps verl from loading counterpoise. Unset it, or add"
        " counterpoise to it."
    )
    assert host.registration().problems == [line]


def test_an_installation_without_the_entry_point(unloaded):
    unloaded.setattr(host.importlib.metadata, "entry_points", lambda group: [])
    assert "no entry point counterpoise.hosts.verl.plugin" in host.registration().problems[0]


def test_a_process_that_loaded_verl_before_counterpoise_was_there(unloaded):
    assert "Run the check in a fresh process" in host.registration().problems[0]


MISSING = """
import sys
sys.modules["verl"] = None
from counterpoise.hosts.verl import register, registration
print(registration().problems)
for call in (register, lambda: __import__("counterpoise.hosts.verl.trainer")):
    try:
        call()
    except ImportError as error:
        print(error)
"""


def test_without_verl():
    """One line, whichever module is asked first."""
    line = (
        "verl is not installed. pip install 'counterpoise[verl]' (verl 0.9.1) in an environment of"
        " its own."
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MISSING], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [str([line]), line, line]


def test_credit_reaches_verls_loss(monkeypatch):
    from verl.trainer.ppo import core_algos

    host.register()
    check_credit()
    monkeypatch.setattr(
        core_algos, "agg_loss", lambda loss_mat, loss_mask, loss_agg_mode: loss_mat.sum()
    )
    with pytest.raises(ValueError, match="credit does not reach verl's loss"):
        check_credit()
